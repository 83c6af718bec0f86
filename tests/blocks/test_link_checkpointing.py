"""Gradient checkpointing of any part of a residual block: right gradients, or a named error, never others."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.blocks.linked import assert_same, assert_same_or_refused, block, results, twins

KIND = pytest.mark.parametrize("kind", ["linear", "conv"])
SHARED = pytest.mark.parametrize("shared", [True, False], ids=["shared", "private"])
TRAINING = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
REENTRANT = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])


def sum_alone(net, again, name, x):
    return again(lambda y, x: net.activate(name, y + x), net.branch(name, x), x)


def sum_in_place_alone(net, again, name, x):
    return again(lambda y, x: net.activate(name, y.clone().add_(x)), net.branch(name, x), x)


def activation_alone(net, again, name, x):
    return again(lambda y: net.activate(name, y), net.branch(name, x) + x)


def norm_and_sum(net, again, name, x):
    norm = getattr(net, f"norm_{name}")
    return again(lambda y, x: net.activate(name, norm(y) + x), getattr(net, name)(x), x)


def norm_alone(net, again, name, x):
    return net.activate(name, again(getattr(net, f"norm_{name}"), getattr(net, name)(x)) + x)


def layer_alone(net, again, name, x):
    return net.activate(name, getattr(net, f"norm_{name}")(again(getattr(net, name), x)) + x)


def branch_alone(net, again, name, x):
    return net.activate(name, again(lambda x: net.branch(name, x), x) + x)


def branch_and_sum(net, again, name, x):
    return net.activate(name, again(lambda x: net.branch(name, x) + x, x))


def halves(net, again, name, x):
    y = again(lambda x: net.branch(name, x), x)
    return again(lambda y, x: net.activate(name, y + x), y, x)


def whole(net, again, name, x):
    return again(lambda x: net.activate(name, net.branch(name, x) + x), x)


def nested(net, again, name, x):
    return again(lambda x: net.activate(name, again(lambda x: net.branch(name, x), x) + x), x)


WITHOUT_ITS_LAYER = [sum_alone, sum_in_place_alone, activation_alone, norm_and_sum, norm_alone, halves]


def prepared(segment, kind, shared, reentrant):
    """Returns a converted net that is checkpointed while its flag is set, its reference, and a batch."""

    def body(net, x):
        def again(function, *args):
            return checkpoint(function, *args, use_reentrant=reentrant) if net.flag else function(*args)

        for name in "ab":
            x = segment(net, again, name, x)
        return x

    plain, made, x = twins(body, kind, shared=shared)

    def reference(x):
        for name in "ab":
            x = block(plain, made, name, x, lambda y, u=x: y + u)
        return x

    return plain, made, reference, x


def stepping(plain, made, reference, x):
    """Returns how to take one step with or without checkpointing, and what it must give."""

    def run(checkpointed):
        made.flag = checkpointed
        return without_statistics(results(made, made, x))

    return run, without_statistics(results(reference, plain, x))


def without_statistics(found):
    """A norm that is recomputed updates its statistics twice, with or without a solver."""
    return {name: value for name, value in found.items() if "running" not in name}


@KIND
@SHARED
@REENTRANT
@TRAINING
@pytest.mark.parametrize("segment", [whole, layer_alone])
def test_segments_that_hold_both_ends(segment, kind, shared, reentrant, training):
    plain, made, *rest = prepared(segment, kind, shared, reentrant)
    plain.train(training), made.train(training)
    run, expected = stepping(plain, made, *rest)
    for checkpointed in (True, False, True):
        assert_same(run(checkpointed), expected)


@KIND
@SHARED
@REENTRANT
@TRAINING
@pytest.mark.parametrize("segment", [branch_alone, branch_and_sum, nested])
def test_segments_that_hold_the_norm(segment, kind, shared, reentrant, training):
    """What the norm was given has no graph in a reentrant segment, and the solver's diagonal depends on it."""
    plain, made, *rest = prepared(segment, kind, shared, reentrant)
    plain.train(training), made.train(training)
    run, expected = stepping(plain, made, *rest)
    for checkpointed in (True, False, True):
        if checkpointed and reentrant and training and kind == "conv":
            assert_same_or_refused(lambda: run(True), expected, checkpointed=True)
        else:
            assert_same(run(checkpointed), expected)


@KIND
@SHARED
@REENTRANT
@TRAINING
@pytest.mark.parametrize("segment", WITHOUT_ITS_LAYER)
def test_segments_without_the_layer(segment, kind, shared, reentrant, training):
    """The activation is recomputed, its layer is not. Passes before and after are not touched by it."""
    plain, made, *rest = prepared(segment, kind, shared, reentrant)
    plain.train(training), made.train(training)
    run, expected = stepping(plain, made, *rest)
    for checkpointed in (False, True, False, True):
        if checkpointed:
            assert_same_or_refused(lambda: run(True), expected, checkpointed=True)
        else:
            assert_same(run(False), expected)


@KIND
@SHARED
@REENTRANT
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("segment", WITHOUT_ITS_LAYER)
def test_evaluation_of_a_checkpointed_model(segment, kind, shared, reentrant):
    """Where nothing is recomputed, every segment is right."""
    plain, made, reference, x = prepared(segment, kind, shared, reentrant)
    plain.eval(), made.eval()
    made.flag = True
    with torch.no_grad():
        if segment is norm_alone and kind == "linear" and reentrant:
            # A reentrant segment that returns what it was given (there is no norm) makes a new tensor of it, unseen.
            assert_same_or_refused(lambda: made(x), reference(x), checkpointed=True)
        else:
            assert_same(made(x), reference(x))


@KIND
@SHARED
@REENTRANT
@TRAINING
def test_a_layer_that_is_called_twice_in_a_segment_before_its_activation(kind, shared, reentrant, training):
    """Both passes of the segment tell the two calls apart."""

    def both(net, x):
        first, second = net.branch("a", x), net.branch("a", 2 * x)
        return net.activate("a", first + x) + net.activate("a", second + 3 * x)

    def body(net, x):
        if net.flag:
            return checkpoint(both, net, x, use_reentrant=reentrant)
        return net.activate("b", net.branch("b", net.activate("a", net.branch("a", x) + x)) + x)

    plain, made, x = twins(body, kind, shared=shared)
    plain.train(training), made.train(training)
    made.flag = True

    def reference(x):
        first = block(plain, made, "a", x, lambda y: y + x)
        return first + block(plain, made, "a", 2 * x, lambda y: y + 3 * x)

    run, expected = stepping(plain, made, reference, x)
    for checkpointed in (True, True):
        assert_same(run(checkpointed), expected)
