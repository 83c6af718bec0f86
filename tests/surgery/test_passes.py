"""A solver behind a shared activation belongs to one forward pass of one thread, whatever became of the others."""

import copy
import pickle
import threading
from contextlib import suppress

import pytest
import torch
import torchvision
from torch import nn
from torch.utils.checkpoint import checkpoint

from solver_plugins import apply_conversion, conversion_of, convert_model, revert_model
from solver_plugins.blocks import blocks_of
from tests.surgery.small import Model

X = torch.randn(2, 3, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
OTHER = torch.randn(2, 3, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def resnet_body(self, x):
    y = self.relu(self.bn1(self.conv1(x)))
    if self.early:
        return self.bn2(self.conv2(y))
    if self.checkpointed == "second":
        y = checkpoint(lambda z: self.bn2(self.conv2(z)), y, use_reentrant=False)
    elif self.checkpointed == "both":
        y = checkpoint(lambda z: self.relu(self.bn1(self.conv1(z))), x, use_reentrant=False)
        y = checkpoint(lambda z: self.bn2(self.conv2(z)), y, use_reentrant=False)
    elif self.checkpointed == "nested":

        def inner(z):
            return self.bn2(self.conv2(z))

        return checkpoint(lambda z: self.relu(checkpoint(inner, z, use_reentrant=False) + x), y, use_reentrant=False)
    else:
        y = self.bn2(self.conv2(y))
    return self.relu(y + x)


def block(convs=("conv1", "conv2"), iters=3):
    """Returns a residual block with one ReLU for both of its norms, converted."""
    torch.manual_seed(0)
    parts = {"conv1": nn.Conv2d(3, 3, 3, padding=1), "bn1": nn.BatchNorm2d(3), "relu": nn.ReLU()}
    parts |= {"conv2": nn.Conv2d(3, 3, 3, padding=1), "bn2": nn.BatchNorm2d(3)}
    plain = Model(resnet_body, **parts).double().eval()
    plain.early, plain.checkpointed = False, ""
    made = convert_model(plain, "proxgd", iters=iters, targets=list(convs), pattern="all", example_inputs=X)
    assert made.relu.links
    return made


def copied(model):
    return copy.deepcopy(model)


def pickled(model):
    body, model.body = model.body, None
    made = pickle.loads(pickle.dumps(model))
    made.body = model.body = body
    return made


def rewritten(model):
    written, plain = conversion_of(model), copy.deepcopy(model)
    return apply_conversion(revert_model(plain), written)


WAYS = pytest.mark.parametrize("way", [lambda model: model, copied, pickled, rewritten])
CONVS = pytest.mark.parametrize("convs", [("conv1", "conv2"), ("conv2",)])


@CONVS
@WAYS
def test_a_pass_after_one_that_was_broken_off(convs, way):
    model = way(block(convs))
    expected = model(X)
    handle = model.bn2.register_forward_pre_hook(lambda *rest: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(OTHER)
    handle.remove()
    assert torch.equal(model(X), expected)
    assert torch.equal(model(X), expected)


@CONVS
def test_a_pass_after_a_layer_was_called_by_itself(convs):
    model = block(convs)
    expected = model(X)
    model.conv2(OTHER)
    assert torch.equal(model(X), expected)


@CONVS
def test_a_pass_after_one_that_returned_before_its_activation(convs):
    model = block(convs)
    expected = model(X)
    model.early = True
    model(OTHER)
    model.early = False
    assert torch.equal(model(X), expected)


@CONVS
@pytest.mark.parametrize("segments", ["second", "both", "nested"])
def test_a_recomputed_layer_leaves_nothing_behind(convs, segments):
    """Gradient checkpointing recomputes the layer without the activation that its solver ends in."""
    model = block(convs).train()
    weights = [model.conv1.weight, model.conv2.weight]
    x = X.clone().requires_grad_()
    expected = torch.autograd.grad(model(x).square().sum(), [*weights, x])
    output = model(X).detach()
    model.checkpointed = segments
    found = torch.autograd.grad(model(x).square().sum(), [*weights, x])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    # No module around the activation is entered here.
    torch.testing.assert_close(resnet_body(model, X), output, rtol=1e-12, atol=1e-12)
    model.checkpointed = ""
    torch.testing.assert_close(model(X), output, rtol=1e-12, atol=1e-12)


def test_a_broken_off_pass_of_a_resnet_is_forgotten():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 32, 32)
    model = convert_model(torchvision.models.resnet18().eval(), "proxgd", iters=3, pattern="all", example_inputs=x)
    chains = [block.link for block in blocks_of(model).values() if block.link and block.link.role == "activation"]
    assert len(chains) == 8
    with torch.no_grad():
        expected = model(x)
        for chain in (chains[0], chains[-1]):
            handle = chain.norm.module.register_forward_pre_hook(lambda *rest: 1 / 0)
            with suppress(ZeroDivisionError):
                model(torch.randn_like(x))
            handle.remove()
            assert torch.equal(model(x), expected)


def test_nothing_is_left_of_it_after_the_way_back():
    model = block()
    before = {name: dict(module._forward_pre_hooks) for name, module in model.named_modules()}
    assert sum(map(len, before.values())) == 1
    revert_model(model)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert "link" not in vars(model.conv2) and type(model) is type(block()).plain_class


def in_threads(model, inputs, count=6):
    """Returns the errors and the largest difference of passes in parallel threads from passes one after the other."""
    with torch.no_grad():
        expected = [model(x) for x in inputs]
    differences, errors = [], []
    barrier = threading.Barrier(len(inputs))

    def work(x, wanted):
        try:
            barrier.wait()
            with torch.no_grad():
                differences.extend(float((model(x) - wanted).abs().max()) for _ in range(count))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(inputs, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors, max(differences, default=0.0)


@WAYS
def test_threads_with_a_shared_activation(way):
    inputs = [torch.randn(4, 3, 32, 32, dtype=torch.float64) for _ in range(4)]
    errors, difference = in_threads(way(block()), inputs)
    assert not errors and difference < 1e-9


def test_threads_with_a_private_norm():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).double().eval()
    inputs = [torch.randn(4, 3, 32, 32, dtype=torch.float64) for _ in range(2)]
    convert_model(model, "proxgd", iters=3, pattern="all", example_inputs=inputs[0])
    assert model[0].link is not None
    errors, difference = in_threads(model, inputs, 30)
    assert not errors and difference < 1e-9


@pytest.mark.parametrize("training", [False, True])
def test_it_is_compiled_whole(training):
    model = block().train(training)
    expected = copy.deepcopy(model)(X)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(X), expected)
    model.eval()
    expected = model(X)
    model.conv2(OTHER)
    torch.testing.assert_close(compiled(X), expected)


def test_compiled_passes_in_threads():
    model = block()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    inputs = [torch.randn(4, 3, 32, 32, dtype=torch.float64) for _ in range(3)]
    errors, difference = in_threads(compiled, inputs, 5)
    assert not errors and difference < 1e-9
