"""Gates in two real processes: DDP and FSDP2 train them as one process does."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from solver_plugins import convert_model, gates_of, param_groups
from tests.gloo import in_two_processes
from tests.tolerances import tolerance

F64 = torch.float64


def _made(kind):
    torch.manual_seed(0)
    layers = (nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), nn.GELU(), nn.Linear(5, 4))
    x, labels = torch.randn(8, 6, dtype=F64), torch.arange(8) % 4
    model = convert_model(nn.Sequential(*layers).double(), "proxgd", 4, pattern="all", gate=kind, example_inputs=x)
    return model, x, labels


def _trained(model, inner, x, labels):
    """The gates after a few steps, and the weights; one step leads below zero."""
    optimizer = torch.optim.SGD(param_groups(inner, 0.3, gate_rate=3), momentum=0.5)
    for _ in range(4):
        nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = {**gates_of(inner), "weight": inner[0].weight}
    return {
        name: (one.full_tensor() if isinstance(one, DTensor) else one).detach().tolist() for name, one in found.items()
    }


def _apart(rank, kind, way):
    model, x, labels = _made(kind)
    if way == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        for layer in (model[0], model[2], model[4]):
            fully_shard(layer)
        wrapped = fully_shard(model)
        assert all(isinstance(gate, DTensor) for gate in gates_of(model).values())
    return _trained(wrapped, model, x[rank::2], labels[rank::2])


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
@pytest.mark.parametrize("kind", ["channel", pytest.param("scalar", marks=pytest.mark.slow)])
def test_two_processes_train_gates_as_one_does(kind, way):
    model, x, labels = _made(kind)
    expected = _trained(model, model, x, labels)
    assert any(bool((gate == 0).any()) for gate in gates_of(model).values()) or kind == "scalar"
    assert any(bool((gate > 0).any()) for gate in gates_of(model).values())
    for found in in_two_processes(_apart, kind, way):
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            torch.testing.assert_close(
                torch.tensor(found[name]), torch.tensor(values), **tolerance(torch.float32)._asdict()
            )
