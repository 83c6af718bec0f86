"""ProxProp in front of optimizers: attached, with parameter groups, mixed precision; and everything that is refused."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from solver_plugins import ProxProp
from solver_plugins.equilibrium.head import HeadConfig, OptEqHead
from solver_plugins.errors import OptionError, UnsupportedLayerError
from solver_plugins.proxprop import (
    ClosureError,
    DetachedError,
    EmptyBatchError,
    JitterWarning,
    LayerNotRunError,
    NonFiniteError,
    OptimizerError,
    OverwrittenError,
    WrappedModelError,
)
from solver_plugins.surgery.errors import TargetError
from tests.surgery.small import Model

D = {"dtype": torch.float64}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 6, **D), nn.ReLU(), nn.Linear(6, 5, **D), nn.ReLU(), nn.Linear(5, 2, **D))


def parameters(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def groups_of(model):
    weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    biases = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    return [{"params": weights, "lr": 0.1}, {"params": biases, "lr": 0.3, "weight_decay": 0.0}]


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_attached_is_precondition_before_each_step(make):
    model, x = net(), torch.randn(3, 4, 7, **D)
    other = copy.deepcopy(model)
    first, second = make(groups_of(model), lr=0.1), make(groups_of(other), lr=0.1)
    prox = ProxProp(model, "cg3").attach(first)
    by_hand = ProxProp(other, "cg3")
    for batch in x:
        for one, optimizer in ((model, first), (other, second)):
            optimizer.zero_grad()
            one(batch).square().mean().backward()
            if one is other:
                by_hand.precondition()
            optimizer.step()
    assert all(torch.equal(left, right) for left, right in zip(parameters(model), parameters(other), strict=True))
    prox.detach()
    model(x[0]).sum().backward()
    first.step()
    assert not first._optimizer_step_pre_hooks
    with pytest.raises(DetachedError, match="make a new one"):
        prox.precondition()
    with pytest.raises(DetachedError):
        prox.attach(first)


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler(fused):
    """Gradients with a scaler's factor give the step of gradients without; skipped steps leave nothing behind."""
    plain = net().float()
    scaled = copy.deepcopy(plain)
    x = torch.randn(4, 7)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, fused=fused) for model in (plain, scaled)]
    ProxProp(plain).attach(optimizers[0])
    kept = ProxProp(scaled).attach(optimizers[1])
    before = parameters(scaled)
    # An overflow: this step is skipped, and its inputs must not be part of the next one's.
    (scaler.scale(scaled(3 * x).square().mean()) * math.inf).backward()
    scaler.step(optimizers[1])
    scaler.update()
    assert all(torch.equal(left, right) for left, right in zip(parameters(scaled), before, strict=True))
    optimizers[1].zero_grad()
    plain(x).square().mean().backward()
    optimizers[0].step()
    scaler.scale(scaled(x).square().mean()).backward()
    scaler.step(optimizers[1])
    scaler.update()
    assert kept.last_step["0"].rows == 4
    for left, right in zip(parameters(plain), parameters(scaled), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)
    assert any(not torch.equal(left, right) for left, right in zip(parameters(scaled), before, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batch", [4, 30])
def test_autocast_and_half_weights(dtype, batch):
    """Matrices and solves are float32; the result is the float64 one up to the precision of the activations."""
    model, x = net(), torch.randn(batch, 7, **D)

    def run(model, x, autocast):
        with ProxProp(model) as prox:
            with torch.autocast("cpu", dtype, enabled=autocast):
                model(x).float().square().mean().backward()
            prox.precondition()
        return model[0].weight.grad

    expected = run(copy.deepcopy(model), x, False)
    for found in (run(copy.deepcopy(model).float(), x.float(), True), run(model.to(dtype), x.to(dtype), False)):
        assert (found.double() - expected).norm() < 0.05 * expected.norm()


def test_jitter_is_reported():
    model = nn.Sequential(nn.Linear(40, 3), nn.Linear(3, 1))
    x = 1e6 * torch.randn(1, 40).expand(200, 40)
    with ProxProp(model, tau_theta=1e6) as prox:
        (model(x) / 1e6).sum().backward()
        with pytest.warns(JitterWarning, match=r"0 is not positive definite in torch\.float32"):
            report = prox.precondition()
    assert report["0"].jitter > 0 and model[0].weight.grad.isfinite().all()


def plain_gradients(model):
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]


def refused(model, prox, error, message):
    before = plain_gradients(model)
    with pytest.raises(error, match=message):
        prox.precondition()
    for left, right in zip(before, plain_gradients(model), strict=True):
        assert (left is None and right is None) or torch.equal(left.nan_to_num(7.0), right.nan_to_num(7.0))


@pytest.mark.parametrize("mode", ["exact", "cg2"])
def test_layers_that_did_not_run(mode):
    model = Model(lambda self, x: self.head(torch.relu(self.used(x))), used=nn.Linear(3, 4), unused=nn.Linear(3, 4),
                  head=nn.Linear(4, 1))  # fmt: skip
    with ProxProp(model, mode) as prox:
        refused(model, prox, LayerNotRunError, "used, unused, head did not")
        model(torch.randn(2, 3)).sum().backward()
        refused(model, prox, LayerNotRunError, r"unused did not .*exclude=")
    with ProxProp(model, mode, exclude=["unused"]) as prox:
        model.zero_grad()
        model(torch.randn(2, 3)).sum().backward()
        assert list(prox.precondition()) == ["used"]
        # The step has been taken: there is nothing for a second one.
        refused(model, prox, LayerNotRunError, "once per step")


def test_weights_that_are_read_without_a_call():
    model = Model(lambda self, x: self.head(nn.functional.linear(x, self.used.weight)), used=nn.Linear(3, 4),
                  head=nn.Linear(4, 1))  # fmt: skip
    with ProxProp(model) as prox:
        model(torch.randn(2, 3)).sum().backward()
        refused(model, prox, LayerNotRunError, "used did not")


@pytest.mark.parametrize("mode", ["exact", "cg2"])
@pytest.mark.parametrize("make", ["linear", "conv"])
def test_empty_batches(make, mode):
    if make == "linear":
        model, x = net(), torch.randn(0, 7, **D)
    else:
        model = nn.Sequential(nn.Conv2d(2, 3, 3, **D), nn.Flatten(), nn.Linear(12, 1, **D))
        x = torch.randn(0, 2, 4, 4, **D)
    with ProxProp(model, mode) as prox:
        model(x).sum().backward()
        refused(model, prox, EmptyBatchError, "at least one sample; 0")


@pytest.mark.parametrize("mode", ["exact", "cg2"])
@pytest.mark.parametrize("batch", [3, 30])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_not_finite(bad, batch, mode):
    model, x = net(), torch.randn(batch, 7, **D)
    with ProxProp(model, mode) as prox:
        model(x).square().sum().backward()
        fine = plain_gradients(model)
        prox.clear()
        model.zero_grad()
        x[1, 2] = bad
        model(x).square().sum().backward()
        refused(model, prox, NonFiniteError, "0.* are not.*No gradient was changed")
        # Only one layer's activations are bad: the others' gradients stay, too.
        for parameter, gradient in zip(model.parameters(), fine, strict=True):
            parameter.grad = gradient
        refused(model, prox, NonFiniteError, "finite")


def test_inputs_in_memory_that_is_used_again():
    model, x = net(), torch.randn(2, 7, **D)
    with ProxProp(model) as prox:
        for _ in range(2):
            model(x).square().sum().backward()
            x.normal_()
        refused(model, prox, OverwrittenError, "inputs of 0 were changed in place")


def test_closures():
    model = net()
    prox = ProxProp(model)
    with pytest.raises(ClosureError, match="LBFGS"):
        prox.attach(torch.optim.LBFGS(model.parameters()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prox.attach(optimizer)
    before = parameters(model)
    for call in (lambda: optimizer.step(lambda: 0.0), lambda: optimizer.step(closure=lambda: 0.0)):
        with pytest.raises(ClosureError, match="without a closure"):
            call()
    assert all(torch.equal(left, right) for left, right in zip(parameters(model), before, strict=True))


def test_optimizers_of_something_else():
    model = net()
    prox = ProxProp(model)
    with pytest.raises(OptimizerError, match=r"hold those of 0, 2, 4\. Make it"):
        prox.attach(torch.optim.SGD(net().parameters(), lr=0.1))
    with pytest.raises(OptimizerError, match=r"hold those of 2, 4\."):
        prox.attach(torch.optim.SGD(model[0].parameters(), lr=0.1))
    with pytest.raises(OptimizerError, match=r"Expected a torch\.optim\.Optimizer; found str"):
        prox.attach("sgd")
    # A frozen layer need not be held.
    model[2].requires_grad_(False)
    model[4].requires_grad_(False)
    prox.attach(torch.optim.SGD(model[0].parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "cg0"}, r"'cgN' with N >= 1 .*found 'cg0'"),
        ({"mode": "cg-1"}, "found 'cg-1'"),
        ({"mode": "CG3"}, "found 'CG3'"),
        ({"mode": 3}, "found 3"),
        ({"tau_theta": 0.0}, "positive number; found 0.0"),
        ({"tau_theta": math.nan}, "positive"),
        ({"tau_theta": "1"}, "positive"),
        ({"gram": "average"}, "Unknown gram 'average'"),
        ({"targets": ["fc"]}, r"targets: 'fc' matches no linear layer.*Options: 0, 2, 4"),
        ({"exclude": ["head"]}, "exclude: 'head' matches no"),
        ({"exclude": ["0", "2", "4"]}, "found none"),
    ],
)
def test_options(options, message):
    model = net()
    with pytest.raises((OptionError, TargetError, UnsupportedLayerError), match=message):
        ProxProp(model, **options)
    assert not any(module._forward_hooks for module in model.modules())


def test_models_without_layers_or_with_strange_ones():
    with pytest.raises(UnsupportedLayerError, match="found none"):
        ProxProp(nn.Sequential(nn.ReLU()))
    with pytest.raises(UnsupportedLayerError, match=r"Expected a torch\.nn\.Module; found int"):
        ProxProp(3)
    with pytest.raises(WrappedModelError, match="DistributedDataParallel"):
        ProxProp(nn.DataParallel(net()))
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), nn.Linear(3, 3), nn.Linear(3, 1))
    assert ProxProp(model).layers == ["1", "2"]
    assert "parametrisation" in ProxProp(model).skipped["0"]
    with pytest.raises(UnsupportedLayerError, match="0 cannot be preconditioned"):
        ProxProp(model, targets=["0"])
    assert "complex" in ProxProp(nn.Sequential(nn.Linear(3, 3, dtype=torch.complex64), nn.Linear(3, 1))).skipped["0"]
    left, right = nn.Linear(3, 3), nn.Linear(3, 3)
    right.bias = left.bias
    with pytest.raises(UnsupportedLayerError, match="0 and 1 share a bias"):
        ProxProp(nn.Sequential(left, right, nn.Linear(3, 1)))


def test_only_the_last_layer():
    model = nn.Linear(3, 1)
    with ProxProp(model) as prox:
        model(torch.randn(2, 3)).sum().backward()
        refused(model, prox, LayerNotRunError, "skip_last=False")
    with ProxProp(model, skip_last=False) as prox:
        model.zero_grad()
        model(torch.randn(2, 3)).sum().backward()
        assert list(prox.precondition()) == [""]


def test_fullgraph_says_what_to_do():
    model = net()
    prox = ProxProp(model)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="compile without fullgraph=True"):
        torch.compile(model, backend="eager", fullgraph=True)(torch.randn(2, 7, **D))
    prox.detach()


def test_repr():
    assert repr(ProxProp(net(), "cg3")) == (
        "ProxProp(3 layers, mode='cg3', tau_theta=1.0, gram='sum', skip_last=True)"
    )  # fmt: skip


def test_empty_step_before_loading_a_distributed_checkpoint():
    """torch makes the state of an optimizer by a step of rate zero; no layer has run then, and nothing is wrong."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with ProxProp(model).attach(optimizer):
        assert get_optimizer_state_dict(model, optimizer)["state"]
        assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        with pytest.raises(LayerNotRunError):
            optimizer.step()


def test_layers_that_are_never_called_are_left_alone():
    """Attention and equilibria read a layer's weight themselves; such a layer is skipped unless it is asked for."""
    attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.Sequential(attention, nn.Flatten(), nn.Linear(24, 6), OptEqHead(6, 3, HeadConfig(layers=1)))
    prox = ProxProp(model)
    assert prox.skipped["0.self_attn.out_proj"] == "MultiheadAttention reads its weight without calling it"
    assert prox.skipped["3.equilibrium.layers.0.W"] == "OptEqLayer reads its weight without calling it"
    functional.cross_entropy(model(torch.randn(4, 3, 8)), torch.tensor([0, 1, 2, 0])).backward()
    # The last layer, 3.output, keeps its plain gradient.
    assert set(prox.precondition()) == {"0.linear1", "0.linear2", "2", "3.equilibrium.layers.0.U"}
