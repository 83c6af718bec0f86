"""Dropout without sampling: exact for the squared loss, second order for cross-entropy, on real classifiers."""

import pytest
import timm
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.testing import assert_close
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from solver_plugins import StructuredDropoutRegularizer
from solver_plugins.dropblock import (
    BlockSizeError,
    ClassifierError,
    RegularizerError,
    SampledScheme,
    find_classifier,
)
from solver_plugins.errors import OptionError, ShapeError, UnknownNameError
from tests.dropblock.masks import enumerate_masks

SCHEMES = [("dropout", 1), ("dropblock", 2), ("overlapping", 3)]


class Net(nn.Module):
    def __init__(self, d=4, a=3):
        super().__init__()
        self.body = nn.Linear(5, d)
        self.fc = nn.Linear(d, a)

    def forward(self, x):
        return self.fc(torch.tanh(self.body(x)))


def enumerated(model, x, name, r, loss):
    """The mean of a loss over all masks before the last layer."""
    masks, weights = enumerate_masks(name, (4,), 0.6, r)
    h = torch.tanh(model.body(x))
    return sum(p * loss(model.fc(h * (z / 0.6))) for z, p in zip(masks, weights, strict=True))


@pytest.mark.parametrize(("name", "r"), SCHEMES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "batchmean"])
def test_squared_loss_is_exact(name, r, reduction):
    model, x, y = Net().double(), torch.randn(6, 5).double(), torch.randn(6, 3).double()
    regularizer = StructuredDropoutRegularizer(model, name, 0.6, r, reduction=reduction)

    def loss(out):
        return F.mse_loss(out, y, reduction="mean" if reduction == "mean" else "sum") / (
            6 if reduction == "batchmean" else 1
        )

    total = loss(model(x)) + regularizer()
    expected = enumerated(model, x, name, r, loss)
    assert_close(total, expected, rtol=1e-10, atol=1e-10)
    # Gradients, too: for the last layer and for what is below.
    for parameter in model.parameters():
        ours, theirs = (torch.autograd.grad(v, parameter, retain_graph=True)[0] for v in (total, expected))
        assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(("name", "r"), SCHEMES)
def test_cross_entropy_is_right_to_second_order(name, r):
    """With the last layer scaled by e, the error of the expected loss falls as e^3."""
    model, x, y = Net().double(), torch.randn(6, 5).double(), torch.randint(3, (6,))
    regularizer = StructuredDropoutRegularizer(model, name, 0.6, r, loss="cross_entropy_second_order")
    errors = []
    for _ in range(3):
        plain = F.cross_entropy(model(x), y)
        penalty = regularizer()
        exact = enumerated(model, x, name, r, lambda out: F.cross_entropy(out, y))
        regularizer.reset()
        assert penalty > 0
        errors.append(((exact - plain - penalty).abs() / (exact - plain)).item())
        with torch.no_grad():
            model.fc.weight /= 10
    # Relative to the penalty, which falls as e^2, the error falls at least as e.
    assert errors[2] < errors[1] / 5 and errors[2] < 0.01


def test_sampler_and_context_manager():
    def sampler(n, size, generator):
        return (torch.rand(n, *size, generator=generator) < 0.5).double()

    model, x = Net(), torch.randn(50, 5)
    with StructuredDropoutRegularizer(model, SampledScheme(sampler, 0.5)) as regularizer:
        model(x)
        estimated = regularizer()
    with StructuredDropoutRegularizer(model, "dropout", 0.5) as regularizer:
        model(x)
        assert_close(estimated, regularizer(), rtol=0.1, atol=0)
    assert not model.fc._forward_hooks


def test_when_it_has_a_value():
    model, x = Net(), torch.randn(2, 5)
    regularizer = StructuredDropoutRegularizer(model, "dropout", 0.5)
    with pytest.raises(RegularizerError, match=r"before each call of the regulariser; there was none"):
        regularizer()
    model.eval()(x)
    with torch.no_grad():
        model.train()(x)
    with pytest.raises(RegularizerError, match="there was none"):
        regularizer()
    model(x), model(x)
    with pytest.raises(RegularizerError, match="ran 2 times"):
        regularizer()
    model(x)
    regularizer.reset()
    model(x)
    assert regularizer() > 0


def test_checkpointing_does_not_count_twice():
    model, x = Net(), torch.randn(2, 5)
    regularizer = StructuredDropoutRegularizer(model, "dropout", 0.5)
    for _ in range(2):
        out = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
        (out.sum() + regularizer()).backward()


def test_accumulation_equals_one_large_batch():
    model, x, y = Net().double(), torch.randn(8, 5).double(), torch.randn(8, 3).double()
    regularizer = StructuredDropoutRegularizer(model, "dropblock", 0.5, 2)
    (F.mse_loss(model(x), y) + regularizer()).backward()
    whole = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    for part, target in zip(x.split(2), y.split(2), strict=True):
        ((F.mse_loss(model(part), target) + regularizer()) / 4).backward()
    for parameter, grad in zip(model.parameters(), whole, strict=True):
        assert_close(parameter.grad, grad, rtol=1e-9, atol=1e-12)


def test_autocast_computes_in_float32():
    model, x = Net(), torch.randn(4, 5)
    for loss in ("squared", "cross_entropy_second_order"):
        regularizer = StructuredDropoutRegularizer(model, "overlapping", 0.5, 2, loss=loss)
        model(x)
        plain = regularizer()
        with torch.autocast("cpu", torch.bfloat16):
            model(x)
            value = regularizer()
        assert value.dtype == torch.float32
        assert_close(value, plain, rtol=0.05, atol=1e-4)
        regularizer.remove()


@pytest.mark.parametrize(("name", "r"), SCHEMES)
def test_compiles_with_its_hook(name, r):
    torch.compiler.reset()
    model, x = Net(), torch.randn(4, 5)
    regularizer = StructuredDropoutRegularizer(model, name, 0.5, r, loss="cross_entropy_second_order")
    model(x)
    expected = regularizer()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    (compiled(x).sum() * 0 + (value := regularizer())).backward()
    assert_close(value, expected)
    assert model.body.weight.grad.abs().sum() > 0


def tiny(cls, config, **options):
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50, "hidden_size": 16}
    return cls(config(**sizes, **options))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: timm.create_model("resnet10t", num_classes=3), "fc"),
        (lambda: timm.create_model("test_vit", num_classes=3), "head"),
        (lambda: timm.create_model("test_convnext", num_classes=3), "head.fc"),
        (lambda: tiny(BertForSequenceClassification, BertConfig, intermediate_size=16), "classifier"),
        (lambda: tiny(RobertaForSequenceClassification, RobertaConfig, intermediate_size=16), "classifier.out_proj"),
        (
            lambda: tiny(GPT2ForSequenceClassification, GPT2Config, pad_token_id=0, bos_token_id=1, eos_token_id=1),
            "score",
        ),
    ],
)
def test_last_layers_of_timm_and_transformers(make, name):
    assert find_classifier(make())[0] == name


def test_a_timm_model_trains():
    model = timm.create_model("test_resnet", num_classes=3)
    regularizer = StructuredDropoutRegularizer(model, "dropblock", 0.5, 4)
    F.mse_loss(model(torch.randn(2, 3, 32, 32)), torch.zeros(2, 3)).add(regularizer()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_sequences_need_to_say_which_rows_count():
    model = Net()
    regularizer = StructuredDropoutRegularizer(model, "dropout", 0.5)
    x = torch.randn(2, 7, 5)
    model(x)
    with pytest.raises(ShapeError, match=r"saw sequences, of shape \(2, 7, 4\): say with where="):
        regularizer()
    where = torch.zeros(2, 7, dtype=torch.bool)
    where[:, -1] = True
    model(x)
    last = regularizer(where)
    model(x[:, -1])
    assert_close(last, regularizer())
    model(x)
    with pytest.raises(ShapeError, match=r"Expected where= of shape \(2, 7\)"):
        regularizer(where[0])


def test_bad_input():
    model = Net()
    with pytest.raises(BlockSizeError, match=r"block_size=3 for 4\. The nearest that divide it: 2 or 4"):
        StructuredDropoutRegularizer(model, "dropblock", 0.5, 3)
    with pytest.raises(UnknownNameError, match="Unknown scheme 'block'"):
        StructuredDropoutRegularizer(model, "block", 0.5, 2)
    with pytest.raises(OptionError, match=r"in \(0, 1\]"):
        StructuredDropoutRegularizer(model, "dropout", 0.0)
    with pytest.raises(OptionError, match="'cross_entropy_second_order'; found 'cross_entropy'"):
        StructuredDropoutRegularizer(model, "dropout", 0.5, loss="cross_entropy")
    with pytest.raises(OptionError, match="found 'none'"):
        StructuredDropoutRegularizer(model, "dropout", 0.5, reduction="none")
    odd = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4))
    with pytest.raises(ClassifierError, match=r"name its last layer with classifier=\. Its linear layers: 0, 2"):
        StructuredDropoutRegularizer(odd, "dropout", 0.5)
    assert StructuredDropoutRegularizer(odd, "dropout", 0.5, classifier="2").classifier is odd[2]
    assert StructuredDropoutRegularizer(odd, "dropout", 0.5, classifier=odd[2]).name == "2"
    with pytest.raises(ClassifierError, match="has no module '3'"):
        StructuredDropoutRegularizer(odd, "dropout", 0.5, classifier="3")
    with pytest.raises(ClassifierError, match="not a part of this"):
        StructuredDropoutRegularizer(odd, "dropout", 0.5, classifier=nn.Linear(2, 2))
    with pytest.raises(ClassifierError, match="found ReLU"):
        StructuredDropoutRegularizer(odd, "dropout", 0.5, classifier="1")
    with pytest.raises(ClassifierError, match="made without a classifier"):
        StructuredDropoutRegularizer(timm.create_model("test_vit", num_classes=0), "dropout", 0.5)
    with pytest.raises(ClassifierError, match="not compiled yet"):
        StructuredDropoutRegularizer(torch.compile(model, backend="eager"), "dropout", 0.5)
