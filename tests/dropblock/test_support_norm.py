"""The squared k-support norm against its definitions by enumeration, its dual and its proximal map."""

import itertools

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch.testing import assert_close

from solver_plugins.dropblock import (
    characteristic_matrix,
    k_support_norm_sq,
    omega,
    prox_k_support_norm_sq,
)
from solver_plugins.errors import OptionError, ShapeError

TIGHT = {"rtol": 1e-9, "atol": 1e-10}


def dual_sq(x, k):
    """The square of the dual norm: the sum of the ``k`` largest ``x_i^2``."""
    return x.square().topk(min(k, x.shape[-1]), dim=-1).values.sum(-1)


def spectral_sq(matrix, k):
    """The squared k-support norm of the singular values."""
    return k_support_norm_sq(torch.linalg.svdvals(matrix), k)


def brute_force(x, k):
    """``max_y 2 <x, y> - t`` with ``t >= |y_S|^2`` for every set ``S`` of ``k`` entries: the conjugate's conjugate."""
    n = len(x)
    sets = [list(s) for s in itertools.combinations(range(n), k)]
    constraint = {
        "type": "ineq",
        "fun": lambda v: np.array([v[-1] - np.sum(v[s] ** 2) for s in sets]),
        "jac": lambda v: np.array([[-2 * v[i] if i in s else float(i == n) for i in range(n + 1)] for s in sets]),
    }
    start = np.concatenate([x, [np.sum(x**2) + 1]])
    gradient = np.concatenate([-2 * x, [1.0]])
    found = minimize(
        lambda v: v[-1] - 2 * x @ v[:-1], start, jac=lambda v: gradient, constraints=constraint, method="SLSQP",
        options={"maxiter": 500, "ftol": 1e-14},
    )  # fmt: skip
    return -found.fun


@pytest.mark.parametrize("seed", range(60))
def test_norm_equals_the_brute_force_dual(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 7))
    k = int(rng.integers(1, n + 1))
    x = rng.normal(size=n) * np.exp(rng.normal(size=n))
    if seed % 5 == 0:
        x[: n // 2] = x[-1]  # ties
    if seed % 7 == 0:
        x[n // 2 :] = 0
    assert_close(float(k_support_norm_sq(torch.from_numpy(x), k)), brute_force(x, k), rtol=1e-6, atol=1e-8)


def test_special_cases():
    x = torch.randn(50, 6, dtype=torch.float64)
    assert_close(k_support_norm_sq(x, 1), x.abs().sum(-1).square(), **TIGHT)
    for k in (6, 9):
        assert_close(k_support_norm_sq(x, k), x.square().sum(-1), **TIGHT)
    assert k_support_norm_sq(torch.zeros(3), 2) == 0
    assert_close(dual_sq(x, 1), x.abs().amax(-1).square(), **TIGHT)
    matrix = torch.randn(2, 4, 3, dtype=torch.float64)
    assert_close(spectral_sq(matrix, 1), torch.linalg.matrix_norm(matrix, "nuc").square(), **TIGHT)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_it_is_the_square_of_a_norm(k):
    x, y = torch.randn(2, 500, 5, dtype=torch.float64) * torch.rand(2, 500, 5, dtype=torch.float64) ** -1
    norm = lambda v: k_support_norm_sq(v, k).sqrt()  # noqa: E731
    assert (norm(x + y) <= (norm(x) + norm(y)) * (1 + 1e-12)).all()
    assert_close(norm(-3 * x), 3 * norm(x), **TIGHT)
    assert (norm(x) > 0).all()
    # Hoelder's inequality, with equality somewhere for every x: at half the gradient.
    dual = lambda v: dual_sq(v, k).sqrt()  # noqa: E731
    assert ((x * y).sum(-1) <= norm(x) * dual(y) * (1 + 1e-12)).all()
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(k_support_norm_sq(x, k).sum(), x)
    assert_close(dual(gradient / 2), norm(x), **TIGHT)
    assert_close((x * gradient / 2).sum(-1), norm(x).square(), **TIGHT)


def test_theorem_2_3_as_printed_is_wrong():
    """(11) does not fall with rho, so that "maximises" always picks rho = r; that is the norm only by chance."""
    a = torch.tensor([1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    r = 2
    printed = [float(a[: p - 1].square().sum() + a[p - 1 :].sum() ** 2 / (r - p + 1)) for p in (1, 2)]
    assert printed == [8.0, 10.0]
    assert float(k_support_norm_sq(a, r)) == pytest.approx(8.0)
    assert brute_force(a.numpy(), r) == pytest.approx(8.0, rel=1e-6)
    for _ in range(200):
        a = torch.randn(5, dtype=torch.float64).abs().sort(descending=True).values
        values = torch.stack([a[: p - 1].square().sum() + a[p - 1 :].sum() ** 2 / (4 - p) for p in (1, 2, 3)])
        assert (values.diff() >= -1e-12).all()


@pytest.mark.parametrize("r", [1, 2, 3])
def test_envelope_is_never_above_the_regulariser(r):
    """Equations 9 and 11: for every factorisation ``d/r sum_k |U_k V_k^T|^2`` is at least the squared norm."""
    for d in (3 * r, 4 * r, 8 * r):
        for _ in range(30):
            U, V = torch.randn(4, d, dtype=torch.float64), torch.randn(5, d, dtype=torch.float64)
            value = d / r * omega(U, V, characteristic_matrix("dropblock", d, 0.5, r))
            assert value >= spectral_sq(U @ V.T, r) * (1 - 1e-12)


@pytest.mark.parametrize("n", [1, 2, 5, 12])
def test_prox_satisfies_its_optimality_condition(n):
    """``(a - x)/step`` has to be a subgradient at ``x``: then Fenchel's inequality is an equality."""
    for k in {1, 2, n // 2 + 1, n, n + 3}:
        for step in (1e-3, 0.3, 5.0, 1e3):
            a = torch.randn(200, n, dtype=torch.float64) * torch.randn(200, n, dtype=torch.float64).exp() ** 2
            a[:20] = a[:20, :1]  # ties
            a[20:40, n // 2 :] = 0
            a[40:50] *= 1e-6
            x = prox_k_support_norm_sq(a, k, step)
            g = (a - x) / step
            # The conjugate of |x|_k^2 is a quarter of the squared dual norm.
            gap = k_support_norm_sq(x, k) + dual_sq(g, k) / 4 - (g * x).sum(-1)
            scale = (a.square().sum(-1) / step).clamp(min=1e-300)
            assert (gap.abs() <= 1e-9 * scale).all()


def test_prox_is_firmly_nonexpansive_and_meets_its_limits():
    a, b = torch.randn(2, 300, 6, dtype=torch.float64)
    x, y = (prox_k_support_norm_sq(v, 3, 0.7) for v in (a, b))
    assert (((x - y) * (a - b)).sum(-1) >= (x - y).square().sum(-1) - 1e-12).all()
    assert_close(prox_k_support_norm_sq(a, 6, 0.7), a / 2.4, **TIGHT)
    assert prox_k_support_norm_sq(torch.zeros(4), 2, 1.0).tolist() == [0, 0, 0, 0]


def test_derivatives():
    a = torch.tensor([[3.0, -2.0, 1.1, 0.4, -0.2]], dtype=torch.float64, requires_grad=True)
    for k in (1, 2, 3, 5):
        assert torch.autograd.gradcheck(lambda v, k=k: prox_k_support_norm_sq(v, k, 0.4), a)
        assert torch.autograd.gradcheck(lambda v, k=k: k_support_norm_sq(v, k), a)


def test_bad_input():
    for k in (0, -1, 1.5, True):
        with pytest.raises(OptionError, match="positive whole number"):
            k_support_norm_sq(torch.ones(3), k)
    with pytest.raises(OptionError, match="step must be positive"):
        prox_k_support_norm_sq(torch.ones(3), 1, 0.0)
    with pytest.raises(ShapeError, match="at least one entry"):
        k_support_norm_sq(torch.ones(2, 0), 1)
