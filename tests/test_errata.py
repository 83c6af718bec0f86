"""docs/errata.md: every correction names tests that exist, and those that no other file has are here."""

import re
from pathlib import Path

import torch
from torch import nn

from solver_plugins import solver_linear
from solver_plugins.operators import tau_nice_mask
from solver_plugins.prox import SoftshrinkPrior
from solver_plugins.proxprop import ProxProp
from solver_plugins.solve import conjugate_gradients
from solver_plugins.solve.steps import full_smoothness

TESTS = Path(__file__).parent
F64 = torch.float64


def test_every_correction_has_its_test():
    page = (TESTS.parent / "docs" / "errata.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| statement")]
    assert len(rows) > 20
    for row in rows:
        assert re.findall(r"`(\S+\.py)::(test_\w+)`", row.split(" | ")[-1]), row
    for file, name in re.findall(r"`(\S+\.py)::(test_\w+)`", page):
        assert re.search(rf"^def {name}\(", (TESTS / file).read_text(), re.MULTILINE), f"{file}::{name}"


def test_a_step_and_its_proximal_map_belong_together():
    """One dimension, g = |x|/5, F = (a x - u)^2/2: the minimiser is known by hand."""
    squared, product, prior = 0.5, torch.tensor(1.4, dtype=F64), SoftshrinkPrior(0.2)
    minimiser = (product - 0.2) / squared

    def limit(step: float, map_step: float) -> torch.Tensor:
        x = torch.zeros((), dtype=F64)
        for _ in range(200):
            x = prior.prox(x - step * (squared * x - product), map_step)
        return x

    torch.testing.assert_close(limit(1.0, 1.0), minimiser)
    torch.testing.assert_close(limit(1 / squared, 1 / squared), minimiser)
    # As printed: a unit step, and the proximal map of g/L.
    assert (limit(1.0, 1 / squared) - minimiser).abs() > 0.1


def test_lemma_2_needs_lam():
    A, lam = torch.randn(4, 6, dtype=F64), 0.3
    hessian = torch.autograd.functional.hessian(
        lambda x: 0.5 * (A.T @ x - 1).square().sum() + lam / 2 * x.square().sum(), torch.zeros(4, dtype=F64)
    )
    of_lemma_2 = torch.linalg.matrix_norm(A, 2) ** 2
    largest = torch.linalg.eigvalsh(hessian).max()
    assert largest > of_lemma_2 + lam / 2
    torch.testing.assert_close(full_smoothness(of_lemma_2, lam), largest)


def test_equation_42_needs_tau_theta():
    A, z, theta, tau = torch.randn(5, 3, dtype=F64), torch.randn(5, dtype=F64), torch.randn(3, dtype=F64), 0.3
    inverse = torch.linalg.inv(torch.eye(3, dtype=F64) + tau * A.T @ A)

    def slope(at: torch.Tensor) -> float:
        at = at.clone().requires_grad_()
        (0.5 * (A @ at - z).square().sum() + (at - theta).square().sum() / (2 * tau)).backward()
        return float(at.grad.norm())

    assert slope(inverse @ (theta + tau * A.T @ z)) < 1e-12
    assert slope(inverse @ (theta + A.T @ z)) > 0.1


def test_conjugate_gradients_descend_only_from_zero():
    uphill = 0
    for _ in range(50):
        A, g, start = torch.randn(4, 6, dtype=F64), torch.randn(6, dtype=F64), torch.randn(6, dtype=F64)

        def apply(v: torch.Tensor, A: torch.Tensor = A) -> torch.Tensor:
            return v + A.T @ (A @ v)

        cold = conjugate_gradients(apply, g, (0,), 2)[0]
        correction = conjugate_gradients(apply, g - apply(start), (0,), 2)[0]
        assert cold @ g > 0
        uphill += bool((start + correction) @ g < 0)
    assert uphill > 0


def test_rescaling_by_a_rounded_tau_is_not_that_of_dropout():
    """p = 0.5 of five features keeps two of them and multiplies by 2.5; nn.Dropout multiplies by 2."""
    u, weight = torch.randn(200, 5, dtype=F64), torch.randn(3, 5, dtype=F64)
    generator = torch.Generator().manual_seed(3)
    got = solver_linear(u, weight, activation="relu", solver="proxsg", iters=1, p=0.5, generator=generator)
    tau = round(0.5 * 5)  # Two.
    mask = tau_nice_mask((200,), 5, tau, device=u.device, dtype=F64, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(got, 5 / tau * (mask * u) @ weight.T)
    assert nn.Dropout(0.5)(torch.ones(1000, dtype=F64)).max() == 2 != 5 / tau


def test_coordinates_that_are_not_drawn_stay_where_they_were():
    """Proposition 6 from another point than zero, for an activation without a zero: the second iterate, by hand."""
    u, weight = torch.randn(4, 3, dtype=F64), torch.randn(6, 3, dtype=F64)
    L, lam = float(torch.linalg.matrix_norm(weight, 2)) ** 2, 0.1
    options = {"activation": nn.Sigmoid(), "solver": "rcd", "p": 0.5, "lam": lam, "lipschitz": L, "output": "value"}
    got = solver_linear(u, weight, iters=2, step="constant", generator=torch.Generator().manual_seed(3), **options)
    source = torch.Generator().manual_seed(3)
    first, second = (tau_nice_mask((4,), 6, 3, device=u.device, dtype=F64, generator=source) for _ in range(2))
    x = first * torch.sigmoid(u @ weight.T)
    moved = torch.sigmoid(x - x @ (weight @ weight.T + lam * torch.eye(6, dtype=F64)) / (L + lam) + u @ weight.T)
    torch.testing.assert_close(got, torch.where(second > 0, moved, x))
    # As printed, the proximal map of all coordinates: those that were never drawn are at sigmoid(0).
    never = (first == 0) & (second == 0)
    assert never.any() and (got[never] == 0).all() and torch.sigmoid(torch.zeros(())) == 0.5


def test_a_summed_gram_matrix_depends_on_the_batch_size():
    """The same batch twice: the mean gradient is the same, the direction of gram="sum" is not."""
    x, y = torch.randn(6, 5, dtype=F64), torch.randn(6, 2, dtype=F64)
    directions = {}
    for gram in ("sum", "mean"):
        for copies in (1, 2):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).double()
            prox = ProxProp(model, mode="exact", gram=gram)
            nn.functional.mse_loss(model(x.repeat(copies, 1)), y.repeat(copies, 1)).backward()
            prox.precondition()
            directions[gram, copies] = model[0].weight.grad
    torch.testing.assert_close(directions["mean", 1], directions["mean", 2])
    assert (directions["sum", 1] - directions["sum", 2]).abs().max() > 0.1 * directions["sum", 1].abs().max()


def test_a_norm_of_one_may_leave_no_equilibrium():
    """z = relu(z + 1): every step adds one. With 0.9 in the place of 1 there is an equilibrium."""
    z, bounded = torch.zeros((), dtype=F64), torch.zeros((), dtype=F64)
    for _ in range(500):
        z, bounded = torch.relu(z + 1), 0.9 * torch.relu(0.9 * bounded + 1)
    assert z == 500
    torch.testing.assert_close(bounded, 0.9 * torch.relu(0.9 * bounded + 1))


def test_lemma_2_with_a_first_weight_of_zero_forgets_its_input():
    """f_1(z, x) = alpha W_1^T s(W_1 z + U_1 x + b_1) + (1 - alpha) z: with W_1 = 0 nothing of x is left."""
    z, U = torch.randn(4, dtype=F64), torch.randn(3, 5, dtype=F64)
    W = torch.zeros(3, 4, dtype=F64)
    found = [0.8 * W.T @ torch.relu(W @ z + U @ torch.randn(5, dtype=F64)) + 0.2 * z for _ in range(2)]
    assert torch.equal(*found)


def test_the_factor_of_lemma_4_has_the_rank_of_the_weights():
    """W = A B^T with the B of the printed proof; and W = 0, for which no B of full rank exists."""
    m, n, k = 5, 4, 6
    weight = torch.randn(m, 2, dtype=F64) @ torch.randn(2, n, dtype=F64)
    A = torch.randn(m, k, dtype=F64)
    U, values, V = torch.linalg.svd(A)
    C = torch.zeros(k, n, dtype=F64)
    C[:m] = (U.T @ weight) / values[:, None]
    B = (V.T @ C).T
    torch.testing.assert_close(A @ B.T, weight)
    assert torch.linalg.matrix_rank(B) == torch.linalg.matrix_rank(weight) == 2 < n
    # What A takes to zero has k - m dimensions: the rows of any B with A B^T = 0 lie in there.
    assert k - torch.linalg.matrix_rank(A) == 1 < n
