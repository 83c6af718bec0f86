"""A pass on a fake CUDA device: no tensor on a wrong device, and no look at a value, which would stall a real one.

FakeTensorMode computes devices and shapes without a GPU, and raises where a value is asked for. Autograd's engine does
not run there, but it does on the meta device, where a look at a value raises, too.
"""

import copy

import pytest
import timm
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from solver_plugins import SolverBlock, convert_model, list_priors, list_solvers
from solver_plugins.operators import tracking
from tests.solve.cases import CASES

LAYERS = {
    "linear": (lambda: nn.Linear(6, 8), (4, 6)),
    "conv1d": (lambda: nn.Conv1d(2, 4, 31, padding=15), (2, 2, 40)),
    "conv2d": (lambda: nn.Conv2d(2, 4, 3, 2, 1, groups=2), (2, 2, 7, 7)),
    "circular": (lambda: nn.Conv2d(2, 4, 3, 1, 1, padding_mode="circular"), (2, 2, 7, 7)),
    "patches": (lambda: nn.Conv2d(3, 5, 2, 2), (2, 3, 8, 8)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), (1, 2, 4, 4, 4)),
}


def on_cuda(module, mode):
    """Returns a copy of a module whose Parameters and buffers are fake tensors on a CUDA device."""
    made = copy.deepcopy(module)
    for one in made.modules():
        for kind in (one._parameters, one._buffers):
            for name, value in kind.items():
                if value is not None:
                    with mode:
                        fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
                    wrap = isinstance(value, nn.Parameter)
                    kind[name] = nn.Parameter(fake, value.requires_grad) if wrap else fake
    return made


def run(module, shape, training, monkeypatch, **input):
    monkeypatch.setattr(tracking, "_length", lambda vector: pytest.fail("a branch for numbers at hand"))
    mode = FakeTensorMode()
    made = on_cuda(module.train(training), mode)
    with mode:
        output = made(torch.empty(shape, device="cuda", **input))
    assert output.device.type == "cuda"
    return output


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("layer", sorted(LAYERS))
@pytest.mark.parametrize("solver", sorted(CASES))
def test_solvers_and_layers(solver, layer, training, monkeypatch):
    make, shape = LAYERS[layer]
    block = SolverBlock.from_layer(make(), "relu", solver, 3, **CASES[solver])
    with torch.no_grad():
        expected = block.train(training)(torch.randn(shape)).shape
    assert run(block, shape, training, monkeypatch).shape == expected


def step_on_meta(module, shape):
    made, x = copy.deepcopy(module).to("meta").train(), torch.empty(shape, device="meta", requires_grad=True)
    made(x).sum().backward()
    for one in (x, *(parameter for parameter in made.parameters() if parameter.requires_grad)):
        assert one.grad is not None and one.grad.shape == one.shape and one.grad.is_meta


@pytest.mark.parametrize("layer", sorted(LAYERS))
@pytest.mark.parametrize("solver", sorted(CASES))
def test_a_backward_pass_reads_no_value(solver, layer):
    make, shape = LAYERS[layer]
    step_on_meta(SolverBlock.from_layer(make(), "relu", solver, 3, **CASES[solver]), shape)


@pytest.mark.parametrize("activation", [None, *sorted(set(list_priors()) - {"identity"})])
def test_priors(activation, monkeypatch):
    try:
        block = SolverBlock.from_layer(nn.Linear(6, 8), activation, "proxgd", 3)
    except Exception as error:
        pytest.skip(f"not made from its name: {type(error).__name__}")
    for training in (False, True):
        assert run(block, (4, 6), training, monkeypatch).shape == (4, 8)
    step_on_meta(block, (4, 6))


def net():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(80, 6), nn.Tanh())


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("solver", ["proxgd", "fista", "proxsg"])
def test_chains(solver, training, monkeypatch):
    rate = {"p": 0.5} if solver == "proxsg" else {}
    model = convert_model(net(), solver, 3, pattern="all", example_inputs=torch.randn(2, 3, 8, 8), blend=0.3, **rate)
    assert run(model, (2, 3, 8, 8), training, monkeypatch).shape == (2, 6)
    step_on_meta(model, (2, 3, 8, 8))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("name", "size"), [("test_resnet", 64)])
def test_whole_models(name, size, training, monkeypatch):
    model = convert_model(timm.create_model(name, num_classes=5), "proxgd", 2, pattern="all")
    assert run(model, (2, 3, size, size), training, monkeypatch).shape == (2, 5)
    step_on_meta(model, (2, 3, size, size))


def test_a_look_at_a_value_is_seen():
    """What these tests rely on."""
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        bool(torch.ones((), device="cuda") > 0)
    with pytest.raises(RuntimeError, match="meta"):
        bool(torch.ones((), device="meta") > 0)


def test_every_solver_is_here():
    assert set(CASES) == set(list_solvers())
