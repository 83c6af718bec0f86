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


@pytest.mark.parametrize(("solver", "most"), [("fista", 7), ("anderson", 5)])
def test_accelerated_solvers_reach_ten_steps_of_proxgd(solver, most):
    """The median over the samples of a shape, and the median of these over the shapes."""
    medians = []
    for n1, n2 in SHAPES:
        torch.manual_seed(n1 + n2)
        fc, u = nn.Linear(n1, n2, dtype=F64).requires_grad_(False), torch.randn(32, n1, dtype=F64)
        constant = torch.linalg.matrix_norm(fc.weight, 2).square()
        options = {"activation": "relu", "lipschitz": constant, "diagnose": True}
        _, ten = solver_linear(u, fc.weight, fc.bias, solver="proxgd", iters=10, **options)
        _, found = solver_linear(u, fc.weight, fc.bias, solver=solver, iters=20, **options)
        medians.append(float(iterations_to(ten.objective[-1], found.objective).double().median()))
    assert torch.tensor(medians).median() <= most, medians
