"""Promise 3: device, dtype, mode, flags and hooks survive; copies, pickles and state-dicts round-trip; no nesting."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from solver_plugins import convert_model
from solver_plugins.blocks import blocks_of
from solver_plugins.blocks.install import Guard
from solver_plugins.surgery import ConversionError
from tests.promises.cases import MODELS, PAIRS, SMALL, SOLVERS, build, convert, converted, rows, run, singles

EVERY = rows((model, solver) for model in SMALL for solver in SOLVERS)
COPIES = rows((pair for pair in PAIRS if pair[0] in SMALL or pair[1] == "proxgd"), large="")


def own_hooks(module):
    """Returns how many hooks are the user's: a converted model has one of its own, which looks after its blocks."""
    return len(module._forward_hooks), sum(not isinstance(hook, Guard) for hook in module._forward_pre_hooks.values())


@pytest.mark.parametrize(("model", "solver"), EVERY)
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_flags_and_hooks_survive(model, solver):
    """Promise 3: training, requires_grad, dtype and hooks of every kind are as before, and the hooks run."""
    made = build(model, torch.float64)
    expected = set(blocks_of(converted(model, solver, torch.float64)))
    calls = []
    for index, (name, module) in enumerate(made.named_modules()):
        module.training = index % 2 == 0
        if name in expected:
            module.register_forward_pre_hook(lambda module, args, name=name: calls.append(("before", name)))
            module.register_forward_hook(lambda module, args, output, name=name: calls.append(("after", name)))
            module.register_full_backward_hook(lambda module, *grads, name=name: calls.append(("back", name)))
            module.register_state_dict_pre_hook(lambda module, *rest, name=name: calls.append(("state", name)))
    for index, parameter in enumerate(made.parameters()):
        parameter.requires_grad_(index % 3 != 1)
    flags = [(module.training, *own_hooks(module)) for module in made.modules()]
    wanted = [(parameter.requires_grad, parameter.dtype, parameter.device) for parameter in made.parameters()]
    state = torch.get_rng_state()
    convert(made, model, solver)
    assert torch.equal(torch.get_rng_state(), state)
    calls.clear()  # the recorded pass runs hooks, as they may be part of the function
    assert set(blocks_of(made)) == expected
    now = [(module.training, *own_hooks(module)) for module in made.modules()]
    assert now == flags
    assert [(p.requires_grad, p.dtype, p.device) for p in made.parameters()] == wanted
    assert all(parameter.grad is None for parameter in made.parameters())
    output = run(made, model, torch.float64)
    assert output.dtype == torch.float64
    output.sum().backward()
    made.state_dict()
    assert {(when, name) for when in ("before", "after", "back", "state") for name in expected} <= set(calls)


@pytest.mark.parametrize(("model", "solver"), COPIES)
def test_copies_and_pickles(model, solver):
    """Promise 3: deepcopy, pickle and torch.save of the module give the same function with weights of their own."""
    made = converted(model, solver).train()
    run(made, model).sum().backward()
    made.zero_grad()
    stream = io.BytesIO()
    torch.save(made, stream)
    stream.seek(0)
    clones = [copy.deepcopy(made), pickle.loads(pickle.dumps(made)), torch.load(stream, weights_only=False)]
    expected = run(made.eval(), model)
    for clone in clones:
        assert [type(module) for module in clone.modules()] == [type(module) for module in made.modules()]
        assert torch.equal(run(clone.eval(), model), expected)
        ours = {id(tensor) for tensor in (*made.parameters(), *made.buffers())}
        assert not ours & {id(tensor) for tensor in (*clone.parameters(), *clone.buffers())}
        with torch.no_grad():
            for parameter in clone.parameters():
                parameter.mul_(0.5)
        assert not torch.equal(run(clone.eval(), model), expected), "a block of the copy reads the copy's weights"
    assert torch.equal(run(made.eval(), model), expected)


@pytest.mark.parametrize(("model", "solver"), COPIES)
def test_state_dicts_round_trip(model, solver):
    """Promise 3: loaded weights give the same function, step sizes included, although these are not saved."""
    made = converted(model, solver).train()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        run(made, model)
    other = converted(model, solver)
    report = other.load_state_dict(made.state_dict())
    assert not report.missing_keys and not report.unexpected_keys
    assert torch.equal(run(other.eval(), model), run(made.eval(), model))


@pytest.mark.parametrize(("model", "solver"), EVERY)
def test_converting_twice_is_refused(model, solver):
    """Promise 3: never a solver in a solver."""
    made = converted(model, "proxgd")
    classes = [type(module) for module in made.modules()]
    with pytest.raises(ConversionError, match="revert_model"):
        convert(made, model, solver)
    assert [type(module) for module in made.modules()] == classes


@pytest.mark.parametrize("model", singles())
def test_other_dtypes_and_the_meta_device(model):
    """Promise 3: a block moves as its layer moves; constants keep their precision."""
    made = converted(model, "proxgd").eval()
    expected = run(made, model)
    doubled = copy.deepcopy(made).double()
    assert all(block.L.dtype == torch.float64 for block in blocks_of(doubled).values())
    torch.testing.assert_close(run(doubled, model, torch.float64).float(), expected, rtol=1e-3, atol=1e-4)
    halved = copy.deepcopy(made).bfloat16()
    assert all(block.L.dtype == torch.float32 for block in blocks_of(halved).values())
    output = run(halved, model, torch.bfloat16)
    assert output.dtype == torch.bfloat16 and torch.isfinite(output).all()
    there = copy.deepcopy(made).to("meta")
    assert all(tensor.is_meta for tensor in (*there.parameters(), *there.buffers()))


@pytest.mark.parametrize("model", ["residual", "functional", "timm_vgg", "timm_resnet", "timm_vit"])
def test_converted_on_the_meta_device_and_filled_later(model):
    """Promise 3: a model without weights is converted; loading with ``assign`` makes it the same as any other."""
    made = converted(model, "proxgd").eval()
    with torch.device("meta"):
        empty = MODELS[model].build()
    example = MODELS[model].inputs(torch.float32)
    convert_model(empty, "proxgd", 3, pattern="all", example_inputs=example).eval()
    assert all(tensor.is_meta for tensor in (*empty.parameters(), *empty.buffers()))
    empty.load_state_dict(made.state_dict(), assign=True)
    assert not any(tensor.is_meta for tensor in (*empty.parameters(), *empty.buffers()))
    assert torch.equal(run(empty, model), run(made, model))


def test_tied_weights_are_left_alone():
    """Promise 3: two layers that share a Parameter are no blocks, and share it afterwards and in copies."""
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    second.weight = first.weight
    tied = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(6, 4), nn.ReLU())
    with pytest.raises(ConversionError, match="tied weight"):
        convert_model(tied[:4], "proxgd", 3, example_inputs=torch.randn(2, 6))
    made = convert_model(tied, "proxgd", 3, example_inputs=torch.randn(2, 6))
    for one in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert one[0].weight is one[2].weight and list(blocks_of(one)) == ["4"]
