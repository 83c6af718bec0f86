"""Two real processes over gloo take the step of one process with the whole batch."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from solver_plugins import ProxProp
from solver_plugins.proxprop import LayerNotRunError, ReplicaError, WrappedModelError, proxprop
from tests.gloo import in_two_processes

D = {"dtype": torch.float64}


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, **D), nn.Tanh(), nn.Conv2d(4, 6, 3, stride=2, groups=2, bias=False, **D),
        nn.Flatten(), nn.Linear(24, 20, **D), nn.Tanh(), nn.Linear(20, 10, **D), nn.Tanh(), nn.Linear(10, 3, **D),
    )  # fmt: skip


def data():
    torch.manual_seed(1)
    return torch.randn(8, 2, 5, 5, **D)


# Mode, how the Gram matrix is scaled, micro-batches, whether the matrix-free path is forced.
CASES = [
    ("exact", "sum", 1, False),
    ("exact", "mean", 2, False),
    ("cg3", "sum", 2, False),
    ("cg2", "mean", 1, False),
    ("cg3", "sum", 1, True),
]


GROUPS = {}


def reference(rank, mode, gram):
    """The whole batch in one process: a group of its own."""
    model, x = net(), data()
    with ProxProp(model, mode, gram=gram, process_group=GROUPS[rank]) as prox:
        model(x).square().mean().backward()
        report = prox.precondition()
    return [parameter.grad for parameter in model.parameters()], report


def close(found, expected):
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-13)


def distributed(rank, mode, gram, parts, matrix_free):
    """One step with DistributedDataParallel."""
    model, mine = net(), data().chunk(2)[rank]
    ddp = DistributedDataParallel(model)
    saved = proxprop.GRAM_BYTES
    proxprop.GRAM_BYTES = 0 if matrix_free else saved
    try:
        with ProxProp(ddp, mode, gram=gram) as prox:
            for index, chunk in enumerate(mine.chunk(parts)):
                with ddp.no_sync() if index < parts - 1 else contextlib.nullcontext():
                    (ddp(chunk).square().mean() / parts).backward()
            report = prox.precondition()
    finally:
        proxprop.GRAM_BYTES = saved
    expected, plain = reference(rank, mode, gram)
    close([parameter.grad for parameter in model.parameters()], expected)
    assert {name: one.rows for name, one in report.items()} == {name: one.rows for name, one in plain.items()}
    spaces = {one.space for one in report.values()}
    assert spaces == ({"matrix-free"} if matrix_free else {"features", "batch"})


def uneven(rank):
    """Shares of 7 and 1; the gradient is that of the sum, reduced by hand."""
    model, x = net(), data()
    with ProxProp(model, "cg2") as prox:
        model(x[:7] if rank == 0 else x[7:]).square().sum().backward()
        before = [parameter.grad.clone() for parameter in model.parameters()]
        with pytest.raises(ReplicaError, match="reduce the gradients before"):
            prox.precondition()
        close([parameter.grad for parameter in model.parameters()], before)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        prox.precondition()
    one = net()
    with ProxProp(one, "cg2", process_group=GROUPS[rank]) as prox:
        one(x).square().sum().backward()
        prox.precondition()
    close([parameter.grad for parameter in model.parameters()], [parameter.grad for parameter in one.parameters()])


def silent(rank):
    """A layer that no process ran is an error in all of them; nobody waits for ever."""
    used = net()
    model = nn.ModuleDict({"used": used, "unused": nn.Linear(3, 3, **D)})
    with ProxProp(model) as prox:
        DistributedDataParallel(used)(data().chunk(2)[rank]).square().mean().backward()
        with pytest.raises(LayerNotRunError, match="unused"):
            prox.precondition()


def sharded(rank):
    """FSDP2: gradients are gathered, and directions are given back in shards; accumulation included."""
    model, mine = net(), data().chunk(2)[rank]
    full = copy.deepcopy(model)
    early = ProxProp(model)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    for parts in (1, 2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with ProxProp(model, "exact") as prox:
            prox.attach(optimizer)
            for chunk in mine.chunk(parts):
                (model(chunk).square().mean() / parts).backward()
            optimizer.step()
            assert prox.last_step["4"].rows == 8
        with ProxProp(full, "exact", process_group=GROUPS[rank]) as prox:
            full(data()).square().mean().backward()
            prox.precondition()
        close([parameter.grad.full_tensor() for parameter in model.parameters()], [p.grad for p in full.parameters()])
        torch.optim.SGD(full.parameters(), lr=0.1).step()
        with pytest.raises(WrappedModelError, match="fully_shard first"):
            early.precondition()
        optimizer.zero_grad()
        full.zero_grad()


def tensor_parallel(rank):
    model = nn.Sequential(*net()[4:])
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    with pytest.raises(WrappedModelError, match="0 is spread over processes by tensor parallelism"):
        ProxProp(model)
    assert ProxProp(model, exclude=["0", "2"], skip_last=False).layers == ["4"]


def everything(rank):
    GROUPS.update({one: dist.new_group([one]) for one in range(2)})
    for case in CASES:
        distributed(rank, *case)
    uneven(rank)
    silent(rank)
    sharded(rank)
    tensor_parallel(rank)


def test_two_processes_are_one():
    in_two_processes(everything)
