"""A solver behind a sum runs on what its own layer computed in this pass: the link follows the data, not the calls."""

import pytest
import torch

from solver_plugins.errors import SolverPluginsError
from tests.blocks.linked import (
    SKIP,
    Net,
    assert_helpful,
    assert_same,
    assert_same_or_refused,
    block,
    converted,
    inputs,
    patterns,
    results,
    twins,
)

KIND = pytest.mark.parametrize("kind", ["linear", "conv"])
SHARED = pytest.mark.parametrize("shared", [True, False], ids=["shared", "private"])
TRAINING = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


def in_place(one, other):
    one += other
    return one


SUMS = {
    "y + x": lambda y, x: y + x,
    "x + y": lambda y, x: x + y,
    "y += x": in_place,
    "x += y": lambda y, x: in_place(x.clone(), y),
    "y.add(x)": lambda y, x: y.add(x),
    "y.add_(x)": lambda y, x: y.add_(x),
    "x.add_(y)": lambda y, x: x.clone().add_(y),
    "add(y, x)": lambda y, x: torch.add(y, x),
    "add(x, y)": lambda y, x: torch.add(x, y),
    "add(x, other=y)": lambda y, x: torch.add(x, other=y),
    "add(x, y, alpha=1)": lambda y, x: torch.add(x, y, alpha=1),
    "y.clone() + x": lambda y, x: y.clone() + x,
    "(y + x).contiguous()": lambda y, x: (y + x).contiguous(),
    "(y + x).to(dtype)": lambda y, x: (y + x).to(torch.float64),
}


@KIND
@SHARED
@TRAINING
@pytest.mark.parametrize("inplace", [False, True], ids=["relu", "relu_"])
@pytest.mark.parametrize("form", SUMS)
def test_every_way_to_write_a_sum(form, kind, shared, training, inplace):
    def body(net, x):
        for name in "ab":
            x = net.activate(name, SUMS[form](net.branch(name, x), x))
        return x

    plain, made, x = twins(body, kind, shared=shared, inplace=inplace)
    plain.train(training), made.train(training)

    def expected(x):
        for name in "ab":
            x = block(plain, made, name, x, lambda y, x=x: y + x)
        return x

    found = results(made, made, x)
    assert_same(found, results(expected, plain, x))
    # And it is not the plain network.
    assert (found["output"] - plain.eval()(x)).norm() > 0.01 * found["output"].norm()


@KIND
@SHARED
def test_a_sum_that_is_written_into_a_buffer(kind, shared):
    """``out=`` has no gradient. Converted with an ordinary sum, then run with this one."""

    def body(net, x):
        for name in "ab":
            y = net.branch(name, x)
            y = torch.add(x, y, out=torch.empty_like(x)) if net.flag else x + y
            x = net.activate(name, y)
        return x

    plain, made, x = twins(body, kind, shared=shared)
    plain.eval(), made.eval()
    made.flag = True
    with torch.no_grad():
        expected = x
        for name in "ab":
            expected = block(plain, made, name, expected, lambda y, u=expected: y + u)
        assert_same_or_refused(lambda: made(x), expected)


@KIND
@SHARED
@TRAINING
def test_more_than_one_sum_on_the_way(kind, shared, training):
    """A later pass adds more than the recorded one: all of it joins the bias."""

    def body(net, x):
        for name in "ab":
            y = net.branch(name, x) + x
            x = net.activate(name, 0.5 * x + y if net.flag else y)
        return x

    plain, made, x = twins(body, kind, shared=shared)
    plain.train(training), made.train(training)
    made.flag = True

    def expected(x):
        for name in "ab":
            x = block(plain, made, name, x, lambda y, x=x: y + x + 0.5 * x)
        return x

    assert_same(results(made, made, x), results(expected, plain, x))


@KIND
@SHARED
def test_no_sum_on_the_way(kind, shared):
    """A later pass leaves the skip out: the solver runs on what comes."""

    def body(net, x):
        for name in "ab":
            y = net.branch(name, x)
            x = net.activate(name, y if net.flag else y + x)
        return x

    plain, made, x = twins(body, kind, shared=shared)
    made.flag = True

    def expected(x):
        for name in "ab":
            x = block(plain, made, name, x, lambda y: y)
        return x

    assert_same(results(made, made, x), results(expected, plain, x))


@KIND
@TRAINING
def test_a_layer_that_is_computed_and_not_used(kind, training):
    """Early exit: what an unused layer computed does not become the argument of another one's activation."""

    def body(net, x):
        y = net.branch("a", x)
        if not net.flag:
            x = net.activate("a", y + x)
        return net.activate("b", net.branch("b", x) + x)

    plain, made, x = twins(body, kind)
    plain.train(training), made.train(training)
    made.flag = True

    def expected(x):
        plain.branch("a", x)  # for the statistics of its norm
        return block(plain, made, "b", x, lambda y: y + x)

    assert_same(results(made, made, x), results(expected, plain, x))


@KIND
@SHARED
def test_a_layer_whose_output_is_returned(kind, shared):
    """Early exit: there is nothing to solve, and the pass that follows knows nothing of it."""

    def body(net, x):
        y = net.branch("a", x)
        if net.flag:
            return y
        x = net.activate("a", y + x)
        return net.activate("b", net.branch("b", x) + x)

    plain, made, x = twins(body, kind, shared=shared)
    plain.eval(), made.eval()
    expected = made(x)
    made.flag = True
    assert_same(made(x), plain.branch("a", x))
    made.flag = False
    assert_same(made(x), expected)
    # Used outside of the model that computed it, too.
    made.flag = True
    y = made(x)
    made.flag = False
    again = y + x
    first = block(plain, made, "a", again, lambda z: z + again)
    assert_same(made(again), block(plain, made, "b", first, lambda z: z + first))


@KIND
@TRAINING
@pytest.mark.parametrize("flip", [False, True])
def test_sums_in_another_order(kind, training, flip):
    """Both layers run, then both sums: which comes first depends on the data."""

    def body(net, x):
        first, second = net.branch("a", x), net.branch("b", x)
        if net.flag:
            first, second = second, first
        x = net.act(first + x)
        return net.act(x + second) if net.late else net.act(x + 2 * second)

    plain, x = Net(body, kind).double(), inputs(kind)
    plain.late = False
    # Only the layer whose sum comes first is converted with its activation: the other one's goes through a product.
    assert patterns(plain, x)["a"] == SKIP[kind]
    made = converted(plain, x, targets=["a"])
    plain.train(training), made.train(training)
    made.flag, made.late = flip, flip

    def expected(x):
        if not flip:
            second = plain.branch("b", x)
            first = block(plain, made, "a", x, lambda y: y + x)
            return torch.relu(first + 2 * second)
        start = torch.relu(plain.branch("b", x) + x)
        return block(plain, made, "a", x, lambda y: start + y)

    assert_same(results(made, made, x), results(expected, plain, x))


@KIND
@SHARED
@TRAINING
@pytest.mark.parametrize("order", ["ba", "aab", "bab", "b", "aabb"])
def test_layers_in_another_order(kind, shared, order, training):
    """Which layers run, how often and in which order is decided by an argument."""

    def body(net, x):
        for name in net.order:
            x = net.activate(name, net.branch(name, x) + x)
        return x

    plain, x = Net(body, kind, shared).double(), inputs(kind)
    plain.order = "ab"
    assert patterns(plain, x) == dict.fromkeys("ab", SKIP[kind])
    made = converted(plain, x)
    plain.train(training), made.train(training)
    made.order = order

    def expected(x):
        for name in order:
            x = block(plain, made, name, x, lambda y, x=x: y + x)
        return x

    assert_same(results(made, made, x), results(expected, plain, x))


@KIND
@SHARED
@TRAINING
def test_a_layer_called_twice_before_its_activations(kind, shared, training):
    """A later pass calls the layer twice, then both sums: each solve has the input of its own call."""

    def body(net, x):
        y = net.branch("a", x)
        if net.flag:
            other = net.branch("a", -x)
            x = net.activate("a", y + x) - net.activate("a", other + x)
        else:
            x = net.activate("a", y + x)
        return net.activate("b", net.branch("b", x) + x)

    plain, made, x = twins(body, kind, shared=shared)
    plain.train(training), made.train(training)
    made.flag = True

    def expected(x):
        x = block(plain, made, "a", x, lambda y: y + x) - block(plain, made, "a", -x, lambda y: y + x)
        return block(plain, made, "b", x, lambda y: y + x)

    assert_same(results(made, made, x), results(expected, plain, x))


@KIND
@SHARED
def test_an_output_with_two_activations(kind, shared):
    """A later pass hands one output to its activation twice: both are solves, or it is refused."""

    def body(net, x):
        y = net.branch("a", x)
        x = net.activate("a", y + x) + (net.activate("a", y - x) if net.flag else 0)
        return net.activate("b", net.branch("b", x) + x)

    plain, made, x = twins(body, kind, shared=shared)
    plain.eval(), made.eval()
    made.flag = True
    start = block(plain, made, "a", x, lambda y: y + x) + block(plain, made, "a", x, lambda y: y - x)
    expected = block(plain, made, "b", start, lambda y: y + start)
    assert_same_or_refused(lambda: made(x), expected)


@KIND
@SHARED
def test_two_solvers_in_one_sum(kind, shared):
    """A later pass adds up two layers that wait for the same activation: it cannot be both. Private ones are apart."""

    def body(net, x):
        if net.flag:
            return net.activate("a", net.branch("a", x) + net.branch("b", x))
        x = net.activate("a", net.branch("a", x) + x)
        return net.activate("b", net.branch("b", x) + x)

    plain, made, x = twins(body, kind, shared=shared)
    plain.eval(), made.eval()
    expected = made(x)
    made.flag = True
    if shared:
        with pytest.raises(SolverPluginsError) as caught:
            made(x)
        assert_helpful(str(caught.value))
    else:
        assert_same(made(x), block(plain, made, "a", x, lambda y: y + plain.branch("b", x)))
    made.flag = False
    assert_same(made(x), expected)


@KIND
def test_a_shared_activation_serves_others(kind):
    """Calls that are not for a layer's sum are the plain activation, also between a layer and its sum."""

    def body(net, x):
        x = net.act(x - 1)
        y = net.branch("a", x)
        x = x + net.act(x.sin()) if net.flag else x
        x = net.act(y + x)
        return net.act(net.act(net.branch("b", x) + x) - 0.2)

    plain, made, x = twins(body, kind)
    for flag in (False, True):
        made.flag = flag

        def expected(x, flag=flag):
            u = torch.relu(x - 1)
            skip = u + torch.relu(u.sin()) if flag else u
            x = block(plain, made, "a", u, lambda y: y + skip)
            return torch.relu(block(plain, made, "b", x, lambda y: y + x) - 0.2)

        assert_same(results(made, made, x), results(expected, plain, x))


@KIND
@SHARED
def test_a_chain_within_a_chain(kind, shared):
    """Between a layer and its sum another module runs that is a chain itself."""

    def body(net, x):
        outer = net.branch("a", x)
        return net.activate("a", outer + net.inner(x))

    def inner(net, x):
        for name in "ab":
            x = net.activate(name, net.branch(name, x) + x)
        return x

    torch.manual_seed(1)
    plain, x = Net(body, kind, shared).double(), inputs(kind)
    plain.inner = Net(inner, kind, shared).double()
    if shared:
        plain.inner.act = plain.act
    found = patterns(plain, x)
    assert found["inner.a"] == found["inner.b"] == SKIP[kind]
    made = converted(plain, x)

    def expected(x):
        def middle(u):
            for name in "ab":
                u = block(plain.inner, made.inner, name, u, lambda y, u=u: y + u)
            return u

        if found.get("a") == SKIP[kind]:
            return block(plain, made, "a", x, lambda y: y + middle(x))
        assert "a" not in found  # the same activation serves both, and today that is left alone
        return torch.relu(plain.branch("a", x) + middle(x))

    for _ in range(2):
        assert_same(results(made, made, x), results(expected, plain, x))
