"""Two real processes over gloo: replicas agree on weights and constants."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from solver_plugins import SolverConv2d, SolverLinear
from solver_plugins.blocks.fold import synchronised_variance
from tests.gloo import in_two_processes


def weights_and_constants(rank, solver):
    torch.manual_seed(0)
    options = {"activation": "relu", "solver": solver, "iters": 3}
    model = nn.Sequential(SolverConv2d(3, 4, 3, **options), nn.ReLU(), nn.Flatten(), SolverLinear(4 * 16, 5, **options))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(ddp.parameters(), 1e-2)
    torch.manual_seed(rank)
    for _ in range(4):
        optimizer.zero_grad()
        ddp(torch.randn(2, 3, 6, 6)).square().mean().backward()
        optimizer.step()
    model(torch.zeros(1, 3, 6, 6))
    return [tensor.tolist() for tensor in (*model.parameters(), model[0].L, model[3].L)]


@pytest.mark.parametrize("solver", ["proxgd", "proxsg"])
def test_replicas_agree(solver):
    one, other = in_two_processes(weights_and_constants, solver)
    assert one == other


def variance_of_a_share(rank, numbers, share):
    y = torch.tensor(numbers, dtype=torch.float64)[slice(0, share) if rank == 0 else slice(share, None)]
    var = synchronised_variance(y.requires_grad_(), dist.group.WORLD)
    var.square().sum().backward()
    return var.tolist(), y.grad.tolist()


def test_the_variance_over_two_processes_is_that_of_the_whole_batch():
    """Value and gradient, shares of unequal size; every process differentiates the sum of both losses, as DDP does."""
    y = torch.randn(5, 3, 4, dtype=torch.float64, requires_grad=True)
    parts = in_two_processes(variance_of_a_share, y.tolist(), 2)
    var = y.var((0, 2), correction=0)
    (2 * var.square().sum()).backward()
    for found, _ in parts:
        torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), var.detach())
    grads = torch.tensor([row for _, grad in parts for row in grad], dtype=torch.float64)
    torch.testing.assert_close(grads, y.grad)
