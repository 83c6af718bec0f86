"""What counts as a row in the odd corners of training: gradients of other things, shared weights, nested passes."""

import gc

import pytest
import timm.optim
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from solver_plugins import ProxProp
from solver_plugins.errors import OptionError, UnsupportedLayerError
from solver_plugins.proxprop import OptimizerError, OverwrittenError
from tests.proxprop.dense import exact

D = {"dtype": torch.float64}
CLOSE = {"rtol": 1e-9, "atol": 1e-12}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7, **D), nn.Tanh(), nn.Linear(7, 7, **D), nn.Tanh(), nn.Linear(7, 3, **D))


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum()


def expected(layer: nn.Linear, rows: torch.Tensor) -> torch.Tensor:
    """Returns the direction of weight and bias of a layer for these rows, by the dense formula."""
    ones = torch.ones(len(rows), 1, **D) if layer.bias is not None else rows[:, :0]
    g = [layer.weight.grad] if layer.bias is None else [layer.weight.grad, layer.bias.grad[:, None]]
    X = torch.cat([rows, ones], 1)
    return torch.stack([exact(X, one, 1.0) for one in torch.cat(g, 1)])


def direction(layer: nn.Linear) -> torch.Tensor:
    g = [layer.weight.grad] if layer.bias is None else [layer.weight.grad, layer.bias.grad[:, None]]
    return torch.cat(g, 1)


OTHERS = {
    "autograd.grad of the input": lambda model, z: torch.autograd.grad(loss(model, z), z),
    "backward(inputs=)": lambda model, z: loss(model, z).backward(inputs=[z]),
    "autograd.grad of a hidden feature": lambda model, z: torch.autograd.grad(model[:3](z).sum(), z),
    "autograd.grad of a weight": lambda model, z: torch.autograd.grad(loss(model, z), model[0].weight),
    "a batch of gradients": lambda model, z: torch.autograd.functional.jacobian(model, z, vectorize=True),
    "torch.func": lambda model, z: torch.func.jacrev(lambda one: torch.func.functional_call(model, {}, one))(z),
}


@pytest.mark.parametrize("when", ["before", "between", "after"])
@pytest.mark.parametrize("other", OTHERS)
def test_gradients_of_other_things_do_not_count(other, when):
    model = net()
    prox = ProxProp(model)
    batches = torch.randn(2, 2, 6, **D)

    def look() -> None:
        OTHERS[other](model, torch.randn(4, 6, **D).requires_grad_())

    for index, x in enumerate(batches):
        if when == ("before", "between")[index]:
            look()
        loss(model, x).backward()
    if when == "after":
        look()
    wanted = expected(model[0], batches.flatten(0, 1))
    report = prox.precondition()
    assert list(report) == ["0", "2"] and report["0"].rows == 4 and prox.last_layers == ("4",)
    torch.testing.assert_close(direction(model[0]), wanted, **CLOSE)


@pytest.mark.parametrize("zero_first", [True, False])
def test_a_micro_batch_without_gradient_counts(zero_first):
    """Its rows are a part of the whole batch, whichever comes first."""
    model = net()
    prox = ProxProp(model)
    batches = torch.randn(2, 2, 6, **D)
    for index, x in enumerate(batches):
        (loss(model, x) * (index != (0 if zero_first else 1))).backward()
    wanted = expected(model[0], batches.flatten(0, 1))
    assert prox.precondition()["0"].rows == 4
    torch.testing.assert_close(direction(model[0]), wanted, **CLOSE)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_discarded_gradient_takes_its_rows_along(set_to_none):
    model = net()
    prox = ProxProp(model)
    loss(model, torch.randn(3, 6, **D)).backward()
    model.zero_grad(set_to_none=set_to_none)
    x = torch.randn(2, 6, **D)
    loss(model, x).backward()
    wanted = expected(model[0], x)
    assert prox.precondition()["0"].rows == 2
    torch.testing.assert_close(direction(model[0]), wanted, **CLOSE)


class Shared(nn.Module):
    """Two layers with one weight, and a head."""

    def __init__(self, head=True):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(5, 5, bias=False, **D), nn.Linear(5, 5, bias=False, **D)
        self.b.weight = self.a.weight
        self.first = nn.Linear(5, 5, **D)
        self.head = nn.Linear(5, 2, **D) if head else nn.Identity()

    def forward(self, x, by=("a", "b")):
        x = self.first(x).tanh()
        for name in by:
            x = getattr(self, name)(x).tanh()
        return self.head(x)


def test_a_discarded_gradient_of_a_shared_weight():
    model = Shared()
    prox = ProxProp(model)
    model(torch.randn(3, 5, **D), by="a").square().sum().backward()
    model.zero_grad()
    x = torch.randn(3, 5, **D)
    model(x, by="b").square().sum().backward()
    wanted = expected(model.b, model.first(x).tanh().detach())
    assert prox.precondition()["b"].rows == 3
    torch.testing.assert_close(direction(model.b), wanted, **CLOSE)


def test_a_weight_that_the_last_layer_shares_stays_plain():
    model = Shared(head=False)
    prox = ProxProp(model)
    x = torch.randn(3, 5, **D)
    model(x).square().sum().backward()
    plain, wanted = model.a.weight.grad.clone(), expected(model.first, x)
    assert list(prox.precondition()) == ["first"] and prox.last_layers == ("b",)
    assert torch.equal(model.a.weight.grad, plain)
    torch.testing.assert_close(direction(model.first), wanted, **CLOSE)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_among_plain_calls_of_one_layer(reentrant):
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(5, 5, **D), nn.Linear(5, 2, **D)])
    prox = ProxProp(model)
    x = torch.randn(2, 5, **D)
    one = model[0](x).tanh()
    two = checkpoint(lambda z: model[0](z).tanh(), one, use_reentrant=reentrant)
    model[1](model[0](two).tanh()).square().sum().backward()
    wanted = expected(model[0], torch.cat([x, one.detach(), two.detach()]))
    assert prox.precondition()["0"].rows == 6
    torch.testing.assert_close(direction(model[0]), wanted, **CLOSE)


def test_a_backward_pass_that_failed_leaves_nothing_open():
    model = net()
    prox = ProxProp(model)
    handle = model[0].weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss(model, torch.randn(3, 6, **D)).backward()
    handle.remove()
    model.zero_grad()
    x = torch.randn(2, 6, **D)
    loss(model, x).backward()
    wanted = expected(model[0], x)
    assert prox.precondition()["0"].rows == 2
    torch.testing.assert_close(direction(model[0]), wanted, **CLOSE)


@pytest.mark.parametrize("rows", [2, 4])
def test_a_reused_input_is_noticed(rows):
    """Also where the Gram matrix was made of it already (more rows than columns)."""
    model = net()
    prox = ProxProp(model)
    x = torch.randn(rows, 6, **D)
    loss(model, x).backward()
    x.copy_(torch.randn(rows, 6, **D))
    loss(model, x).backward()
    before = model[0].weight.grad.clone()
    with pytest.raises(OverwrittenError, match=r"inputs of 0"):
        prox.precondition()
    assert torch.equal(model[0].weight.grad, before)


@pytest.mark.parametrize("rows", [4, 64])
@pytest.mark.parametrize("scale", [1e-25, 1e-20, 1e18])
def test_conjugate_gradients_at_any_scale(scale, rows):
    """In float32, where the square of such a gradient is zero or infinite."""
    torch.manual_seed(0)
    model = net().float()
    x = torch.randn(rows, 6)
    found = []
    for factor in (1.0, scale):
        model.zero_grad()
        with ProxProp(model, "cg3") as prox:
            (loss(model, x) * factor).backward()
            assert prox.precondition()["0"].iterations == 3
        found.append(model[0].weight.grad.double() / factor)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5 * float(found[0].abs().max()))


def test_conjugate_gradients_with_large_inputs():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 3))
    nn.init.zeros_(model[0].weight)
    prox = ProxProp(model, "cg3")
    (model(1e8 * torch.randn(16, 64)).square().sum() * 1e-4).backward()
    prox.precondition()
    assert torch.isfinite(model[0].weight.grad).all() and model[0].weight.grad.any()


class Sam(torch.optim.Optimizer):
    """Two passes per step, the second one by an optimizer inside."""

    def __init__(self, parameters):
        self.base_optimizer = torch.optim.SGD(parameters, lr=0.1)
        super().__init__(self.base_optimizer.param_groups, {})

    def step(self, closure=None):
        self.base_optimizer.step()


def _sam(model: nn.Module) -> torch.optim.Optimizer:
    return Sam(model.parameters())


def _lookahead(model: nn.Module) -> torch.optim.Optimizer:
    return timm.optim.create_optimizer_v2(model, opt="lookahead_sgd", lr=0.1)


@pytest.mark.parametrize("make", [_sam, _lookahead])
def test_optimizers_inside_of_others(make):
    model, x = net(), torch.randn(2, 6, **D)
    optimizer = make(model)
    prox = ProxProp(model).attach(optimizer)
    loss(model, x).backward()
    wanted = expected(model[0], x)
    optimizer.step()
    assert list(prox.last_step) == ["0", "2"]
    torch.testing.assert_close(direction(model[0]), wanted, **CLOSE)


def test_an_optimizer_without_hooks_is_refused():
    class Bare(torch.optim.Optimizer):
        def __init__(self, parameters):
            self.param_groups = [{"params": list(parameters)}]

        def step(self, closure=None):
            return None

    model = net()
    with pytest.raises(OptimizerError, match=r"Bare runs no hooks.*precondition"):
        ProxProp(model).attach(Bare(model.parameters()))


def test_attached_twice():
    model, x = net(), torch.randn(2, 6, **D)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prox = ProxProp(model).attach(optimizer).attach(optimizer)
    with pytest.raises(OptimizerError, match=r"preconditioned twice.*detach"):
        ProxProp(model).attach(optimizer)
    loss(model, x).backward()
    wanted = expected(model[0], x)
    optimizer.step()
    torch.testing.assert_close(direction(model[0]), wanted, **CLOSE)
    prox.detach()
    ProxProp(model).attach(optimizer)


def test_a_weight_that_is_pruned_later():
    model = net()
    prox = ProxProp(model)
    prune.l1_unstructured(model[0], "weight", 0.5)
    with pytest.raises(UnsupportedLayerError, match=r"weight of 0 .*make a new one"):
        loss(model, torch.randn(2, 6, **D)).backward()
    prox.detach()


def test_a_forgotten_proxprop_leaves_no_hooks():
    model = net()
    ProxProp(model)
    gc.collect()
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("options", [{"skip_last": "no"}, {"tau_theta": True}])
def test_options_of_another_type(options):
    with pytest.raises(OptionError, match=next(iter(options))):
        ProxProp(net(), **options)
