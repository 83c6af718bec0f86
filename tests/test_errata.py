"""docs/errata.md: every correction names tests that exist, and those that no other file has are here."""

import re
from pathlib import Path

import torch

from solver_plugins.prox import SoftshrinkPrior
from solver_plugins.proxprop.solve import conjugate_gradients
from solver_plugins.solvers.steps import full_smoothness

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

        cold, _ = conjugate_gradients(apply, g, 2)
        correction, _ = conjugate_gradients(apply, g - apply(start), 2)
        assert cold @ g > 0
        uphill += bool((start + correction) @ g < 0)
    assert uphill > 0
