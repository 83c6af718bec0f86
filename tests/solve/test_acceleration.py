"""How many iterations the accelerated solvers take to the objective of ten proximal gradient steps."""

import pytest
import torch
from torch import nn

from solver_plugins import solver_linear

F64 = torch.float64
SHAPES = ((400, 120), (1024, 128), (768, 192), (256, 256), (512, 512), (192, 768))
"""Inputs and outputs: those of the benchmarks, or as wide and as narrow as they are."""


def iterations_to(target, objective):
    """Returns the first iteration, counted from one, at which each sample is no higher than its target."""
    reached = objective <= target * (1 + 1e-12 * target.sign())
    assert reached[-1].all()
    return reached.to(torch.int64).argmax(0) + 1


def median_iterations(solver, n1, n2):
    """Returns the median over 32 samples."""
    torch.manual_seed(n1 + n2)
    fc, u = nn.Linear(n1, n2, dtype=F64).requires_grad_(False), torch.randn(32, n1, dtype=F64)
    constant = torch.linalg.matrix_norm(fc.weight, 2).square()
    options = {"activation": "relu", "lipschitz": constant, "lam": 1e-3, "diagnose": True}
    _, ten = solver_linear(u, fc.weight, fc.bias, solver="proxgd", iters=10, **options)
    _, found = solver_linear(u, fc.weight, fc.bias, solver=solver, iters=20, **options)
    return float(iterations_to(ten.objective[-1], found.objective).double().quantile(0.5))


@pytest.mark.parametrize(("n1", "n2"), SHAPES)
def test_accelerated_solvers_reach_ten_steps_of_proxgd(n1, n2):
    """Fista in seven, anderson in five."""
    assert median_iterations("fista", n1, n2) <= 7
    assert median_iterations("anderson", n1, n2) <= 5
