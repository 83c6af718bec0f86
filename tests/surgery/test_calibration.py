"""Gains and blends: the scale of the original network, exactly undone, written down and read again."""

import copy
import math

import pytest
import timm
import torch
import torch._dynamo.testing
from torch import nn

from solver_plugins import (
    apply_conversion,
    calibrate,
    conversion_of,
    convert_model,
    list_solvers,
    revert_model,
    set_blend,
)
from solver_plugins.errors import InputError, OptionError
from solver_plugins.registry import SOLVERS
from solver_plugins.surgery import Conversion
from tests.surgery.test_convert import X, convert, make


def outputs(model, names, x):
    """Returns the argument of each block's activation."""
    found, hooks = {}, []
    for name in names:
        hook = lambda module, args, out, name=name: found.update({name: out.detach()})  # noqa: E731
        hooks.append(model.get_submodule(name).register_forward_hook(hook))
    with torch.no_grad():
        model(x)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("solver", list_solvers())
@pytest.mark.parametrize("blend", [0.0, 0.25])
def test_a_blend_lies_between_the_first_and_the_last_iterate(solver, blend):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 5), nn.ReLU()).eval()
    x = torch.randn(7, 6)
    options = {"pattern": "all", "example_inputs": x} | ({"p": 0.3} if SOLVERS.get(solver).samples != "nothing" else {})
    full = convert_model(copy.deepcopy(plain), solver, iters=5, **options)
    mixed = convert_model(copy.deepcopy(plain), solver, iters=5, blend=blend, **options)
    expected = torch.lerp(plain[0](x), full[0](x), blend)
    torch.testing.assert_close(mixed[0](x), expected)
    (found,) = torch.autograd.grad(mixed[0](x).square().sum(), mixed[0].weight)
    one, whole = plain[0].weight, full[0].weight
    wanted = torch.autograd.grad(torch.lerp(plain[0](x), full[0](x), blend).square().sum(), (one, whole))
    torch.testing.assert_close(found, wanted[0] + wanted[1])


def test_in_training_the_first_iterate_of_a_sampling_solver_is_dropout():
    """``blend=0`` is the original network: its dropout, which the solver took over, included."""
    torch.manual_seed(0)
    model = convert(make(), "proxsg", iters=4, blend=0.0).train()
    plain = convert(make(), "proxsg", iters=1).train()
    for one in (model, plain):
        one.load_state_dict(make().state_dict())
    torch.manual_seed(3)
    u = torch.randn(9, 6)
    torch.manual_seed(3)
    found = model.fc1(u)
    torch.manual_seed(3)
    torch.testing.assert_close(found, plain.fc1(u))


def test_an_implicit_gradient_blends_too():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 5), nn.ReLU()).double()
    x = torch.randn(7, 6, dtype=torch.float64)
    grads = []
    for gradient in ("implicit", "unrolled"):
        model = convert_model(
            copy.deepcopy(plain), "fista", iters=3000, lam=0.1, blend=0.3, example_inputs=x, gradient=gradient
        )
        grads.append(torch.autograd.grad(model(x).square().sum(), model[0].weight)[0])
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-8)


def test_calibrated_blocks_keep_mean_and_variance_of_every_feature():
    plain = make().eval()
    names = ["bn1", "conv3", "fc1", "fc2"]
    wanted = outputs(plain, names, X)
    model = convert(copy.deepcopy(plain), "proxgd", iters=8, pattern="all")
    model.train()
    gains = calibrate(model, [X], progress=False)
    assert all(module.training for module in model.modules()) and set(gains) == {
        "conv1",
        "conv2",
        "conv3",
        "fc1",
        "fc2",
    }
    found = outputs(model.eval(), names, X)
    for name in names:
        dims = [d for d in range(found[name].dim()) if d != 1]
        torch.testing.assert_close(
            found[name].square().mean(dims), wanted[name].square().mean(dims), rtol=1e-4, atol=1e-8
        )


def test_gains_are_written_down_and_undone():
    plain = make().eval()
    model = convert(copy.deepcopy(plain), "proxgd", iters=6, pattern="all", blend=0.5)
    raw = model(X)
    calibrate(model, [(X, torch.zeros(4)), X], progress=False)
    assert not torch.allclose(model(X), raw)
    written = conversion_of(model).to_json()
    again = apply_conversion(copy.deepcopy(plain), Conversion.from_json(written))
    assert torch.equal(again(X), model(X))
    assert torch.equal(copy.deepcopy(model)(X), model(X))
    assert list(model.state_dict()) == list(plain.state_dict())
    assert model.bfloat16().conv1.channel_gain.dtype == torch.float32
    model.float()
    set_blend(model, 0.0)
    assert torch.allclose(model(X), plain(X), rtol=1e-2, atol=1e-2)
    assert torch.equal(revert_model(again)(X), plain(X))


def test_a_schedule_of_blends_compiles_once():
    model = convert(make(), "proxgd", iters=3, blend=0.1).eval()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(model, backend=counter)
    compiled(X)
    count = counter.frame_count
    for blend in (0.2, 0.5, 1.0):
        set_blend(model, blend)
        torch.testing.assert_close(compiled(X), model(X))
    assert counter.frame_count == count
    set_blend(model, 1.0)
    torch.testing.assert_close(model(X), convert(make(), "proxgd", iters=3).eval()(X))


def test_a_deep_network_keeps_its_scale():
    torch.manual_seed(0)
    plain = timm.create_model("test_resnet", num_classes=5).eval()
    images = torch.randn(8, 3, 64, 64)
    for module in plain.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    model = convert_model(copy.deepcopy(plain), "proxgd", iters=10, pattern="all")
    with torch.no_grad():
        scale = math.log(model(images).std() / plain(images).std())
        calibrate(model, images.split(4), progress=False)
        assert abs(math.log(model(images).std() / plain(images).std())) < min(0.7, abs(scale))


def test_bad_input():
    model = convert(make(), "proxgd", iters=3)
    with pytest.raises(InputError, match="at least one batch"):
        calibrate(model, [], progress=False)
    with pytest.raises(InputError, match="not finite"):
        calibrate(model, [X * torch.nan], progress=False)
    with pytest.raises(OptionError, match="without a solver block"):
        calibrate(make(), [X])
    with pytest.raises(OptionError, match="blend"):
        convert(make(), "proxgd", blend=1.5)
    with pytest.raises(OptionError, match="blend"):
        set_blend(model, -0.1)
    with pytest.raises(RuntimeError):
        calibrate(model, [X[:, :2]], progress=False)
    assert model.fc1.observer is None and model.fc1.channel_gain is None and model.fc1.solver.config.iters == 3
    with pytest.raises(OptionError, match="5 finite gains"):
        model.fc1.set_scale(torch.ones(4))


@pytest.mark.parametrize("given", [X, {"x": X}, None, "batches", 3])
def test_something_else_than_batches_is_told(given):
    model = convert(make(), "proxgd", iters=3)
    with pytest.raises(InputError, match=f"a list of them or a DataLoader; found {type(given).__name__}"):
        calibrate(model, given, progress=False)
    assert all(block.gain is None for block in conversion_of(model).blocks)


@pytest.mark.parametrize("blend", ["a", None, True, float("nan"), 1.5])
def test_a_blend_that_is_none_is_told(blend):
    with pytest.raises(OptionError, match=r"Expected a blend in \[0, 1\]; found"):
        convert(make(), "proxgd", iters=3, blend=blend)
    model = convert(make(), "proxgd", iters=3)
    with pytest.raises(OptionError, match=r"Expected a blend in \[0, 1\]; found"):
        set_blend(model, blend)
    with pytest.raises(OptionError, match=r"Expected a blend in \[0, 1\]; found"):
        model.fc1.set_blend(blend)
