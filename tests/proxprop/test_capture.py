"""Which inputs count: the whole batch, once each, however it came."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import solver_plugins
from solver_plugins import ProxProp
from solver_plugins.proxprop import proxprop
from tests.proxprop.dense import exact, flat, matrix_of
from tests.surgery.small import Model

D = {"dtype": torch.float64}
CLOSE = {"rtol": 1e-10, "atol": 1e-12}
MODES = ["exact", "cg2"]
BATCHES = [4, 32]  # fewer rows than columns, and more


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(11, 10, **D), nn.ReLU(), nn.Linear(10, 9, **D), nn.ReLU(), nn.Linear(9, 2, **D))


def convnet():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, **D), nn.ReLU(), nn.Conv2d(4, 4, 3, stride=2, **D), nn.Flatten(),
        nn.Linear(16, 3, **D),
    )  # fmt: skip


def watch_inputs(layer):
    """Returns a list that will tell of each input of a layer whether anyone still holds it."""
    storages = []
    layer.register_forward_pre_hook(lambda layer, args: storages.append(StorageWeakRef(args[0].untyped_storage())))
    return storages


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], **CLOSE)


def whole(model, x, mode, **options):
    model = copy.deepcopy(model)
    with ProxProp(model, mode, **options) as prox:
        model(x).square().mean().backward()
        prox.precondition()
    return gradients(model)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("gram", ["sum", "mean"])
@pytest.mark.parametrize("make", [net, convnet])
def test_four_micro_batches_are_one_batch(make, gram, batch, mode):
    model = make()
    x = torch.randn(batch, *((11,) if make is net else (3, 5, 5)), **D)
    expected = whole(model, x, mode, gram=gram)
    with ProxProp(model, mode, gram=gram) as prox:
        for part in x.chunk(4):
            (model(part).square().mean() / 4).backward()
        prox.precondition()
    same(gradients(model), expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("batch", BATCHES)
def test_checkpointing_counts_once(batch, reentrant):
    model, x = net(), torch.randn(batch, 11, requires_grad=True, **D)
    expected = whole(model, x, "exact")
    with ProxProp(model) as prox:
        hidden = checkpoint(model[:2], x, use_reentrant=reentrant)
        checkpoint(model[2:], hidden, use_reentrant=reentrant).square().mean().backward()
        report = prox.precondition()
    assert report["0"].rows == batch and list(report) == ["0", "2"]
    same(gradients(model), expected)


def test_checkpointing_keeps_its_memory():
    """Between forward and backward nobody holds the inputs of a checkpointed layer."""
    model, x = net(), torch.randn(32, 11, **D)
    alive = watch_inputs(model[2])
    with ProxProp(model) as prox:
        loss = checkpoint(model, x, use_reentrant=False).square().mean()
        assert alive[0].expired()
        loss.backward()
        assert prox.precondition()["2"].rows == 32


@pytest.mark.parametrize("batch", BATCHES)
def test_what_no_gradient_reaches_does_not_count(batch):
    model, x = net(), torch.randn(batch, 11, **D)
    expected = whole(model, x, "exact")
    with ProxProp(model) as prox:
        model(torch.randn(5, 11, **D))  # discarded
        with torch.no_grad():
            model(torch.randn(5, 11, **D))
        model(x).square().mean().backward()
        prox.precondition()
        same(gradients(model), expected)
        # Gradients that are thrown away take their inputs with them, set to None or to zero.
        for to_none in (True, False):
            model.zero_grad()
            model(torch.randn(5, 11, **D)).square().mean().backward()
            model.zero_grad(set_to_none=to_none)
            model(x).square().mean().backward()
            prox.precondition()
            same(gradients(model), expected)


@pytest.mark.parametrize("batch", BATCHES)
def test_two_backward_passes_over_one_graph(batch):
    model, x = net(), torch.randn(batch, 11, **D)
    expected = whole(model, x, "exact")
    with ProxProp(model) as prox:
        y = model(x).square().mean()
        (0.25 * y).backward(retain_graph=True)
        (0.75 * y).backward()
        assert prox.precondition()["0"].rows == batch
    same(gradients(model), expected)


@pytest.mark.parametrize("batch", BATCHES)
def test_gradients_of_inputs_before_the_loss(batch):
    """As a gradient penalty does: a first pass that fills no .grad."""
    model, x = net(), torch.randn(batch, 11, requires_grad=True, **D)
    expected = whole(model, x, "exact")
    with ProxProp(model) as prox:
        y = model(x).square().mean()
        torch.autograd.grad(y, x, retain_graph=True)
        y.backward()
        assert prox.precondition()["0"].rows == batch
    same(gradients(model), expected)


@pytest.mark.parametrize("rows", [2, 20])
@pytest.mark.parametrize("mode", ["exact", "cg500"])
def test_tied_weights_with_biases_of_their_own(rows, mode):
    first, second = nn.Linear(6, 6, **D), nn.Linear(6, 6, **D)
    second.weight = first.weight
    model = nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Linear(6, 1, **D))
    x = torch.randn(rows, 6, **D)
    hidden = torch.tanh(first(x)).detach()
    zeros = torch.zeros(rows * 6, 6, **D)
    A1, A2 = (matrix_of(layer, [u], ["weight", "bias"]) for layer, u in ((first, x), (second, hidden)))
    A = torch.cat([torch.cat([A1, zeros], 1), torch.cat([A2[:, :36], zeros, A2[:, 36:]], 1)])
    with ProxProp(model, mode) as prox:
        model(x).square().sum().backward()
        g = flat([first.weight.grad, first.bias.grad, second.bias.grad])
        report = prox.precondition()
    assert report["0"] is report["2"] and report["0"].rows == 2 * rows
    found = flat([first.weight.grad, first.bias.grad, second.bias.grad])
    torch.testing.assert_close(found, exact(A, g, 1.0), rtol=1e-7 if mode != "exact" else 1e-10, atol=1e-10)


@pytest.mark.parametrize("rows", [2, 20])
def test_a_module_used_twice(rows):
    layer = nn.Linear(6, 6, **D)
    model = nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(6, 1, **D))
    x = torch.randn(rows, 6, **D)
    A = matrix_of(layer, [x, torch.tanh(layer(x)).detach()], ["weight", "bias"])
    with ProxProp(model) as prox:
        model(x).square().sum().backward()
        g = flat([layer.weight.grad, layer.bias.grad])
        prox.precondition()
    torch.testing.assert_close(flat([layer.weight.grad, layer.bias.grad]), exact(A, g, 1.0), **CLOSE)


def test_frozen_parameters():
    model, x = net(), torch.randn(4, 11, **D)
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    hidden = torch.relu(model[0](x)).detach()
    A = matrix_of(model[2], [hidden], ["weight"])
    with ProxProp(model) as prox:
        model(x).square().sum().backward()
        plain, g = model[0].bias.grad.clone(), flat([model[2].weight.grad])
        assert list(prox.precondition()) == ["2"]
        assert torch.equal(model[0].bias.grad, plain) and model[0].weight.grad is None
        torch.testing.assert_close(flat([model[2].weight.grad]), exact(A, g, 1.0), **CLOSE)
        # Unfreezing needs no new ProxProp.
        model.zero_grad()
        model[0].weight.requires_grad_(True)
        model(x).square().sum().backward()
        assert list(prox.precondition()) == ["0", "2"]


def test_the_last_layer_keeps_its_gradient():
    model, x = net(), torch.randn(4, 11, **D)
    model(x).square().mean().backward()
    plain = gradients(model)
    assert torch.equal(whole(model, x, "exact")["4.weight"], plain["4.weight"])
    assert not torch.equal(whole(model, x, "exact", skip_last=False)["4.weight"], plain["4.weight"])
    # An excluded last layer does not make the one before it the last.
    excluded = whole(model, x, "exact", exclude=["4"])
    same(excluded, whole(model, x, "exact"))
    only = whole(model, x, "exact", targets=["2"])
    assert torch.equal(only["0.weight"], plain["0.weight"]) and torch.equal(only["2.weight"], excluded["2.weight"])


def test_the_last_layer_is_found_in_order_of_running_not_of_naming():
    def forward(self, x):
        return self.early(torch.relu(self.late(x)))

    model = Model(forward, early=nn.Linear(5, 2, **D), late=nn.Linear(3, 5, **D))
    with ProxProp(model) as prox:
        model(torch.randn(2, 3, **D)).sum().backward()
        assert list(prox.precondition()) == ["late"]


def test_in_place_activations_and_channels_last():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 3), nn.ReLU(inplace=True), nn.Flatten(),
        nn.Linear(16, 2),
    ).double()  # fmt: skip
    x = torch.randn(3, 3, 6, 6, **D)
    expected = whole(model, x, "exact")
    last = copy.deepcopy(model).to(memory_format=torch.channels_last)
    same(whole(last, x.to(memory_format=torch.channels_last), "exact"), expected)


def test_values_and_state_stay():
    model, x = net(), torch.randn(4, 11, **D)
    before, y = copy.deepcopy(model.state_dict()), model(x)
    prox = ProxProp(model)
    assert torch.equal(model(x), y)
    assert all(
        torch.equal(left, right) for left, right in zip(before.values(), model.state_dict().values(), strict=True)
    )
    assert before.keys() == model.state_dict().keys()
    prox.detach()
    prox.detach()
    assert not any(module._forward_hooks for module in model.modules())


def test_copies_and_pickles_of_the_model_are_not_heard():
    model, x = net(), torch.randn(4, 11, **D)
    expected = whole(model, x, "exact")
    with ProxProp(model) as prox:
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            other(torch.randn(7, 11, **D)).sum().backward()
        model(x).square().mean().backward()
        prox.precondition()
    same(gradients(model), expected)


def test_inputs_are_let_go():
    """A loss that lives on holds no inputs, and neither does a ProxProp after its step."""
    model, x = net(), torch.randn(4, 11, **D)
    hidden = watch_inputs(model[2])
    with ProxProp(model) as prox:
        loss = model(x).square().mean()
        loss.backward()
        prox.precondition()
        assert hidden[0].expired() and loss.grad_fn is not None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch", BATCHES)
def test_solver_blocks(batch, mode):
    """At one iteration a block is its layer; with more, its gradient is another one and X is its input."""
    model, x = net(), torch.randn(batch, 11, **D)
    one = solver_plugins.convert_model(copy.deepcopy(model), "proxgd", 1, example_inputs=x)
    same(whole(one, x, mode), whole(model, x, mode))
    three = solver_plugins.convert_model(copy.deepcopy(model), "proxgd", 3, example_inputs=x)
    A = matrix_of(model[0], [x], ["weight", "bias"])
    with ProxProp(three) as prox:
        three(x).square().mean().backward()
        g = flat([three[0].weight.grad, three[0].bias.grad])
        prox.precondition()
    torch.testing.assert_close(flat([three[0].weight.grad, three[0].bias.grad]), exact(A, g, 1.0), **CLOSE)


# The compiler looks at .grad of tensors between graphs, and hides the warning from all but `-W error`.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("when", ["before", "after"])
def test_compiled_models(when):
    model, x = net(), torch.randn(4, 11, **D)
    expected = whole(model, x, "exact")
    if when == "before":
        compiled = torch.compile(model, backend="aot_eager")
        prox = ProxProp(compiled)
    else:
        prox = ProxProp(model)
        compiled = torch.compile(model, backend="aot_eager")
    compiled(x).square().mean().backward()
    prox.precondition()
    same(gradients(model), expected)
    prox.detach()
    compiled(x).square().mean().backward()


def test_too_large_matrices_are_not_built(monkeypatch):
    monkeypatch.setattr(proxprop, "GRAM_BYTES", 900)
    model, x = net(), torch.randn(32, 11, **D)
    with ProxProp(model, "cg2") as prox:
        model(x).square().mean().backward()
        report = prox.precondition()
    assert report["2"].space == "features" and report["0"].space == "matrix-free"
    monkeypatch.undo()
    same(gradients(model), whole(net(), x, "cg2"))
