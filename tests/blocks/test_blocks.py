"""A block is its layer: class, Parameters, keys; and one iteration of it is that layer."""

import copy
import io
import pickle

import pytest
import torch
from timm.layers import Conv2dSame
from torch import nn
from transformers.pytorch_utils import Conv1D

from solver_plugins import SolverBlock, SolverConv1d, SolverConv2d, SolverConv3d, SolverLinear, list_priors
from solver_plugins.prox import Monotone, make_prior
from tests.solve.cases import CASES, SAMPLING

F64 = torch.float64
LAYERS = {
    "linear": (lambda **k: nn.Linear(6, 4, **k), (2, 6)),
    "tokens": (lambda **k: nn.Linear(6, 4, bias=False, **k), (2, 3, 6)),
    "conv1d": (lambda **k: nn.Conv1d(3, 4, 3, stride=2, **k), (2, 3, 9)),
    "conv2d": (lambda **k: nn.Conv2d(3, 4, 3, stride=2, padding=1, **k), (2, 3, 7, 6)),
    "conv2d_same": (lambda **k: nn.Conv2d(4, 4, (2, 3), padding="same", groups=2, dilation=2, **k), (2, 4, 5, 6)),
    "conv2d_circular": (lambda **k: nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular", **k), (2, 3, 5, 5)),
    "conv2d_reflect": (lambda **k: nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect", **k), (2, 3, 5, 5)),
    "conv3d": (lambda **k: nn.Conv3d(2, 3, 2, padding=1, **k), (2, 2, 3, 3, 3)),
    "timm_conv2d_same": (lambda dtype=None: Conv2dSame(3, 4, 3, stride=2).to(dtype), (2, 3, 7, 8)),
    "hf_conv1d": (lambda **k: Conv1D(4, 6).to(**k), (2, 3, 6)),
    "unbatched_conv2d": (lambda **k: nn.Conv2d(3, 4, 3, **k), (3, 6, 6)),
}


def make(name, **keywords):
    build, shape = LAYERS[name]
    layer = build(dtype=F64)
    return layer, SolverBlock.from_layer(layer, **keywords), torch.randn(shape, dtype=F64)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("prior", sorted(set(list_priors()) - {"monotone", "prelu"}))
def test_one_iteration_of_proxgd_is_layer_then_activation(name, prior):
    """Eq. 3 in the normalized formulation, for every activation of the table and every operator; bit for bit."""
    spatial = LAYERS[name][0](dtype=F64).weight.dim() - 2
    made = make_prior(prior, dim=-1 - spatial) if prior == "softmax" else make_prior(prior)
    layer, block, u = make(name, activation=made, solver="proxgd", iters=1)
    assert torch.equal(block(u), layer(u))
    value = SolverBlock.from_layer(layer, made, "proxgd", 1, output="value")
    assert torch.equal(value(u), made.prox(layer(u), 1.0))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    "activation", [nn.PReLU(dtype=F64), Monotone(lambda v: v / (1 + v * v).sqrt())], ids=["prelu", "own"]
)
def test_one_iteration_with_a_module_or_a_function_of_the_users(name, activation):
    layer, block, u = make(name, activation=activation, solver="proxgd", iters=1)
    assert torch.equal(block(u), layer(u))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("solver", sorted(CASES))
def test_every_solver_runs_and_trains_on_every_layer(name, solver):
    layer, block, u = make(name, activation="relu", solver=solver, iters=4, **CASES[solver])
    assert isinstance(block, type(layer)) and isinstance(block, SolverBlock)
    assert block.weight is layer.weight and block.bias is layer.bias
    assert list(block.state_dict()) == list(layer.state_dict())
    block(u).square().mean().backward()
    assert torch.isfinite(layer.weight.grad).all() and layer.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("solver", SAMPLING)
def test_evaluation_modes(solver):
    options = CASES[solver]
    layer, block, u = make("linear", activation="relu", solver=solver, iters=4, **options)
    assert not torch.equal(block(u), block(u)), "training samples"
    block.eval()
    assert torch.equal(block(u), block(u)), "evaluation is deterministic by default"
    noisy = SolverBlock.from_layer(layer, "relu", solver, 4, eval_mode="stochastic", **options).eval()
    assert not torch.equal(noisy(u), noisy(u))


def test_deterministic_evaluation_keeps_the_training_schedule():
    """proxsg in evaluation is full-gradient descent with the decayed steps."""
    layer, block, u = make("linear", activation="relu", solver="proxsg", iters=3, decay=0.5)
    block.eval()
    A, c, total = layer.weight, layer(u), block.L + 1e-3
    x = torch.relu(c)
    for step in (0.5, 0.25):
        v = x - step * ((x @ A @ A.T + 1e-3 * x) / total - c)
        x = torch.relu(v)
    torch.testing.assert_close(torch.relu(block(u)), x, rtol=1e-12, atol=1e-12)


def test_named_classes_and_constructors():
    for cls, args in [
        (SolverLinear, (5, 4)),
        (SolverConv1d, (3, 4, 3)),
        (SolverConv2d, (3, 4, 3, 2, 1)),
        (SolverConv3d, (3, 4, 2)),
    ]:
        block = cls(*args, activation=nn.ReLU(), solver="proxsg", iters=3, p=0.25, dtype=F64)
        assert block.weight.dtype == F64 and block.L.dtype == F64 and block.L > 0
        assert block.solver.config.p == 0.25
        assert "proxsg" in repr(block).lower() and "p=0.25" in repr(block)
    with pytest.raises(TypeError):
        SolverConv2d.from_conv(nn.Conv1d(2, 2, 2))


def test_readme_line():
    fc = nn.Linear(400, 120)
    block = SolverLinear.from_linear(fc, activation=nn.ReLU(), p=0.5, solver="proxsg", iters=10)
    optimizer = torch.optim.SGD(block.parameters(), 0.01)
    for _ in range(3):
        optimizer.zero_grad()
        torch.relu(block(torch.randn(16, 400))).mean().backward()
        optimizer.step()
    assert block.weight is fc.weight


def test_device_flags_and_hooks_survive():
    fc = nn.Linear(4, 4)
    calls = []
    fc.register_forward_hook(lambda *_: calls.append(1))
    fc.weight.requires_grad_(False)
    fc.eval()
    block = SolverLinear.from_linear(fc, "relu", solver="proxgd")
    block(torch.randn(2, 4))
    assert calls == [1] and not block.training and not block.weight.requires_grad
    block.register_forward_hook(lambda *_: calls.append(2))
    fc(torch.randn(2, 4))
    assert calls == [1, 1], "a hook on the block must not appear on the layer"


@pytest.mark.parametrize("name", LAYERS)
def test_deepcopy_pickle_and_state_dict(name, tmp_path):
    layer, block, u = make(name, activation=nn.Tanh(), solver="fista", iters=5)
    block.eval()
    expected = block(u)
    for clone in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert type(clone) is type(block) and clone.weight is not block.weight
        assert torch.equal(clone(u), expected)
    buffer = io.BytesIO()
    torch.save(block.state_dict(), buffer)
    buffer.seek(0)
    fresh_layer, fresh, _ = make(name, activation=nn.Tanh(), solver="fista", iters=5)
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    torch.testing.assert_close(fresh.eval()(u), expected, rtol=1e-6, atol=1e-9)
    fresh_layer.load_state_dict(block.state_dict())
    assert torch.equal(fresh_layer(u), layer(u))


def test_a_prelu_partner_is_copied_along():
    model = nn.ModuleDict({"act": nn.PReLU()})
    model["fc"] = SolverLinear.from_linear(nn.Linear(4, 4), model["act"], solver="proxgd", iters=3)
    assert sorted(model.state_dict()) == ["act.weight", "fc.bias", "fc.weight"]
    clone = copy.deepcopy(model)
    assert clone["fc"].prior.module is clone["act"] is not model["act"]
    owner = SolverLinear.from_linear(nn.Linear(4, 4), nn.PReLU(), solver="proxgd", output="value")
    assert "activation.weight" in dict(owner.named_parameters()), "a block that applies it owns it"


def test_diagnostics():
    _, block, u = make("conv2d", activation="relu", solver="proxgd", iters=6)
    info = block.diagnose(u)
    assert info.iterations == 6 and info.objective.shape == info.residual.shape == (6, 2)
    assert (info.objective[1:] <= info.objective[:-1] + 1e-12).all()
    assert info.converged(10.0).all() and not info.converged(1e-12).any()
