"""Certified bounds where a search over frequencies could go wrong; see test_lipschitz.py for layers at large."""

import math

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from solver_plugins.errors import WeightError
from solver_plugins.operators import Geometry, lipschitz_from_kernel
from solver_plugins.operators.krylov import lanczos_estimates
from tests.operators.references import supremum_from_below


def bound(kernel: torch.Tensor, stride: int = 1, groups: int = 1, tolerance: float = 0.1) -> float:
    dims = kernel.ndim - 2
    geometry = Geometry.for_conv(tuple(kernel.shape[2:]), stride, groups=groups, dims=dims) if dims else Geometry()
    return float(lipschitz_from_kernel(kernel, geometry, tolerance=tolerance))


def check(kernel: torch.Tensor, stride: int = 1, groups: int = 1, tolerance: float = 0.1) -> None:
    truth = supremum_from_below(kernel, stride, groups)
    value = bound(kernel, stride, groups, tolerance)
    # The reference is below the supremum by what an optimiser leaves, 1e-6 at most in these cases.
    assert truth * (1 - 1e-13) <= value <= truth * (1 + tolerance) * (1 + 1e-5)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@st.composite
def cases(draw):
    dims = draw(st.sampled_from([1, 1, 2, 2, 3]))
    largest = {1: 6, 2: 4, 3: 2}[dims]
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    taps = [draw(st.integers(1, largest)) for _ in range(dims)]
    kernel = normal(groups * rows, columns, *taps, seed=draw(st.integers(0, 10**6)))
    if draw(st.booleans()):
        kernel = kernel.round()
    return kernel, draw(st.integers(1, 3)), groups, draw(st.sampled_from([0.01, 0.1, 1.0]))


@hypothesis.given(cases())
@hypothesis.settings(max_examples=60, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
def test_between_the_supremum_and_its_tolerance(case):
    check(*case)


@pytest.mark.parametrize("tolerance", [0.003, 0.1, 2.0])
@pytest.mark.parametrize("taps", [(1, 0, 1), (1, 0, -1), (1, 2, 1), (1, 1), (1, 0, 0, 0, 1), (0, 0, 1)])
def test_extremal_polynomials(taps, tolerance):
    """``|1 + e^(2iw)|^2 = 4 cos(w)^2`` falls from its maximum as fast as any: the estimate of Riesz is sharp."""
    taps = torch.tensor(taps, dtype=torch.float64)
    check(taps.reshape(1, 1, -1), tolerance=tolerance)
    check((taps[:, None] * taps)[None, None], tolerance=tolerance)


@pytest.mark.parametrize("seed", range(5))
def test_peaks_anywhere(seed):
    """A narrow peak at a frequency of one's choice, on no grid."""
    first, second = np.random.default_rng(seed).uniform(0, math.pi, 2)
    t = torch.arange(7, dtype=torch.float64)
    window = 1 + torch.cos((t - 3) * math.pi / 4)
    wave = torch.cos(first * (t[:, None] - 3) + second * (t - 3)) * window[:, None] * window
    check(wave[None, None])
    check(normal(3, 1, 1, 1) * wave * normal(1, 2, 1, 1, seed=1))


def test_flat_spectra():
    """All frequencies, or all eigenvalues, are the largest."""
    orthogonal = torch.linalg.qr(normal(12, 12)).Q
    delta = torch.zeros(12, 12, 3, 3, dtype=torch.float64)
    delta[..., 1, 1] = orthogonal
    assert 1 - 1e-12 <= bound(delta) <= 1.1 * (1 + 1e-9)
    # Channels that are moved by different amounts and mixed before and after: unitary at every frequency.
    moved = torch.zeros(12, 12, 3, 3, dtype=torch.float64)
    for channel in range(12):
        moved[channel, channel, channel % 3, channel // 3 % 3] = 1
    moved = torch.einsum("ab,bcij,cd->adij", orthogonal, moved, orthogonal)
    assert 1 - 1e-12 <= bound(moved) <= 1.1 * (1 + 1e-9)
    nearly = moved * (1 + 1e-9 * normal(12, 12, 1, 1))
    assert 1 - 1e-6 <= bound(nearly) <= 1.1 * (1 + 1e-6)
    assert 1 - 1e-12 <= bound(torch.linalg.qr(normal(300, 300)).Q) <= 1.01 * (1 + 1e-9)


def test_rank_one():
    kernel = torch.einsum("a,b,i,j->abij", normal(9), normal(7, seed=1), normal(3, seed=2), normal(3, seed=3))
    check(kernel)
    wide = torch.outer(normal(400), normal(300, seed=1))
    assert 1 <= bound(wide) / float(wide.square().sum()) <= 1.01 * (1 + 1e-9)


@pytest.mark.parametrize("spread", [8, 100, 300])
def test_rows_of_very_different_sizes(spread):
    kernel = normal(6, 5, 3, 3) * torch.logspace(-spread / 2, 0, 6, dtype=torch.float64).reshape(-1, 1, 1, 1)
    check(kernel)
    check(kernel.reshape(6, 5, 9)[:, :1], groups=6)
    value = bound(kernel)
    assert bound(kernel * 2.0**400) == pytest.approx(value * 2.0**800, rel=1e-12)
    assert bound(kernel * 2.0**-400) == pytest.approx(value * 2.0**-800, rel=1e-12)


def test_top_direction_that_lanczos_starts_far_from():
    """A direction that the starting vector hardly sees, at one frequency only."""
    start = torch.randn(300, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    hidden = normal(300, seed=1)
    hidden = hidden - start * (hidden @ start) / start.square().sum()
    hidden = hidden / hidden.norm()
    matrix = torch.linalg.qr(normal(300, 300, seed=2)).Q + 9 * torch.outer(hidden, hidden)
    truth = float(np.linalg.norm(matrix.numpy(), 2) ** 2)
    assert 1 <= bound(matrix) / truth <= 1.01 * (1 + 1e-9)
    hidden, start = hidden[:20], start[:20]
    hidden = hidden - start * (hidden @ start) / start.square().sum()
    projector = torch.eye(20, dtype=torch.float64) + 9 * torch.outer(hidden, hidden) / hidden.square().sum()
    kernel = projector[..., None, None] * normal(1, 1, 3, 3)
    check(kernel)


@pytest.mark.parametrize("shape, stride, groups", [((64, 64, 3, 3), 1, 1), ((96, 40, 3, 3), 2, 1), ((64, 8, 3), 1, 8)])
def test_many_channels(shape, stride, groups):
    kernel = normal(*shape)
    value = bound(kernel, stride, groups)
    truth = supremum_from_below(kernel, stride, groups, starts=2)
    assert truth <= value <= 1.1 * truth * (1 + 1e-3)


def test_depthwise():
    kernel = normal(200, 1, 5, 5)
    fine = np.abs(np.fft.fft2(kernel.numpy(), s=(256, 256))) ** 2
    assert fine.max() <= bound(kernel, groups=200) <= 1.1 * fine.max() * 1.002


def test_deterministic_and_without_random_numbers():
    kernel = normal(20, 30, 3, 3)
    state = torch.get_rng_state()
    assert bound(kernel) == bound(kernel.clone())
    assert torch.equal(state, torch.get_rng_state())


def test_tighter_tolerances_give_tighter_bounds():
    kernel = normal(8, 8, 3, 3)
    values = [bound(kernel, tolerance=tolerance) for tolerance in (1e-3, 1e-2, 0.1)]
    assert values[0] <= values[1] * 1.001 and values[1] <= values[2] * 1.01
    check(kernel, tolerance=1e-3)


@pytest.mark.parametrize("shape", [(4, 3, 3, 3), (300, 280)])
def test_weights_that_are_not_finite(shape):
    kernel = normal(*shape)
    for bad in (math.nan, math.inf, -math.inf):
        kernel.view(-1)[5] = bad
        with pytest.raises(WeightError, match=f"1 of {kernel.numel()}"):
            bound(kernel)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_lanczos_estimates(dtype):
    factors = torch.randn(3, 2, 40, 60, dtype=dtype, generator=torch.Generator().manual_seed(0))
    matrices = factors @ factors.mH
    truth = torch.linalg.eigvalsh(matrices)[..., -1]
    estimates = lanczos_estimates(matrices)
    assert estimates.shape == (3, 2)
    assert (estimates <= truth * (1 + 1e-12)).all() and (estimates >= 0.95 * truth).all()
    torch.testing.assert_close(lanczos_estimates(matrices, steps=40), truth)
    assert not lanczos_estimates(0 * matrices).any()
    assert lanczos_estimates(torch.eye(5, dtype=dtype)[None] * 3).item() == pytest.approx(3)
