"""Outlets that are shared or replaced, and shared dropouts: solvers run where they should, and only there."""

import copy
import pickle

import pytest
import torch
import torchvision
from timm.layers import BatchNormAct2d, FrozenBatchNormAct2d, convert_sync_batchnorm
from torch import nn
from torch.utils.checkpoint import checkpoint

from solver_plugins import apply_conversion, conversion_of, convert_model, refresh_steps, revert_model
from solver_plugins.blocks import Outlet, PassThrough, RoutedDropout, SolverBlock
from solver_plugins.errors import SolverPluginsError, UnsupportedLayerError
from solver_plugins.surgery import TargetError
from tests.surgery.models import roberta
from tests.surgery.test_convert import X, convert, make, reference_iterations


def shared_relu():
    torch.manual_seed(0)
    return torchvision.models.resnet.BasicBlock(3, 3).eval()


def test_a_shared_activation_after_a_skip_is_an_outlet_for_that_call_alone():
    """torchvision's ResNets call one ReLU after the first norm and after the sum."""
    plain = shared_relu().double()
    x = torch.randn(2, 3, 6, 5, dtype=torch.float64)
    model = convert_model(copy.deepcopy(plain), "proxgd", iters=3, pattern="all", example_inputs=x)
    assert model.conv2.link in model.relu.links and isinstance(model.relu, Outlet)
    v = plain.bn1(plain.conv1(x))
    v = reference_iterations(lambda t: plain.bn1(plain.conv1(t)), torch.relu, x, v, model.conv1.L, 3)
    u = torch.relu(v)
    c = plain.bn2(plain.conv2(u)) + x
    v = reference_iterations(lambda t: plain.bn2(plain.conv2(t)), torch.relu, u, c, model.conv2.L, 3)
    torch.testing.assert_close(model(x), torch.relu(v), rtol=1e-9, atol=1e-10)
    again = apply_conversion(copy.deepcopy(plain), conversion_of(model))
    assert torch.equal(again(x), model(x))
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))
    assert torch.equal(revert_model(model)(x), plain(x))


class OneActivation(nn.Module):
    """A single ReLU for the sums of two layers."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.act = nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU()

    def forward(self, x):
        x = self.act(self.one(x) + x)
        return self.act(self.two(x) + x)


def test_one_activation_for_two_sums():
    plain, x = OneActivation().double(), torch.randn(5, 4, dtype=torch.float64)
    model = convert_model(copy.deepcopy(plain), "proxgd", iters=4, pattern="all", example_inputs=x)
    u = x
    for name in ("one", "two"):
        layer = getattr(plain, name)
        u = torch.relu(reference_iterations(layer, torch.relu, u, layer(u) + u, getattr(model, name).L, 4))
    torch.testing.assert_close(model(x), u, rtol=1e-9, atol=1e-10)


class Interleaved(OneActivation):
    """Both layers run before the first sum is activated."""

    def forward(self, x):
        one, two = self.one(x), self.two(x)
        return self.act(one + x) + self.act(two + x)


def test_a_shared_activation_that_cannot_tell_its_calls_apart_is_reported():
    model = Interleaved()
    with pytest.raises(TargetError, match="also called between the layer and the sum"):
        convert_model(model, "proxgd", targets=["two"], pattern="all", example_inputs=torch.randn(5, 4))
    assert type(model.act) is nn.ReLU


@pytest.mark.parametrize("training", [True, False])
def test_norms_become_synchronised_after_the_conversion(training):
    """In one process a SyncBatchNorm computes what a BatchNorm does, so nothing may change."""
    plain = make()
    model = convert(copy.deepcopy(plain), "proxgd", iters=3, pattern="all").train(training)
    for drop in (model.drop1, model.drop2):
        drop.p = 0.0
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model))
    assert type(synced.bn1) is nn.SyncBatchNorm
    torch.testing.assert_close(synced(X), model(X))
    assert isinstance(synced.bn1, Outlet) and isinstance(synced.bn1, nn.SyncBatchNorm)
    assert list(synced.state_dict()) == list(plain.state_dict())
    assert conversion_of(synced) == conversion_of(model)
    revert_model(synced)
    assert type(synced.bn1) is nn.SyncBatchNorm


def test_a_replaced_norm_is_found_by_a_refresh_too():
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(convert(make(), "proxgd", iters=3, pattern="all"))
    refresh_steps(synced)
    assert isinstance(synced.bn1, Outlet)
    assert torch.isfinite(torch.compile(synced, backend="eager")(X)).all()


def test_norms_that_hold_an_activation_are_synchronised():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), BatchNormAct2d(4)).eval()
    model = convert(model, "proxgd", iters=3, pattern="all")
    expected = model(X)
    synced = convert_sync_batchnorm(model)
    torch.testing.assert_close(synced(X), expected)
    assert isinstance(synced[1], Outlet)


def test_synchronised_norms_can_be_converted():
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(make()).eval()
    torch.testing.assert_close(
        convert(synced, "proxgd", iters=3, pattern="all")(X),
        convert(make().eval(), "proxgd", iters=3, pattern="all")(X),
    )


def test_a_frozen_norm_is_folded():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), FrozenBatchNormAct2d(4)).double()
    for name in ("weight", "running_var"):
        getattr(plain[1], name).uniform_(0.5, 2)
    x = X.double()
    model = convert(copy.deepcopy(plain), "proxgd", iters=3, pattern="all", example_inputs=x).train()

    def chain(t):
        scale = plain[1].weight / (plain[1].running_var + plain[1].eps).sqrt()
        shift = plain[1].bias - plain[1].running_mean * scale
        return plain[0](t) * scale.reshape(-1, 1, 1) + shift.reshape(-1, 1, 1)

    v = reference_iterations(chain, torch.relu, x, chain(x), model[0].L, 3)
    torch.testing.assert_close(model(x), torch.relu(v), rtol=1e-9, atol=1e-10)
    assert torch.equal(revert_model(model)(x), plain(x))


def sampled_head(**keywords):
    torch.manual_seed(0)
    return convert_model(roberta(hidden_dropout_prob=0.5), "proxsg", iters=1, **keywords).classifier.train()


def seen_by(head, features):
    """Returns what each layer of a head computes with: behind its own undoing of a dropout."""
    inputs = {}
    for name in ("dense", "out_proj"):
        layer = getattr(head, name)
        if isinstance(layer, SolverBlock):
            layer._run = lambda u, name=name, run=layer._run: inputs.update({name: u}) or run(u)
        else:
            layer.register_forward_pre_hook(lambda module, args, name=name: inputs.update({name: args[0]}))
    head(features)
    for name in ("dense", "out_proj"):
        vars(getattr(head, name)).pop("_run", None)
    return inputs


def test_a_dropout_that_two_layers_share():
    """RoBERTa's head calls one dropout twice: passed over if both layers are converted, routed per call otherwise."""
    features = torch.randn(64, 3, 16)
    both = sampled_head(targets=["classifier.dense", "classifier.out_proj"])
    assert isinstance(both.dropout, PassThrough)
    for target in ("dense", "out_proj"):
        head = sampled_head(targets=[f"classifier.{target}"])
        assert isinstance(head.dropout, RoutedDropout) and isinstance(getattr(head, target), SolverBlock)
        inputs = seen_by(head, features)
        other = "out_proj" if target == "dense" else "dense"
        assert (inputs[target] != 0).all(), "the solver draws for itself, from what the dropout was given"
        assert 0.3 < (inputs[other] == 0).float().mean() < 0.7, "the other layer's dropout is live"
        assert torch.equal(head.eval()(features), copy.deepcopy(head)(features))


def test_routes_survive_recomputation_compilation_and_the_way_back():
    features = torch.randn(4, 3, 16)
    model = convert_model(roberta(), "proxsg", iters=3, targets=["classifier.dense"])
    head = model.classifier.train()
    torch.manual_seed(1)
    expected = torch.autograd.grad(head(features).sum(), head.dense.weight)[0]
    torch.manual_seed(1)
    found = torch.autograd.grad(checkpoint(head, features, use_reentrant=False).sum(), head.dense.weight)[0]
    assert torch.equal(found, expected)
    assert torch.isfinite(torch.compile(head, backend="eager", fullgraph=True)(features)).all()
    written = conversion_of(model)
    assert written.routed == ("classifier.dropout",)
    again = apply_conversion(roberta(), written)
    assert isinstance(again.classifier.dropout, RoutedDropout) and again.classifier.dense.routed
    revert_model(model)
    assert type(model.classifier.dropout) is nn.Dropout


def test_a_routed_block_that_meets_another_tensor_says_so():
    head = convert_model(roberta(), "proxsg", iters=2, targets=["classifier.dense"]).classifier.train()
    with pytest.raises(SolverPluginsError, match="the very output of this block's dropout"):
        head.dense(torch.randn(2, 16))


class BehindTheLayer(nn.Module):
    """One dropout behind two layers."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.drop = nn.Linear(4, 40), nn.Linear(40, 40), nn.Dropout(0.5)

    def forward(self, x):
        x = torch.relu(self.drop(self.one(x)))
        return self.drop(self.two(x)).relu()


def test_a_shared_dropout_behind_coordinates_is_routed():
    torch.manual_seed(0)
    model = convert_model(BehindTheLayer(), "rcd", iters=1, targets=["one"], example_inputs=torch.randn(2, 4)).train()
    assert isinstance(model.drop, RoutedDropout)
    hidden = {}
    model.two.register_forward_pre_hook(lambda module, args: hidden.update(x=args[0]))
    x = torch.randn(64, 4)
    model(x)
    drawn = hidden["x"] != 0
    torch.testing.assert_close(
        hidden["x"][drawn], torch.relu(nn.functional.linear(x, model.one.weight, model.one.bias))[drawn]
    )


def test_a_norm_that_is_no_norm_any_more_is_told():
    for name in ("bn1", "bn2"):  # the one is an outlet, the other stands before a sum
        model = convert(make().eval(), "proxgd", iters=3, pattern="all")
        setattr(model, name, nn.Identity())
        with pytest.raises(UnsupportedLayerError, match=f"BatchNorm that was folded .* at '{name}'; found Identity"):
            model(X)
        assert type(getattr(model, name)) is nn.Identity
        revert_model(model)
        assert torch.isfinite(model(X)).all()


def test_another_activation_in_an_outlet_is_told():
    model = convert(make().eval(), "proxgd", iters=3, pattern="all")
    expected = model(X)
    model.act2 = nn.ReLU(inplace=True)
    assert torch.equal(model(X), expected)
    for other in (nn.Tanh(), nn.GELU()):
        model.act2 = other
        with pytest.raises(UnsupportedLayerError, match=f"at 'act2'; found {type(other).__name__}"):
            model(X)
    revert_model(model)
