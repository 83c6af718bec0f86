"""Two real processes over gloo: replicas agree on weights and constants."""

import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from solver_plugins import SolverConv2d, SolverLinear
from solver_plugins.blocks.fold import synchronised_variance


def work(rank, port, solver, queue):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
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
    queue.put((rank, [tensor.tolist() for tensor in (*model.parameters(), model[0].L, model[3].L)]))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("solver", ["proxgd", "proxsg"])
def test_replicas_agree(solver):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=work, args=(rank, port, solver, queue)) for rank in range(2)]
    for process in processes:
        process.start()
    results = dict(queue.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert results[0] == results[1]


def variance_of_a_share(rank, share, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    y = torch.load(f"{file}.pt")[slice(0, share) if rank == 0 else slice(share, None)].requires_grad_()
    var = synchronised_variance(y, dist.group.WORLD)
    var.square().sum().backward()
    torch.save((var.detach(), y.grad), f"{file}.{rank}")
    dist.destroy_process_group()


def test_the_variance_over_two_processes_is_that_of_the_whole_batch(tmp_path):
    """Value and gradient, shares of unequal size; every process differentiates the sum of both losses, as DDP does."""
    y = torch.randn(5, 3, 4, dtype=torch.float64, requires_grad=True)
    torch.save(y.detach(), tmp_path / "store.pt")
    mp.spawn(variance_of_a_share, (2, str(tmp_path / "store")), nprocs=2)
    parts = [torch.load(tmp_path / f"store.{rank}") for rank in range(2)]
    var = y.var((0, 2), correction=0)
    (2 * var.square().sum()).backward()
    for found, _ in parts:
        torch.testing.assert_close(found, var.detach())
    torch.testing.assert_close(torch.cat([grad for _, grad in parts]), y.grad)
