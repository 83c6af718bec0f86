"""What stands between a layer and its activation, or in their place, after the conversion: right, or a named error."""

import copy

import pytest
import torch
from torch import nn

from solver_plugins import revert_model
from tests.blocks.linked import (
    Net,
    assert_same,
    assert_same_or_refused,
    block,
    converted,
    diagonal,
    inputs,
    patterns,
    results,
    solved,
    twins,
)

KIND = pytest.mark.parametrize("kind", ["linear", "conv"])
SHARED = pytest.mark.parametrize("shared", [True, False], ids=["shared", "private"])
TRAINING = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


def residual(net, x):
    for name in "ab":
        x = net.activate(name, net.branch(name, x) + x)
    return x


BETWEEN = {
    "2 * y": lambda y: 2 * y,
    "y * mask": lambda y: y * torch.linspace(0, 1, y.shape[1], dtype=y.dtype).reshape(-1, *[1] * (y.dim() - 2)),
    "dropout": lambda y: nn.functional.dropout(y, 0.5, True),
    "y.detach()": lambda y: y.detach(),
    "y.flip(0)": lambda y: y.flip(0).flip(0),
    "view": lambda y: y.view(-1).view(y.shape),
    "permute": lambda y: y.transpose(0, 1).contiguous().transpose(0, 1),
    "cat": lambda y: torch.cat([y[:1], y[1:]]),
    "numpy": lambda y: torch.from_numpy(y.detach().numpy()),
}


@KIND
@SHARED
@pytest.mark.parametrize("between", BETWEEN)
def test_an_operation_between_layer_and_sum(between, kind, shared):
    """A later pass changes a layer's output on the way: what arrives is the solver's argument, or it is refused."""

    def body(net, x):
        for name in "ab":
            y = net.branch(name, x)
            x = net.activate(name, (BETWEEN[between](y) if net.flag else y) + x)
        return x

    plain, made, x = twins(body, kind, shared=shared)
    plain.eval(), made.eval()
    made.flag = True
    torch.manual_seed(0)
    with torch.no_grad():
        expected = x
        for name in "ab":
            expected = block(plain, made, name, expected, lambda y, u=expected: BETWEEN[between](y) + u)
        torch.manual_seed(0)
        assert_same_or_refused(lambda: made(x), expected)


@SHARED
def test_the_first_of_two_calls_is_hidden(shared):
    """A layer is called twice, and its first output goes through what no mode sees: refused, not taken for nothing."""

    def body(net, x):
        if not net.flag:
            return residual(net, x)
        first, second = net.branch("a", x), net.branch("a", 2 * x)
        return net.activate("a", Hidden.apply(first) + x) + net.activate("a", second + x)

    plain, made, x = twins(body, "linear", shared=shared)
    made.flag = True
    expected = block(plain, made, "a", x, lambda y: y + x) + block(plain, made, "a", 2 * x, lambda y: y + x)
    assert_same_or_refused(lambda: made(x), expected)


class Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return torch.from_numpy(y.detach().numpy().copy())

    @staticmethod
    def backward(ctx, gradient):
        return gradient


@SHARED
def test_a_sum_of_another_shape(shared):
    """A later pass flattens layer and skip: a ReLU does not mind, a solver's argument has the layer's shape."""

    def body(net, x):
        for name in "ab":
            y = net.branch(name, x)
            y = (y.flatten(2) + x.flatten(2)) if net.flag else y + x
            x = net.activate(name, y).reshape(x.shape)
        return x

    plain, x = Net(body, "conv", shared).double().eval(), inputs("conv")
    made = converted(plain, x).eval()
    made.flag = True
    expected = x
    for name in "ab":
        expected = block(plain, made, name, expected, lambda y, u=expected: y + u)
    assert_same_or_refused(lambda: made(x), expected)


REPLACED = {
    "the solver itself, copied": lambda layer: copy.deepcopy(layer),
    "a plain layer": lambda layer: None,
    "an adapter": lambda layer: Adapter(layer),
    "a wrapper around a copy": lambda layer: nn.Sequential(copy.deepcopy(layer)),
}


class Adapter(nn.Module):
    """As PEFT's: the layer, and something added to what it returns."""

    def __init__(self, layer, scale=0.3):
        super().__init__()
        self.base, self.scale = layer, scale

    def forward(self, x):
        result = self.base(x)
        return result + self.scale * x.roll(1, 1)


@KIND
@SHARED
@TRAINING
@pytest.mark.parametrize("replacement", REPLACED)
def test_a_layer_that_was_replaced(replacement, kind, shared, training):
    """After the conversion something else stands in the layer's place: its solver runs, or it is refused."""

    plain, made, x = twins(residual, kind, shared=shared)
    plain.train(training), made.train(training)
    before = copy.deepcopy(made)
    plain_layer = copy.deepcopy(plain.a)
    made.a = REPLACED[replacement](made.a) or plain_layer
    adapter = replacement == "an adapter"

    def expected(x):
        y = plain.a(x) + (0.3 * x.roll(1, 1) if adapter else 0)
        c = plain.norm_a(y) + x
        d = diagonal(plain.norm_a, y) if kind == "conv" else None
        x = torch.relu(solved(before.a, plain.a, x, c, d))
        return block(plain, made, "b", x, lambda y: y + x)

    wanted = results(expected, plain, x)
    wanted = {name: value for name, value in wanted.items() if not name.startswith("a.")}

    def run():
        found = results(made, made, x)
        return {name: value for name, value in found.items() if not name.startswith("a.")}

    refusal = assert_same_or_refused(run, wanted)
    assert not (adapter and refusal), "adapters work"


@KIND
@SHARED
def test_a_hook_that_replaces_the_output(kind, shared):
    """What a forward hook returns in place of the layer's output, or of the norm's, is what goes on."""

    plain, made, x = twins(residual, kind, shared=shared)
    plain.eval(), made.eval()
    for where in ("a", "norm_a"):
        for change in (lambda y: 0.5 * y, lambda y: y + 1, lambda y: y.clone()):
            handles = [
                getattr(model, where).register_forward_hook(lambda module, args, y, change=change: change(y))
                for model in (plain, made)
            ]
            first = plain.norm_a(plain.a(x)) + x
            d = diagonal(without_hooks(plain.norm_a), x) if kind == "conv" else None
            start = torch.relu(solved(made.a, plain.a, x, first, d))
            expected = block(plain, made, "b", start, lambda y, u=start: y + u)
            assert_same_or_refused(lambda: made(x), expected)
            for handle in handles:
                handle.remove()


def without_hooks(module):
    bare = copy.deepcopy(module)
    bare._forward_hooks.clear()
    return bare


@KIND
@pytest.mark.parametrize("move", ["view", "permute"])
def test_shape_operations_in_the_recorded_pass(kind, move):
    """ConvNeXt's way: where features are moved between layer and sum, the report says what is converted."""

    def body(net, x):
        y = net.branch("a", x)
        y = y.view(len(y), -1).view(y.shape) if move == "view" else y.transpose(0, 1).contiguous().transpose(0, 1)
        x = net.activate("a", y + x)
        return net.activate("b", net.branch("b", x) + x)

    plain, x = Net(body, kind).double(), inputs(kind)
    found = patterns(plain, x)
    made = converted(plain, x)

    def expected(x):
        linked = "a" in found
        x = block(plain, made, "a", x, lambda y: y + x) if linked else torch.relu(plain.branch("a", x) + x)
        return block(plain, made, "b", x, lambda y: y + x)

    assert_same(results(made, made, x), results(expected, plain, x))
    revert_model(made)
    assert_same(made.eval()(x), plain.eval()(x))


@pytest.mark.parametrize("function", ["relu", "relu_", "F.relu(inplace=True)"])
def test_functions_behind_a_sum(function):
    """An activation that is a function cannot hold a solver: the layer is left alone, the others are not touched."""

    def body(net, x):
        y = net.branch("a", x) + x
        y = {"relu": torch.relu, "relu_": torch.relu_}.get(function, lambda z: nn.functional.relu(z, inplace=True))(y)
        return net.activate("b", net.branch("b", y) + y)

    plain, x = Net(body, "conv").double(), inputs("conv")
    found = patterns(plain, x)
    assert found["b"] == "linear-norm-skip-act"
    made = converted(plain, x)

    def expected(x):
        if found.get("a") == "linear-norm-skip-act":
            x = block(plain, made, "a", x, lambda y: y + x)
        else:
            assert "a" not in found
            x = torch.relu(plain.branch("a", x) + x)
        return block(plain, made, "b", x, lambda y: y + x)

    assert_same(results(made, made, x), results(expected, plain, x))


@pytest.mark.parametrize("other", ["linear-norm-act", "linear-act", "linear"])
def test_a_layer_in_different_surroundings(other):
    """Recorded twice in different places: only what both have in common is a solver."""

    def body(net, x):
        x = net.act(net.branch("a", x) + x)
        if other == "linear-norm-act":
            x = net.act(net.norm_b(net.a(x)))
        elif other == "linear-act":
            x = net.act(net.a(x))
        else:
            x = net.a(x).sin()
        return net.b(x).mean((2, 3))

    plain, x = Net(body, "conv").double().eval(), inputs("conv")
    assert patterns(plain, x)["a"] == "linear"
    made = converted(plain, x, targets=["a"])

    def layer(u):
        return solved(made.a, plain.a, u, plain.a(u), act=lambda v: v)

    first = torch.relu(plain.norm_a(layer(x)) + x)
    second = {
        "linear-norm-act": lambda: torch.relu(plain.norm_b(layer(first))),
        "linear-act": lambda: torch.relu(layer(first)),
        "linear": lambda: layer(first).sin(),
    }[other]()
    assert_same(made(x), plain.b(second).mean((2, 3)))
