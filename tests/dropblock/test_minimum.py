"""The closed form of the global minimum: Theorems 2.5, 2.6, 2.7, Corollary 2.8, Proposition 3.3, Fig. 1."""

import time

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch.testing import assert_close

from solver_plugins.dropblock import (
    BlockSizeError,
    GridBlocks,
    deterministic_objective,
    drop_block_1d,
    global_minimum,
    k_support_norm_sq,
    theta_bar_of,
    theta_of_width,
)
from solver_plugins.errors import OptionError, ShapeError
from tests.dropblock.test_support_norm import dual_sq, spectral_sq


def instance(seed):
    """A random problem: r = 1, r beyond the rank, rank-deficient targets, N < b, N = b and N > b all occur."""
    rng = torch.Generator().manual_seed(seed)
    pick = lambda low, high: int(torch.randint(low, high, (), generator=rng))  # noqa: E731
    n, a = pick(1, 9), pick(1, 9)
    r = [1, min(n, a), pick(1, max(n, a) + 1), pick(1, max(n, a) + 1)][seed % 4]
    rank = pick(0, min(n, a) + 1) if seed % 3 == 0 else min(n, a)
    Y = torch.randn(n, rank, generator=rng, dtype=torch.float64) @ torch.randn(
        rank, a, generator=rng, dtype=torch.float64
    )
    X = torch.randn(n, pick(1, 10), generator=rng, dtype=torch.float64) if seed % 2 else None
    if X is not None and seed % 5 == 0:
        X[:, -1] = X[:, 0]  # rank-deficient inputs
    return Y, X, r, 0.02 + 0.97 * float(torch.rand((), generator=rng))


def reachable(Y, X):
    return Y if X is None else X @ torch.linalg.lstsq(X, Y, driver="gelsd").solution


def descend(Y, X, d, r, theta_bar, starts, iterations=1000, seed=0):
    """Returns the best value of eq. 8 at a width that L-BFGS finds from random starts."""
    odds = (1 - theta_bar) / theta_bar * d / r
    y, x = Y.numpy(), np.eye(len(Y)) if X is None else X.numpy()
    a, b = y.shape[1], x.shape[1]
    rng = np.random.default_rng(seed)

    def value(flat):
        # Written out, so that neither autograd nor the objective under test is part of it.
        U, H = flat[: a * d].reshape(a, d), x @ flat[a * d :].reshape(b, d)
        error = H @ U.T - y
        by_u, by_h = 2 * error.T @ H, 2 * error @ U
        total = (error**2).sum()
        for i in range(0, d, r):
            part = H[:, i : i + r] @ U[:, i : i + r].T
            total += odds * (part**2).sum()
            by_u[:, i : i + r] += 2 * odds * part.T @ H[:, i : i + r]
            by_h[:, i : i + r] += 2 * odds * part @ U[:, i : i + r]
        return total, np.concatenate([by_u.ravel(), (x.T @ by_h).ravel()])

    options = {"maxiter": iterations, "maxfun": 10**6, "maxcor": 30, "ftol": 1e-15, "gtol": 1e-9}
    runs = (
        minimize(value, rng.normal(size=(a + b) * d), jac=True, method="L-BFGS-B", options=options)
        for _ in range(starts)
    )
    return min(float(run.fun) for run in runs)


@pytest.mark.parametrize("chunk", range(8))
def test_theorem_2_7_is_certified(chunk):
    """``2 (Y - A)/beta`` is a subgradient of the squared norm at ``A``: a certificate that A minimises F (eq. 12)."""
    for seed in range(50 * chunk, 50 * chunk + 50):
        Y, X, r, theta_bar = instance(seed)
        found = global_minimum(Y, theta_bar, r, X)
        target, A = reachable(Y, X), found.product
        G = 2 * (target - A) / found.beta
        k = min(r, *Y.shape)
        conjugate = dual_sq(torch.linalg.svdvals(G), k) / 4
        gap = spectral_sq(A, k) + conjugate - (G * A).sum()
        assert abs(gap) <= 1e-9 * (1 + G.square().sum())
        objective = (Y - A).square().sum() + found.beta * spectral_sq(A, k)
        assert_close(found.objective, float(objective), rtol=1e-9, atol=1e-10)
        assert 1 <= found.rho <= r and 0 <= found.lam <= min(Y.shape)


@pytest.mark.parametrize("chunk", range(8))
def test_theorem_2_5_factorisation_is_balanced_and_attains_the_minimum(chunk):
    for seed in range(50 * chunk, 50 * chunk + 50):
        Y, X, r, theta_bar = instance(seed)
        found = global_minimum(Y, theta_bar, r, X)
        features = found.V if X is None else X @ found.V
        assert found.U.shape == (Y.shape[1], found.width) and found.width % r == 0
        assert_close(features @ found.U.T, found.product, rtol=0, atol=1e-9 * (1 + float(Y.abs().amax())))
        assert found.theta == pytest.approx(theta_of_width(theta_bar, found.width, r))
        value = deterministic_objective(found.U, found.V, X, Y, GridBlocks(found.theta, r))
        assert_close(float(value), found.objective, rtol=1e-9, atol=1e-9)
        norms = torch.stack(
            [(features[:, i : i + r] @ found.U[:, i : i + r].T).norm() for i in range(0, found.width, r)]
        )
        assert_close(norms, norms.mean().expand_as(norms), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("seed", range(0, 150))
def test_theorem_2_7_equals_a_numerical_convex_solve(seed):
    """Over ``t`` in the box with ``sum t <= r``: ``min_x |x - m|^2 + beta sum x_i^2/t_i`` in each coordinate."""
    Y, X, r, theta_bar = instance(1000 + seed)
    m = torch.linalg.svdvals(reachable(Y, X)).numpy()
    beta = (1 - theta_bar) / theta_bar
    n, scale = len(m), float((m**2).sum()) + 1e-12
    solved = minimize(
        lambda t: float((m**2 * beta / (t + beta)).sum()) / scale,
        np.full(n, min(1.0, r / n)),
        jac=lambda t: -(m**2) * beta / (t + beta) ** 2 / scale,
        bounds=[(0.0, 1.0)] * n,
        constraints={"type": "ineq", "fun": lambda t: r - t.sum(), "jac": lambda t: -np.ones(n)},
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 1000},
    )
    rest = float((Y - reachable(Y, X)).square().sum())
    found = global_minimum(Y, theta_bar, r, X)
    assert_close(found.objective, solved.fun * scale + rest, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("seed", range(12))
def test_lower_bound_at_every_width(seed):
    Y, X, r, theta_bar = instance(2000 + seed)
    found = global_minimum(Y, theta_bar, r, X)
    for blocks in (1, 2, 3, 5):
        d = blocks * r
        scheme = GridBlocks(theta_of_width(theta_bar, d, r), r)
        for _ in range(20):
            U = torch.randn(Y.shape[1], d, dtype=torch.float64)
            V = torch.randn(len(Y) if X is None else X.shape[1], d, dtype=torch.float64)
            assert deterministic_objective(U, V, X, Y, scheme) >= found.objective * (1 - 1e-12)
    assert descend(Y, X, 2 * r, r, theta_bar, 1) >= found.objective * (1 - 1e-10)


@pytest.mark.parametrize(
    ("n", "a", "b", "r", "theta_bar"), [(5, 4, None, 1, 0.6), (6, 4, 3, 2, 0.8), (4, 6, 8, 3, 0.9)]
)
def test_theorem_2_6_descent_reaches_the_minimum(n, a, b, r, theta_bar):
    Y = torch.randn(n, a, dtype=torch.float64)
    X = None if b is None else torch.randn(n, b, dtype=torch.float64)
    found = global_minimum(Y, theta_bar, r, X)
    best = descend(Y, X, found.width, r, theta_bar, starts=4, iterations=4000)
    assert_close(best, found.objective, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("values", "r", "twice"),
    [
        # Five equal values, blocks of four: each block lacks one direction, so five blocks are needed.
        ([1.0] * 5, 4, 4),
        # One scaled value in every block leaves one place for each of the seven others.
        ([5.0] + [1.0] * 7, 2, 8),
    ],
)
def test_fewest_blocks_is_sharp(values, r, twice):
    """``d >= 2 r ceil(rank/r)`` is not enough in general, nor necessary; ``fewest_blocks`` is what the ranks ask."""
    Y = torch.diag(torch.tensor(values, dtype=torch.float64))
    found = global_minimum(Y, 0.7, r)
    assert twice == 2 * -(-found.lam // r)
    fewest = found.fewest_blocks
    at, below = (
        descend(Y, None, r * k, r, 0.7, starts=3, iterations=3000) / found.objective - 1 for k in (fewest, fewest - 1)
    )
    assert at < 1e-6 and below > 1e-3
    exact = global_minimum(Y, 0.7, r, width=r * fewest)
    assert exact.width == r * fewest and exact.objective == pytest.approx(found.objective)
    value = deterministic_objective(exact.U, exact.V, None, Y, GridBlocks(exact.theta, r))
    assert float(value) == pytest.approx(found.objective, rel=1e-9)
    with pytest.raises(OptionError, match=f"at least {r * fewest}"):
        global_minimum(Y, 0.7, r, width=r * (fewest - 1))


def test_theorem_2_7_needs_rho_up_to_r():
    """For r = 1 the printed range 1..r-1 is empty, and for r = 2 it misses the minimum."""
    m = torch.tensor([5.0, 1.0, 0.9], dtype=torch.float64)
    r, beta = 2, 0.3 / 0.7
    found = global_minimum(torch.diag(m), 0.7, r)
    assert found.rho == 2
    values = []
    for rho in (1, 2):
        for lam in range(1, 4):
            a = m / (1 + beta) * (torch.arange(3) < min(lam, rho - 1))
            if lam >= rho:
                c = r + beta * lam + (beta + 1) * (1 - rho)
                tail = m[rho - 1 : lam] - beta / c * m[rho - 1 : lam].sum()
                a[rho - 1 : lam] = tail.clamp(min=0)
            values.append((rho, float((m - a).square().sum() + beta * k_support_norm_sq(a, r))))
    assert min(value for _, value in values) == pytest.approx(found.objective)
    assert min(value for rho, value in values if rho == 1) > found.objective * 1.001


def test_proposition_3_3_needs_a_factor_1_over_d():
    """Dropout at a fixed theta: the penalty is ``(1-theta)/(theta d)`` times the squared nuclear norm."""
    Y, theta, d = torch.randn(4, 3, dtype=torch.float64), 0.5, 6
    best = descend(Y, None, d, 1, theta_bar_of(theta, d, 1), starts=2)
    m = torch.linalg.svdvals(Y)

    def nuclear(beta):
        # argmin over t >= 0 of the threshold: x = (m - beta sum x)_+.
        low, high = 0.0, float(m.sum())
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if float((m - beta * middle).clamp(min=0).sum()) > middle else (low, middle)
        x = (m - beta * low).clamp(min=0)
        return float((m - x).square().sum() + beta * x.sum() ** 2)

    assert best == pytest.approx(nuclear((1 - theta) / theta / d), rel=1e-6)
    assert abs(best / nuclear((1 - theta) / theta) - 1) > 0.1


def test_corner_cases():
    Y = torch.randn(4, 3, dtype=torch.float64)
    everything = global_minimum(Y, 1.0, 2)
    assert everything.objective == pytest.approx(0, abs=1e-12)
    assert_close(everything.product, Y)
    nothing = global_minimum(torch.zeros(4, 3), 0.5, 2)
    assert nothing.objective == 0 and nothing.lam == 0 and nothing.width == 2
    assert global_minimum(Y.float(), 0.5, 2).U.dtype == torch.float64
    # One block holds all: the plain ridge.
    assert_close(global_minimum(Y, 0.5, 3).product, Y / 2)
    wide = global_minimum(Y, 0.5, 3, width=9)
    value = deterministic_objective(wide.U, wide.V, None, Y, GridBlocks(wide.theta, 3))
    assert float(value) == pytest.approx(wide.objective)


def test_bad_input():
    Y = torch.randn(4, 3)
    with pytest.raises(OptionError, match="theta_bar"):
        global_minimum(Y, 0.0, 2)
    with pytest.raises(BlockSizeError, match="positive whole number"):
        global_minimum(Y, 0.5, 0)
    with pytest.raises(ShapeError, match="one row for each target"):
        global_minimum(Y, 0.5, 2, torch.randn(3, 4))
    with pytest.raises(ShapeError, match="targets"):
        global_minimum(torch.randn(3), 0.5, 2)
    with pytest.raises(BlockSizeError, match="21"):
        global_minimum(Y, 0.5, 2, width=21)
    with pytest.raises(OptionError, match="width d"):
        theta_of_width(0.5, 0, 1)


@pytest.mark.slow
def test_fig_1_sampling_converges_to_the_closed_form():
    """100 -> 50 -> 80, 1000 samples, theta(d) = 0.5, blocks of 5: within 0.1% in under three minutes."""
    start = time.perf_counter()
    torch.manual_seed(0)
    X = torch.randn(1000, 100)
    Y = X @ torch.randn(100, 50) @ torch.randn(50, 80)
    U, V = torch.randn(80, 50, requires_grad=True), torch.randn(100, 50, requires_grad=True)
    minimum = global_minimum(Y, theta_bar_of(0.5, 50, 5), 5, X)
    # At the paper's width the minimum can be attained.
    assert 5 * minimum.fewest_blocks <= 50
    optimizer = torch.optim.Adam([U, V], lr=0.02, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6000)
    sampled = []
    for _ in range(6000):
        optimizer.zero_grad()
        loss = (Y - drop_block_1d(X @ V, 0.5, 5) @ U.T).square().sum()
        loss.backward()
        optimizer.step()
        schedule.step()
        sampled.append(loss.detach())
    with torch.no_grad():
        final = float(deterministic_objective(U, V, X, Y, GridBlocks(0.5, 5)))
    gap = final / minimum.objective - 1
    print(
        f"closed form {minimum.objective:.6g}, trained {final:.6g}, gap {gap:.2e}, {time.perf_counter() - start:.0f} s"
    )
    assert -1e-5 < gap < 1e-3
    # Where the weights hardly move any more, the sampled loss is the deterministic one on average.
    assert float(torch.stack(sampled[-300:]).mean()) == pytest.approx(final, rel=0.01)
    assert time.perf_counter() - start < 180
