"""What sampling minimises on average, by enumeration of all masks: sections 2.1, 3 and 4 of the paper."""

import itertools

import pytest
import torch
from torch.testing import assert_close

from solver_plugins.dropblock import (
    SampledScheme,
    characteristic_matrix,
    deterministic_objective,
    dropconnect_omega,
    estimate_characteristic_matrix,
    make_scheme,
    omega,
    theta_bar_of,
    theta_of_width,
)
from solver_plugins.errors import OptionError, ShapeError
from tests.dropblock.masks import CASES, bernoulli_patterns, enumerate_masks

EXACT = {"rtol": 1e-10, "atol": 1e-10}


def problem(d, a=3, n=5, b=4):
    shapes = ((a, d), (b, d), (n, b), (n, a))
    return [torch.randn(*shape, dtype=torch.float64) for shape in shapes]


def expected_loss(masks, weights, mean, U, features, Y):
    """``E_z |Y - H diag(z/mu) U^T|^2``, mask by mask."""
    return sum(p * (Y - (features * (z / mean)) @ U.T).square().sum() for z, p in zip(masks, weights, strict=True))


@pytest.mark.parametrize(("name", "size", "theta", "r"), CASES)
def test_characteristic_matrix_is_that_of_all_masks(name, size, theta, r):
    masks, weights = enumerate_masks(name, size, theta, r)
    mean = weights @ masks
    assert_close(weights.sum(), torch.ones((), dtype=torch.float64), **EXACT)
    # The nominal rate holds for every unit, at the border too.
    assert_close(mean, torch.full_like(mean, theta), **EXACT)
    covariance = (masks.T * weights) @ masks - mean[:, None] * mean
    assert_close(characteristic_matrix(name, size, theta, r), covariance / (mean[:, None] * mean), **EXACT)


@pytest.mark.parametrize(("name", "size", "theta", "r"), CASES)
def test_lemma_3_1_named_schemes(name, size, theta, r):
    masks, weights = enumerate_masks(name, size, theta, r)
    U, V, X, Y = problem(masks.shape[1])
    stochastic = expected_loss(masks, weights, theta, U, X @ V, Y)
    cbar = characteristic_matrix(name, size, theta, r)
    assert_close((Y - X @ V @ U.T).square().sum() + omega(U, X @ V, cbar), stochastic, **EXACT)
    if len(size) == 1:
        assert_close(deterministic_objective(U, V, X, Y, make_scheme(name, theta, r)), stochastic, **EXACT)


def test_lemma_3_1_arbitrary_covariance():
    masks = torch.randn(7, 4, dtype=torch.float64)
    weights = torch.rand(7, dtype=torch.float64).softmax(0)
    mean = weights @ masks
    cbar = (masks.T * weights) @ masks / (mean[:, None] * mean) - 1
    U, V, X, Y = problem(4)
    stochastic = expected_loss(masks, weights, mean, U, X @ V, Y)
    assert_close((Y - X @ V @ U.T).square().sum() + omega(U, X @ V, cbar), stochastic, **EXACT)


@pytest.mark.parametrize("r", [1, 2, 3, 6])
def test_lemma_2_1_regulariser_is_a_sum_over_blocks(r):
    U, V, X, _ = problem(6)
    blocks = sum((X @ V[:, i : i + r] @ U[:, i : i + r].T).square().sum() for i in range(0, 6, r))
    cbar = characteristic_matrix("dropblock", 6, 0.7, r)
    assert_close(omega(U, X @ V, cbar), 0.3 / 0.7 * blocks, **EXACT)


def test_equation_3_is_printed_with_the_wrong_identity():
    """``diag(w) (x) I_r`` repeats each of the k block variables r times; ``I_{d/r}`` fits only if r = d/r."""
    w = torch.tensor([1.0, 0.0, 1.0])
    assert torch.kron(torch.diag(w), torch.eye(2)).diagonal().tolist() == [1, 1, 0, 0, 1, 1]
    assert torch.kron(torch.diag(w), torch.eye(3)).shape != (6, 6)


def test_lemma_2_2_duplicated_blocks_halve_the_regulariser():
    U, V, X, _ = problem(4)
    wide = [torch.cat([weight, weight], 1) / 2**0.5 for weight in (U, V)]
    assert_close(wide[0] @ wide[1].T, U @ V.T, **EXACT)
    once = omega(U, X @ V, characteristic_matrix("dropblock", 4, 0.5, 2))
    twice = omega(wide[0], X @ wide[1], characteristic_matrix("dropblock", 8, 0.5, 2))
    assert_close(twice, once / 2, **EXACT)


def test_equation_7_undoes_the_halving():
    U, V, X, _ = problem(4)
    wide = [torch.cat([weight, weight], 1) / 2**0.5 for weight in (U, V)]
    values = [
        omega(u, X @ v, characteristic_matrix("dropblock", d, theta_of_width(0.8, d, 2), 2))
        for u, v, d in ((U, V, 4), (*wide, 8))
    ]
    assert_close(values[0], values[1], **EXACT)
    assert theta_of_width(0.8, 2, 2) == pytest.approx(0.8)
    # Fig. 1 prints theta = 0.5 at d = 50, r = 5: that is theta(d).
    assert theta_bar_of(0.5, 50, 5) == pytest.approx(10 / 11)
    assert theta_of_width(10 / 11, 50, 5) == pytest.approx(0.5)


def test_corollary_3_2_needs_its_missing_factor():
    masks, weights = enumerate_masks("dropout", (4,), 0.3, 1)
    U, V, X, Y = problem(4)
    features = X @ V
    gap = expected_loss(masks, weights, 0.3, U, features, Y) - (Y - features @ U.T).square().sum()
    printed = (U.square().sum(0) * features.square().sum(0)).sum()
    assert_close(gap, 0.7 / 0.3 * printed, **EXACT)
    assert (gap - printed).abs() > 0.1 * printed
    assert_close(omega(U, features, torch.full((4,), 0.7 / 0.3, dtype=torch.float64)), gap, **EXACT)


@pytest.mark.parametrize("outer", [True, False])
def test_dropconnect_is_exact_for_general_inputs(outer):
    a, d, b, n, theta = 2, 3, 3, 4, 0.4
    U = torch.randn(a, d, dtype=torch.float64) if outer else None
    W, M = torch.randn(d, b, dtype=torch.float64), torch.randn(n, b, dtype=torch.float64)
    last = torch.eye(d, dtype=torch.float64) if U is None else U
    Y = torch.randn(n, len(last), dtype=torch.float64)
    stochastic = sum(
        p * (Y - M @ (torch.tensor(bits, dtype=torch.float64).view(d, b) * W / theta).T @ last.T).square().sum()
        for bits, p in bernoulli_patterns(d * b, theta)
    )
    plain = (Y - M @ W.T @ last.T).square().sum()
    assert_close(plain + dropconnect_omega(U, W, M, theta), stochastic, **EXACT)


def test_theorem_4_1_holds_only_for_diagonal_inputs():
    U, W = torch.randn(2, 3, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    orthogonal = torch.linalg.qr(torch.randn(6, 4, dtype=torch.float64)).Q * torch.tensor([1.0, 2.0, 3.0, 4.0])
    general = torch.randn(6, 4, dtype=torch.float64)
    for M, equal in ((orthogonal, True), (general, False)):
        dropout = omega(U, M @ W.T, characteristic_matrix("dropout", 3, 0.5))
        connect = dropconnect_omega(U, W, M, 0.5)
        assert (abs(dropout / connect - 1) < 1e-10) == equal


@pytest.mark.parametrize(("name", "r"), [("dropout", 1), ("dropblock", 3), ("overlapping", 2), ("overlapping", 9)])
def test_structured_variances_equal_the_dense_ones(name, r):
    scheme = make_scheme(name, 0.6, r)
    U, h = torch.randn(5, 6, dtype=torch.float64), torch.randn(2, 3, 6, dtype=torch.float64)
    p = torch.randn(2, 3, 5, dtype=torch.float64).softmax(-1)
    cbar = characteristic_matrix(name, 6, 0.6, r)
    for i, j in itertools.product(range(2), range(3)):
        covariance = (U * h[i, j]) @ cbar @ (U * h[i, j]).T
        curvature = torch.diag(p[i, j]) - torch.outer(p[i, j], p[i, j])
        assert_close(scheme.variance(U, h)[i, j], covariance.trace(), **EXACT)
        assert_close(scheme.weighted_variance(U, h, p)[i, j], (curvature @ covariance).trace(), **EXACT)


def pair_sampler(n, size, generator):
    """Three units that are never independent, with different means."""
    u = torch.rand(n, generator=generator)
    return torch.stack([u < 0.7, u > 0.2, (u < 0.5) | (u > 0.9)], 1).double()


def test_estimates_lie_within_their_error_bars():
    mean = torch.tensor([0.7, 0.8, 0.6], dtype=torch.float64)
    joint = torch.tensor([[0.7, 0.5, 0.5], [0.5, 0.8, 0.4], [0.5, 0.4, 0.6]], dtype=torch.float64)
    cbar = joint / (mean[:, None] * mean) - 1
    for known in (None, mean):
        scores = []
        for seed in range(200):
            generator = torch.Generator().manual_seed(seed)
            found = estimate_characteristic_matrix(pair_sampler, 3, mean=known, samples=500, generator=generator)
            scores.append((found.matrix - cbar) / found.error)
        scores = torch.stack(scores)
        # Of a correct error bar the scores have variance one: 200 draws tell 0.75..1.3 from it.
        assert_close(scores.square().mean(0), torch.ones(3, 3, dtype=torch.float64), rtol=0, atol=0.3)
        assert scores.mean(0).abs().amax() < 0.3


def test_estimates_of_a_scheme_and_its_variance():
    scheme = SampledScheme(pair_sampler)
    assert_close(scheme.characteristic_matrix((3,)), scheme.characteristic_matrix((3,)), rtol=0, atol=0)
    U, h = torch.randn(2, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    assert_close(scheme.variance(U, h).sum(), omega(U, h, scheme.characteristic_matrix((3,))), **EXACT)
    assert_close(characteristic_matrix(pair_sampler, 3, samples=50), torch.zeros(3, 3).double(), rtol=0, atol=3)


def test_bad_input():
    with pytest.raises(ShapeError, match=r"found \(2, 3\), \(5, 4\)"):
        omega(torch.zeros(2, 3), torch.zeros(5, 4), torch.eye(3))
    with pytest.raises(ShapeError, match="outer weights"):
        dropconnect_omega(torch.zeros(2, 4), torch.zeros(3, 5), torch.zeros(6, 5), 0.5)
    with pytest.raises(OptionError, match="at least two"):
        estimate_characteristic_matrix(pair_sampler, 3, samples=1)
    with pytest.raises(OptionError, match="Unit 0 has the mean 0"):
        estimate_characteristic_matrix(lambda n, size, generator: torch.zeros(n, *size), 2, samples=5)
    with pytest.raises(ShapeError, match=r"Expected the sampler to draw masks of shape \(5, 2\)"):
        estimate_characteristic_matrix(lambda n, size, generator: torch.zeros(n), 2, samples=5)
    with pytest.raises(OptionError, match="a width"):
        characteristic_matrix("dropout", 0, 0.5)
