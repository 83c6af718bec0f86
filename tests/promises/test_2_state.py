"""Promise 2: keys, shapes, dtypes, Parameter objects and classes stay; steps are buffers that are not saved."""

import copy

import pytest
import torch
from torch import nn

from solver_plugins.blocks import blocks_of
from solver_plugins.blocks.stepsize import KEPT_BUFFERS
from tests.promises.cases import PAIRS, SMALL, SOLVERS, build, convert, rows, run

LAYOUT = rows(pair for pair in PAIRS if pair[0] in SMALL or pair[1] == "proxgd")


@pytest.mark.parametrize(("model", "solver"), LAYOUT)
def test_the_state_dict_is_that_of_the_plain_model(model, solver):
    """Promise 2: the same keys in the same order, shapes, dtypes and Parameter objects; every object is still there."""
    made = build(model)
    before = {name: (value.shape, value.dtype, value.clone()) for name, value in made.state_dict().items()}
    parameters = dict(made.named_parameters(remove_duplicate=False))
    modules = {name: (module, type(module)) for name, module in made.named_modules(remove_duplicate=False)}
    assert convert(made, model, solver) is made
    after = made.state_dict()
    assert list(after) == list(before)
    for name, (shape, dtype, value) in before.items():
        assert after[name].shape == shape and after[name].dtype == dtype and torch.equal(after[name], value)
    now = dict(made.named_parameters(remove_duplicate=False))
    assert now.keys() == parameters.keys() and all(now[name] is parameters[name] for name in now)
    here = dict(made.named_modules(remove_duplicate=False))
    assert here.keys() == modules.keys()
    for name, (module, kind) in modules.items():
        assert here[name] is module and isinstance(module, kind)
    assert any(type(module) is not kind for module, kind in modules.values())


@pytest.mark.parametrize(("model", "solver"), rows((model, solver) for model in SMALL for solver in SOLVERS))
def test_step_buffers_are_small_and_not_saved(model, solver):
    """Promise 2: what a block adds is non-persistent, written in place, and follows from the weights."""
    made = convert(build(model), model, solver)
    added = {name: block for name, block in blocks_of(made).items()}
    for name, block in added.items():
        own = {key: buffer for key, buffer in block.named_buffers(recurse=False) if key in KEPT_BUFFERS}
        assert "L" in own and own["L"].dim() == 0 and not any(f"{name}.{key}" in made.state_dict() for key in own)
        assert not any(buffer.requires_grad for buffer in own.values())
    places = {id(buffer) for block in added.values() for buffer in block.buffers(recurse=False)}
    run(made.train(), model).sum().backward()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(1.1)
    run(made.train(), model)
    assert {id(buffer) for block in added.values() for buffer in block.buffers(recurse=False)} == places


@pytest.mark.parametrize("model", SMALL)
def test_an_optimizer_made_before_the_conversion_trains_it(model):
    """Promise 2: the optimizer's Parameters are the model's."""
    made = build(model)
    optimizer = torch.optim.SGD(made.parameters(), 0.01)
    convert(made, model, "proxgd")
    before = copy.deepcopy(made.state_dict())
    run(made.train(), model).square().mean().backward()
    optimizer.step()
    for name in blocks_of(made):
        layer = made.get_submodule(name)
        if isinstance(layer, nn.Linear | nn.Conv2d):
            assert not torch.equal(layer.weight, before[f"{name}.weight"]), name
