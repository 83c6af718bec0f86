"""Blocks under torch.func, and writes that used to break a pass: right, or a named error."""

import copy

import pytest
import torch
from torch import nn

from solver_plugins import SolverConv2d, SolverLinear, convert_model, set_blend
from solver_plugins.errors import WeightError


def made(kind, training, dtype=torch.float32):
    torch.manual_seed(0)
    if kind == "linear":
        block, u = SolverLinear(6, 4, activation="relu", solver="proxgd", iters=3), torch.randn(5, 6)
    else:
        block, u = SolverConv2d(2, 3, 3, activation="relu", solver="proxgd", iters=3), torch.randn(2, 2, 6, 6)
    return block.to(dtype).train(training), u.to(dtype)


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_an_ensemble(kind, training, buffers):
    block, u = made(kind, training)
    members = [copy.deepcopy(block) for _ in range(3)]
    for factor, member in zip((0.5, 1.0, 1.3), members, strict=True):
        with torch.no_grad():
            member.weight.mul_(factor)
        member.train(training)
    before = {name: buffer.clone() for name, buffer in block.named_buffers()}
    stacked = torch.func.stack_module_state(members)
    call = torch.func.functional_call
    if buffers:
        got = torch.vmap(lambda *state: call(block, state, (u,)))(*stacked)
    else:
        got = torch.vmap(lambda parameters: call(block, parameters, (u,)))(stacked[0])
    assert all(torch.equal(before[name], buffer) for name, buffer in block.named_buffers()), "a pure function"
    with torch.no_grad():
        torch.testing.assert_close(got, torch.stack([member(u) for member in members]), rtol=1e-3, atol=1e-3)


# torch scripts its own formulas when it is first asked for one.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:FutureWarning")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_forward_mode_after_another_dtype(kind, training):
    block, u = made(kind, training, torch.float64)
    tangent = torch.randn_like(u)
    value, found = torch.func.jvp(block, (u,), (tangent,))
    size = 1e-6
    with torch.no_grad():
        expected = (block(u + size * tangent) - block(u - size * tangent)) / (2 * size)
    torch.testing.assert_close(value, block(u))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_a_schedule_writes_the_blend_before_the_backward_pass():
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)), torch.randn(2, 4)
    model = convert_model(net, "proxgd", 3, blend=0.5, example_inputs=x)
    model(x).sum().backward()
    expected = model[0].weight.grad.clone()
    model.zero_grad()
    loss = model(x).sum()
    set_blend(model, 0.1)
    loss.backward()
    assert torch.equal(model[0].weight.grad, expected)


def test_a_constant_that_is_not_used_may_overflow():
    for iters in (1, 3):
        block = SolverLinear(4, 3, activation="relu", solver="proxgd", iters=iters)
        block.weight.data.mul_(1e22)
        if iters == 1:
            assert torch.isfinite(block.eval()(torch.randn(2, 4))).all()
        else:
            with pytest.raises(WeightError, match="Lipschitz constant"):
                block.eval()
