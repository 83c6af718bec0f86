"""Checkpointed segments inside of others, that choose what they save, that offload, and hooks that wrap tensors."""

import copy

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from tests.blocks.linked import assert_same, assert_same_or_refused, results, twins

KIND = pytest.mark.parametrize("kind", ["linear", "conv"])
SHARED = pytest.mark.parametrize("shared", [True, False], ids=["shared", "private"])
REENTRANT = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])


def residual(net, x):
    for name in "ab":
        x = half(net, name, x)
    return x


def half(net, name, x):
    return net.activate(name, net.branch(name, x) + x)


def one_in_another(net, x, reentrant):
    def outer(x):
        return half(net, "b", checkpoint(lambda x: half(net, "a", x), x, use_reentrant=reentrant))

    return checkpoint(outer, x, use_reentrant=True)


def inner_without_its_layer(net, x, reentrant):
    def outer(x):
        y = net.branch("a", x)
        return checkpoint(lambda y, x: net.activate("a", y + x), y, x, use_reentrant=reentrant)

    return half(net, "b", checkpoint(outer, x, use_reentrant=reentrant))


def offloaded(net, x, reentrant):
    def segment(x):
        with torch.autograd.graph.save_on_cpu():
            return residual(net, x)

    return checkpoint(segment, x, use_reentrant=reentrant)


def offloaded_without_its_layer(net, x, reentrant):
    def segment(y, x):
        with torch.autograd.graph.save_on_cpu():
            return net.activate("a", y + x)

    return half(net, "b", checkpoint(segment, net.branch("a", x), x, use_reentrant=reentrant))


@KIND
@SHARED
@REENTRANT
@pytest.mark.parametrize("body", [one_in_another, inner_without_its_layer, offloaded, offloaded_without_its_layer])
def test_segments(body, kind, shared, reentrant):
    _, made, x = twins(residual, kind, shared=shared)
    expected = compared(copy.deepcopy(made), x)
    made.body = lambda net, x: body(net, x, reentrant)
    assert_same_or_refused(lambda: compared(made, x), expected, checkpointed=True)
    made.body = residual
    assert_same(compared(made, x), expected)


def compared(made, x):
    """Returns output and gradients: a norm that is recomputed updates its statistics twice."""
    return {name: value for name, value in results(made, made, x).items() if "running" not in name}


@KIND
@SHARED
def test_segments_that_choose_what_they_save(kind, shared):
    def chosen(context, operation, *args, **kwargs):
        products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.convolution.default)
        return CheckpointPolicy.MUST_SAVE if operation in products else CheckpointPolicy.PREFER_RECOMPUTE

    _, made, x = twins(residual, kind, shared=shared)
    expected = compared(copy.deepcopy(made), x)
    for more in ({"context_fn": lambda: create_selective_checkpoint_contexts(chosen)}, {"determinism_check": "none"}):
        made.body = lambda net, x, more=more: checkpoint(lambda x: residual(net, x), x, use_reentrant=False, **more)
        with set_checkpoint_early_stop(False):
            assert_same(compared(made, x), expected)


@KIND
@SHARED
@pytest.mark.parametrize("names", [["a"], ["a", "b"], ["norm_a", "norm_b"]], ids="+".join)
def test_hooks_that_wrap_what_a_module_returns(kind, shared, names):
    """torch passes the tensors of a module with a full backward hook through a function of its own."""
    _, made, x = twins(residual, kind, shared=shared)
    expected, met = compared(copy.deepcopy(made), x), []
    for name in names:
        made.get_submodule(name).register_full_backward_hook(lambda module, *gradients: met.append(module))
    assert_same_or_refused(lambda: compared(made, x), expected)
