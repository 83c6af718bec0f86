"""Anderson's small least-squares problem where it has no unique solution."""

import pytest
import torch
from torch import nn

from solver_plugins import solver_linear


@pytest.mark.parametrize("iters", [3, 5, 10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parallel_residuals_have_a_solution(iters, dtype):
    """With one active feature, or none, all residuals of a sample are parallel, and their Gram matrix is singular."""
    torch.manual_seed(iters)
    active = set()
    for _ in range(10):
        fc = nn.Linear(12, 4, dtype=dtype)
        u = 3 * torch.randn(256, 12, dtype=dtype)
        constant = torch.linalg.matrix_norm(fc.weight.detach(), 2).square()
        options = {"activation": "relu", "lipschitz": constant, "iters": iters}
        x = solver_linear(u, fc.weight, fc.bias, solver="anderson", **options)
        active |= set((x > 0).sum(-1).tolist())
        assert torch.isfinite(x).all()
        x.square().sum().backward()
        assert torch.isfinite(fc.weight.grad).all()
    assert {0, 1, 2} <= active


@pytest.mark.parametrize("seed", range(20))
def test_gradients_are_not_full_of_rounding(seed):
    """Five iterations have four differences, some of them nearly parallel; float32 agrees with float64 all the same."""
    torch.manual_seed(seed)
    n1, n2 = (6, 5) if seed % 2 else (64, 32)
    fc, u = nn.Linear(n1, n2), torch.randn(7, n1)
    constant = torch.linalg.matrix_norm(fc.weight.detach(), 2).square()
    gradients = []
    for dtype in (torch.float32, torch.float64):
        weight = fc.weight.detach().to(dtype).requires_grad_()
        options = {"activation": "relu", "lipschitz": constant.to(dtype), "iters": 5}
        x = solver_linear(u.to(dtype), weight, fc.bias.detach().to(dtype), solver="anderson", **options)
        gradients += torch.autograd.grad(x.square().sum(), weight)
    single, double = gradients
    assert (single - double).norm() <= 1e-2 * double.norm()
