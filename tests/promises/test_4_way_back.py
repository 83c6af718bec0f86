"""Promises 4 and 5: the plain model again, plain weights, and a conversion written down and done again."""

import copy

import pytest
import torch

from solver_plugins import convert_model, revert_model
from solver_plugins.blocks import blocks_of
from solver_plugins.errors import SolverPluginsWarning
from solver_plugins.surgery import Conversion, apply_conversion, conversion_of
from tests.promises.cases import MODELS, PAIRS, SMALL, SOLVERS, build, convert, converted, rows, run, singles

EVERY = rows((model, solver) for model in SMALL for solver in SOLVERS)


def anatomy(made):
    """Everything a conversion could leave behind: classes, attributes, buffers, hooks, by module."""
    found = {}
    for name, module in made.named_modules():
        hooks = {key: len(value) for key, value in vars(module).items() if "hooks" in key and hasattr(value, "__len__")}
        buffers = (list(module._buffers), sorted(module._non_persistent_buffers_set))
        found[name] = (type(module), set(vars(module)), hooks, buffers, list(module._parameters), module.training)
    return found


@pytest.mark.parametrize(("model", "solver"), rows(PAIRS))
def test_reverted_is_the_plain_model(model, solver):
    """Promise 4: classes, attributes, hooks, buffers, keys and outputs are those of a model never converted."""
    plain = build(model).eval()
    before, expected, keys = anatomy(plain), run(plain, model), list(plain.state_dict())
    parameters = list(plain.parameters())
    convert(plain, model, solver)
    assert anatomy(plain) != before
    assert revert_model(plain) is plain
    assert anatomy(plain) == before
    assert torch.equal(run(plain, model), expected) and list(plain.state_dict()) == keys
    assert all(a is b for a, b in zip(plain.parameters(), parameters, strict=True))


@pytest.mark.parametrize(("model", "solver"), EVERY)
def test_reverted_after_training_keeps_the_trained_weights(model, solver):
    """Promise 4: the plain model with the weights as they are now, dropout live again."""
    made = converted(model, solver).train()
    optimizer = torch.optim.SGD(made.parameters(), 0.01)
    for _ in range(2):
        run(made, model).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = copy.deepcopy(made.state_dict())
    plain = build(model)
    plain.load_state_dict(weights)
    with pytest.warns(SolverPluginsWarning, match="differ from those of the trained one"):
        reverted = revert_model(made)
    assert anatomy(reverted) == anatomy(plain.train())
    assert torch.equal(run(reverted.eval(), model), run(plain.eval(), model))
    outputs = []
    for one in (reverted, plain):
        torch.manual_seed(5)
        outputs.append(run(one.train(), model))
    assert torch.equal(*outputs)


@pytest.mark.parametrize(("model", "solver"), EVERY)
def test_written_down_and_done_again(model, solver):
    """Promise 5: plain weights and a JSON text make the same model again, without a recorded pass."""
    made = converted(model, solver).eval()
    text = conversion_of(made).to_json()
    again = build(model)
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.normal_()
    again.load_state_dict(made.state_dict())
    apply_conversion(again, Conversion.from_json(text)).eval()
    assert conversion_of(again) == conversion_of(made)
    assert [type(module) for module in again.modules()] == [type(module) for module in made.modules()]
    assert torch.equal(run(again, model), run(made, model))
    outputs = []
    for one in (again, made):
        torch.manual_seed(7)
        outputs.append(run(one.train(), model))
    assert torch.equal(*outputs), "the sampled passes are the same, too"


@pytest.mark.parametrize("model", singles())
def test_every_model_is_written_down(model):
    """Promise 5 for every model."""
    made = converted(model, "proxgd").eval()
    again = apply_conversion(build(model), Conversion.from_json(conversion_of(made).to_json())).eval()
    assert blocks_of(again).keys() == blocks_of(made).keys()
    assert torch.equal(run(again, model), run(made, model))


@pytest.mark.parametrize("model", SMALL)
def test_a_copy_leaves_the_original_plain(model):
    """Promise 4: ``inplace=False`` never touches the model."""
    plain = build(model)
    before = anatomy(plain)
    made = convert(plain, model, "proxgd", inplace=False)
    assert anatomy(plain) == before and blocks_of(made) and made is not plain
    assert not {id(p) for p in plain.parameters()} & {id(p) for p in made.parameters()}


def test_converted_again_with_other_settings_after_the_way_back():
    """Promise 4: nothing of the first conversion is left for the second."""
    made = revert_model(converted("residual", "proxsg"))
    fresh = converted("residual", "fista").eval()
    convert_model(made, "fista", 3, pattern="all", example_inputs=MODELS["residual"].inputs(torch.float32))
    assert torch.equal(run(made.eval(), "residual"), run(fresh, "residual"))
