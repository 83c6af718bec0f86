"""A solver behind a sum in every mode that a model is run in: copied, in threads, compiled, frozen, broken off."""

import copy
import gc
import pickle
import threading
import weakref
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from solver_plugins import SolverBlock, convert_model
from tests.blocks.linked import Net, assert_same, block, converted, inputs, results, twins
from tests.tolerances import tolerance

KIND = pytest.mark.parametrize("kind", ["linear", "conv"])
SHARED = pytest.mark.parametrize("shared", [True, False], ids=["shared", "private"])
TRAINING = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


def in_place(one, other):
    one += other
    return one


def residual(net, x):
    for name in "ab":
        x = net.activate(name, net.branch(name, x) + x)
    return x


def residual_in_place(net, x):
    for name in "ab":
        x = net.activate(name, in_place(net.branch(name, x), x))
    return x


def residual_into_skip(net, x):
    for name in "ab":
        x = net.activate(name, in_place(x.clone(), net.branch(name, x)))
    return x


def residual_by_function(net, x):
    for name in "ab":
        x = net.activate(name, torch.add(x, net.branch(name, x)))
    return x


def early_exit(net, x):
    """The first layer is computed, and not used while the flag is set."""
    y = net.branch("a", x)
    if not net.flag:
        x = net.activate("a", y + x)
    return net.activate("b", net.branch("b", x) + x)


BODIES = pytest.mark.parametrize("body", [residual, residual_in_place, residual_into_skip, residual_by_function])


def reference(plain, made):
    """Returns what every body of this file computes."""

    def run(x):
        for name in "ab":
            x = block(plain, made, name, x, lambda y, u=x: y + u)
        return x

    return run


@KIND
@SHARED
@BODIES
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(body, kind, shared, mode):
    plain, made, x = twins(body, kind, shared=shared, inplace=True)
    for training in (False, True):
        plain.train(training), made.train(training)
        with mode():
            found = made(x.clone())
        assert_same(found, reference(plain, made)(x).detach())


@KIND
@SHARED
@BODIES
def test_frozen_layers(body, kind, shared):
    """Nothing before the head has a gradient, so no graph says what was computed from what."""
    plain, made, x = twins(body, kind, shared=shared)
    head = nn.Linear(x[0].numel(), 2).double()
    plain.requires_grad_(False), made.requires_grad_(False)
    outputs = [head(run(x).flatten(1)) for run in (made, reference(plain, made))]
    assert_same(*outputs)
    assert_same(*(torch.autograd.grad(output.square().sum(), head.weight)[0] for output in outputs))


@KIND
@SHARED
@BODIES
def test_autocast(body, kind, shared):
    plain = Net(body, kind, shared).eval()
    x = inputs(kind).float()
    made = converted(plain, x)
    expected = reference(plain, made)(x)
    with torch.autocast("cpu", torch.bfloat16):
        found = made(x).float()
    bound = 2 * tolerance(torch.bfloat16).rtol * expected.abs().max()
    assert (found - expected).abs().max() < bound
    assert (plain(x) - expected).abs().max() > 2 * bound, "a lost solver would be seen"


@pytest.mark.parametrize(
    ("body", "kind", "shared", "training"),
    [
        (residual_in_place, "conv", True, True),
        (residual_into_skip, "linear", True, False),
        (residual_by_function, "linear", False, True),
    ],
)
def test_compiled_whole(body, kind, shared, training):
    torch.compiler.reset()
    plain, made, x = twins(body, kind, shared=shared)
    plain.train(training), made.train(training)
    compiled = torch.compile(made, backend="eager", fullgraph=True)
    for _ in range(2):
        assert_same(results(compiled, made, x), results(reference(plain, made), plain, x))


def test_compiled_without_the_first_activation():
    """The compiled graph of an early exit."""
    torch.compiler.reset()
    plain, made, x = twins(early_exit, "linear")
    plain.eval(), made.eval()
    compiled = torch.compile(made, backend="eager", fullgraph=True)
    for flag in (False, True, False):
        made.flag = flag
        expected = block(plain, made, "b", x, lambda y: y + x) if flag else reference(plain, made)(x)
        assert_same(compiled(x), expected)


# Where it breaks its graph, the compiler looks at gradients of tensors that have none.
BREAKS = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")


@BREAKS
@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_compiled_part_of_a_model(fullgraph):
    """Without the module that holds both ends nothing carries the mark, and a compiler sees no graph of gradients."""
    torch.compiler.reset()
    _, made, x = twins(residual, "linear")

    def part(x):
        return made.activate("a", made.branch("a", x) + x)

    with pytest.raises(Exception, match="The solver of 'a' runs behind a skip connection"):
        torch.compile(part, backend="eager", fullgraph=fullgraph)(x)


@BREAKS
def test_a_compiled_model_whose_parts_are_checkpointed():
    """The compiler leaves what it cannot follow to eager code, and the solvers run all the same."""
    torch.compiler.reset()

    def recomputed(net, x):
        for name in "ab":
            x = checkpoint(lambda x, name=name: net.activate(name, net.branch(name, x) + x), x, use_reentrant=False)
        return x

    plain, made, x = twins(residual, "linear")
    expected = results(reference(plain, made), plain, x)
    made.body = recomputed
    assert_same(results(torch.compile(made, backend="eager"), made, x), expected)


def test_a_compiled_model_misses_its_layers():
    """As in eager code: a layer behind a sum that is gone is an error, another head is not."""

    def with_head(net, x):
        return net.head(residual(net, x))

    torch.compiler.reset()
    plain = Net(with_head, "linear")
    plain.head = nn.Linear(4, 3)
    plain, x = plain.double().eval(), inputs("linear")
    made = converted(plain, x)
    assert isinstance(made.head, SolverBlock)
    compiled = torch.compile(made, backend="eager", fullgraph=True)
    assert_same(compiled(x), made(x))
    made.head = nn.Linear(4, 3).double()
    assert_same(compiled(x), made(x))
    made.a = nn.Linear(4, 4).double()
    # A whole graph is refused by the compiler, in its own error, with our text.
    with pytest.raises(Exception, match="'a' is no longer a part of this Net"):
        compiled(x)


@pytest.mark.slow
@KIND
@SHARED
@TRAINING
@BODIES
def test_compiled_whole_with_its_backward(body, kind, shared, training):
    torch.compiler.reset()
    plain, made, x = twins(body, kind, shared=shared)
    plain.train(training), made.train(training)
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        assert_same(results(compiled, made, x), results(reference(plain, made), plain, x))


def again(model):
    return pickle.loads(pickle.dumps(model))


@KIND
@SHARED
@TRAINING
@pytest.mark.parametrize("way", [copy.deepcopy, again])
def test_copies(way, kind, shared, training):
    """A copy has links of its own, whichever of the two runs first, and after either was changed."""
    plain, made, x = twins(residual, kind, shared=shared)
    plain.train(training), made.train(training)
    made(x)
    other, other_plain = way(made), copy.deepcopy(plain)
    with torch.no_grad():
        for one in (other, other_plain):
            one.a.weight.mul_(1.5)
    other_plain.load_state_dict(other.state_dict()), plain.load_state_dict(made.state_dict())
    for _ in range(2):
        assert_same(results(other, other, x), results(reference(other_plain, other), other_plain, x))
        assert_same(results(made, made, x), results(reference(plain, made), plain, x))


@KIND
@SHARED
@pytest.mark.parametrize("place", ["norm_a", "act", "b"])
def test_a_pass_after_one_that_was_broken_off(kind, shared, place):
    plain, made, x = twins(residual, kind, shared=shared)
    place = "act_a" if place == "act" and not shared else place
    handle = getattr(made, place).register_forward_pre_hook(lambda *rest: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            made.eval()(x + 1)
    handle.remove()
    made.train()
    assert_same(results(made, made, x), results(reference(plain, made), plain, x))


@KIND
@SHARED
@pytest.mark.parametrize("way", ["whole", "early exit", "broken off"])
def test_nothing_of_a_pass_outlives_it(way, kind, shared):
    """What a layer hands on belongs to its data, and is gone when that is."""
    _, made, x = twins(early_exit, kind, shared=shared)
    made.flag = way == "early exit"
    if way == "broken off":
        (made.act if shared else made.act_a).register_forward_pre_hook(lambda *rest: 1 / 0)
    given = weakref.ref(x)
    with suppress(ZeroDivisionError):
        made(x)
    del x
    gc.collect()
    assert given() is None, "the input of a layer is still held"


@KIND
@SHARED
def test_a_pass_within_a_pass(kind, shared):
    """Between a layer and its sum the model runs itself (a teacher, a recursion)."""

    def body(net, x):
        y = net.branch("a", x)
        if net.flag:
            net.flag = False
            other = net(x.sin())
            net.flag = True
            x = x + other
        x = net.activate("a", y + x)
        return net.activate("b", net.branch("b", x) + x)

    plain, made, x = twins(body, kind, shared=shared)
    plain.eval(), made.eval()
    made.flag = True
    inner = reference(plain, made)(x.sin())
    first = block(plain, made, "a", x, lambda y: y + x + inner)
    assert_same(made(x), block(plain, made, "b", first, lambda y: y + first))


@KIND
@SHARED
@BODIES
def test_parts_of_a_model_by_themselves(body, kind, shared):
    """The forward of the module around a chain is passed by: ``forward_features``, a slice of a backbone, a hook."""
    plain, made, x = twins(body, kind, shared=shared)
    assert_same(results(lambda x: made.forward(x), made, x), results(reference(plain, made), plain, x))
    assert_same(results(lambda x: body(made, x), made, x), results(reference(plain, made), plain, x))


@KIND
@SHARED
@TRAINING
def test_functional_call(kind, shared, training):
    """Weights that are handed in: the solver's are these, too."""
    plain, made, x = twins(residual, kind, shared=shared)
    plain.train(training), made.train(training)
    state = {name: 1.3 * value.detach().clone() for name, value in plain.named_parameters()}
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(state[name])
    found = torch.func.functional_call(made, state, (x,))
    assert_same(found, reference(plain, made)(x))


def by_the_data(net, x):
    """Whether the first layer's output is used is decided by the numbers."""
    y = net.branch("a", x)
    if x.mean() > 0:
        return net.activate("b", net.branch("b", x) + x)
    x = net.activate("a", y + x)
    return net.activate("b", net.branch("b", x) + x)


@KIND
@SHARED
@BODIES
def test_threads(body, kind, shared):
    """Several threads run one model at once, each on its own data."""
    plain, made, _ = twins(body, kind, shared=shared)
    plain.eval(), made.eval()
    batches = [inputs(kind) for _ in range(3)]
    made(batches[0])  # constants are at rest
    assert_threads(made, batches, [results(reference(plain, made), plain, x) for x in batches])


@KIND
@SHARED
def test_threads_that_take_different_ways(kind, shared):
    plain, x = Net(by_the_data, kind, shared).double().eval(), inputs(kind)
    batches = [x - x.mean() - 0.5, x - x.mean() + 1]
    made = converted(plain, batches[0]).eval()
    made(batches[0])

    def early(x):
        plain.branch("a", x)
        return block(plain, made, "b", x, lambda y: y + x)

    runs = [reference(plain, made), early]
    assert_threads(made, batches, [results(run, plain, x) for run, x in zip(runs, batches, strict=True)])


def assert_threads(made, batches, expected, count=8):
    """Outputs and gradients of the input in parallel threads are the expected ones."""
    failures, barrier = [], threading.Barrier(len(batches))

    def work(x, wanted):
        try:
            barrier.wait()
            for _ in range(count):
                x = x.detach().requires_grad_()
                output = made(x)
                cotangent = torch.linspace(-1, 2, output.numel(), dtype=output.dtype).reshape(output.shape)
                (gradient,) = torch.autograd.grad(output, x, cotangent)
                assert_same(output.detach(), wanted["output"])
                assert_same(gradient, wanted["input"])
                with torch.no_grad():
                    assert_same(made(x), wanted["output"])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(batches, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


@pytest.mark.parametrize("solver", ["proxsg", "ms2gd", "rcd"])
@pytest.mark.parametrize("flip", [False, True])
@KIND
def test_sampling_solvers_have_the_input_of_their_own_layer(kind, solver, flip):
    """From the same draws: both layers first and then both sums, or one after the other."""

    def body(net, x):
        if not net.flag:
            outputs = [net.act(net.branch(name, x) + x) for name in net.order]
        else:
            first, second = net.branch("a", x), net.branch("b", x)
            sums = {"a": first + x, "b": second + x}
            outputs = [net.act(sums[name]) for name in net.order]
        return outputs[0] - outputs[1]

    plain, x = Net(body, kind).double(), inputs(kind)
    plain.order = "ab"
    made = convert_model(plain, solver, 3, p=0.5, pattern="all", example_inputs=x)
    made.order = "ba" if flip else "ab"
    torch.manual_seed(0)
    expected = results(made, made, x)
    made.flag = True
    torch.manual_seed(0)
    found = results(made, made, x)
    assert_same(*({k: v for k, v in one.items() if "running" not in k} for one in (found, expected)))
