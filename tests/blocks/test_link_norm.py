"""Solvers that end in a norm: the norm's input has to come from their layer, and its diagonal is the norm's own."""

import copy

import pytest
import timm
import torch
import torchvision
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

from solver_plugins import convert_model
from solver_plugins.errors import SolverPluginsError
from tests.blocks.linked import (
    ITERS,
    Net,
    assert_same,
    assert_same_or_refused,
    converted,
    diagonal,
    inputs,
    lively,
    normed,
    patterns,
    results,
    solved,
)

TRAINING = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


def twins(body, training=True, norm=None):
    """Returns a plain net, its converted copy with solvers that end in norms, and a batch."""
    plain, x = Net(body, "conv"), inputs("conv")
    if norm is not None:
        plain.norm_a, plain.norm_b = norm(), norm()
    plain = plain.double().train(training)
    assert patterns(plain, x) == dict.fromkeys("ab", "linear-norm-act")
    return plain, converted(plain, x).train(training), x


def solve(plain, made, name, u, y=None):
    """Returns what the activation behind a norm is given; ``y`` is the norm's input, by default the layer's output."""
    layer, norm = getattr(plain, name), getattr(plain, f"norm_{name}")
    y = layer(u) if y is None else y
    return solved(getattr(made, name), layer, u, normed(norm, y), diagonal(norm, y))


def two_layers(net, x):
    for name in "ab":
        x = net.act(net.branch(name, x))
    return x


def reference(plain, made):
    return lambda x: torch.relu(solve(plain, made, "b", torch.relu(solve(plain, made, "a", x))))


@TRAINING
def test_a_step(training):
    plain, made, x = twins(two_layers, training)
    assert_same(results(made, made, x), results(reference(plain, made), plain, x))


@TRAINING
def test_a_norm_that_holds_its_activation(training):
    def body(net, x):
        return net.branch("b", net.branch("a", x))

    plain, made, x = twins(body, training, lambda: lively(timm.layers.BatchNormAct2d(3)))
    assert_same(results(made, made, x), results(reference(plain, made), plain, x))


@TRAINING
def test_a_layer_called_twice_before_its_norms(training):
    """A later pass calls the layer twice, then the norm on both: each solve has its own diagonal."""

    def body(net, x):
        if net.flag:
            first, second = net.a(x), net.a(3 * x)
            x = net.act(net.norm_a(first)) - net.act(net.norm_a(second))
        else:
            x = net.act(net.norm_a(net.a(x)))
        return net.act(net.branch("b", x))

    plain, made, x = twins(body, training)
    made.flag = True

    def expected(x):
        x = torch.relu(solve(plain, made, "a", x)) - torch.relu(solve(plain, made, "a", 3 * x))
        return torch.relu(solve(plain, made, "b", x))

    assert_same(results(made, made, x), results(expected, plain, x))


def test_a_sum_before_the_norm():
    """The model's own code adds to what the layer returned: a named error says that this is the cause."""

    def body(net, x):
        y = net.a(x) + x if net.flag else net.a(x)
        return net.act(net.branch("b", net.act(net.norm_a(y))))

    _, made, x = twins(body)
    made.flag = True
    with pytest.raises(SolverPluginsError, match=r"Code between the two, a sum as well.*exclude=\['a'\]"):
        made(x)


@TRAINING
@pytest.mark.parametrize("computed", [True, False], ids=["computed", "not computed"])
def test_a_norm_without_its_layer(training, computed):
    """A later pass hands something else to the norm: that is the plain norm, or refused, not another layer's solve."""

    def body(net, x):
        y = net.a(x) if computed or not net.flag else None
        x = net.act(net.norm_a(2 * x if net.flag else y))
        return net.act(net.branch("b", x))

    plain, made, x = twins(body, training)
    made.flag = True

    def expected(x):
        return torch.relu(solve(plain, made, "b", torch.relu(plain.norm_a(2 * x))))

    assert_same_or_refused(lambda: results(made, made, x), results(expected, plain, x))


@TRAINING
def test_what_is_added_before_the_norm(training):
    """An adapter that hooks into the layer: the norm's statistics are those of the sum."""

    def body(net, x):
        for name in "ab":
            x = net.act(getattr(net, f"norm_{name}")(getattr(net, name)(x)))
        return x

    plain, made, x = twins(body, training)
    for name in "ab":
        getattr(made, name).register_forward_hook(lambda layer, args, output: output + 0.3 * args[0])

    def expected(x):
        for name in "ab":
            x = torch.relu(solve(plain, made, name, x, getattr(plain, name)(x) + 0.3 * x))
        return x

    assert_same(results(made, made, x), results(expected, plain, x))


@TRAINING
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("segment", ["layer", "norm", "norm and activation", "activation", "layer and norm", "whole"])
def test_segments_that_are_recomputed(segment, reentrant, training):
    def body(net, x):
        def again(function, u):
            return checkpoint(function, u, use_reentrant=reentrant) if net.flag else function(u)

        for name in "ab":
            layer, norm = getattr(net, name), getattr(net, f"norm_{name}")
            x = {
                "layer": lambda u, layer=layer, norm=norm: net.act(norm(again(layer, u))),
                "norm": lambda u, layer=layer, norm=norm: net.act(again(norm, layer(u))),
                "norm and activation": lambda u, layer=layer, norm=norm: again(lambda y: net.act(norm(y)), layer(u)),
                "activation": lambda u, layer=layer, norm=norm: again(net.act, norm(layer(u))),
                "layer and norm": lambda u, layer=layer, norm=norm: net.act(again(lambda v: norm(layer(v)), u)),
                "whole": lambda u, layer=layer, norm=norm: again(lambda v: net.act(norm(layer(v))), u),
            }[segment](x)
        return x

    plain, made, x = twins(body, training)

    def step(run, module):
        return {name: value for name, value in results(run, module, x).items() if "running" not in name}

    expected = step(reference(plain, made), plain)
    for flag in (True, False, True):
        made.flag = flag
        if flag and segment in ("norm", "norm and activation"):
            assert_same_or_refused(lambda: step(made, made), expected, checkpointed=True)
        else:
            assert_same(step(made, made), expected)


class FrozenBatchNorm2d(nn.Module):
    """As transformers write it: no ``eps`` to be read. This one is not the usual 1e-5."""

    def __init__(self, features):
        super().__init__()
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            self.register_buffer(name, torch.full((features,), value))

    def forward(self, x):
        scale = self.weight * (self.running_var + 0.2).rsqrt()
        return (x - self.running_mean.reshape(-1, 1, 1)) * scale.reshape(-1, 1, 1) + self.bias.reshape(-1, 1, 1)


@TRAINING
@pytest.mark.parametrize("norm", [FrozenBatchNorm2d, torchvision.ops.FrozenBatchNorm2d])
def test_a_frozen_norm(norm, training):
    plain, made, x = twins(two_layers, training, lambda: lively(norm(3)))
    assert_same(results(made, made, x), results(reference(plain, made), plain, x))


def test_the_backbone_of_detr():
    """Its norms have no ``eps``."""
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 12], depths=[1, 2], layer_type="basic", out_features=["stage2"]
    )
    small = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_queries": 5, "num_labels": 3}
    plain = transformers.DetrForObjectDetection(transformers.DetrConfig(backbone_config=backbone, **small, **heads))
    plain = plain.double().eval()
    for module in plain.modules():
        if "FrozenBatchNorm" in type(module).__name__:
            lively(module)
    x = {"pixel_values": torch.randn(1, 3, 64, 64, dtype=torch.float64)}
    (name,) = [name for name, module in plain.named_modules() if name.endswith("stages.1.layers.1")]
    made = convert_model(copy.deepcopy(plain), "proxgd", ITERS, targets=rf"{name}\..*", pattern="all", example_inputs=x)
    block, solvers = plain.get_submodule(name), made.get_submodule(name)

    def forward(u):
        skip = u
        for index in (0, 1):
            layer, norm = block.layer[index].convolution, block.layer[index].normalization
            c = norm(layer(u)) + (skip if index else 0)
            u = torch.relu(solved(solvers.layer[index].convolution, layer, u, c, diagonal(norm, c)))
        return u

    found = made(**x)
    block.forward = forward
    expected = plain(**x)
    assert_same(found.logits, expected.logits)
    assert_same(found.pred_boxes, expected.pred_boxes)
