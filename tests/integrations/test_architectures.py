"""LeNet and AlexNet of the paper as timm models."""

import pytest
import timm
import torch
from timm.data import resolve_model_data_config
from torch.nn import functional

from solver_plugins import conversion_of, convert_model, inspect_model, load, save
from solver_plugins.errors import OptionError, ShapeError

STRICT = {"d-d": ["fc1", "fc2"], "d-nd": ["fc1"], "nd-d": ["fc2"]}
"""The strict blocks of each variant of Table 2."""
NAMES = ("solver_lenet", "solver_alexnet")


@pytest.mark.parametrize("variant", STRICT)
def test_strict_blocks(variant):
    """Dropout, linear, ReLU at the paper's rate: tau is half of the features that the layer reads."""
    model = timm.create_model("solver_lenet", dropout=variant)
    rows = [row for row in inspect_model(model, "proxsg", pattern="strict", lipschitz=False).rows if row.converted]
    assert [row.name for row in rows] == STRICT[variant]
    assert all(row.pattern == "dropout-linear-act" and row.p == 0.5 for row in rows)
    assert [row.tau for row in rows] == [model.get_submodule(name).in_features // 2 for name in STRICT[variant]]


def test_first_convolution_of_alexnet():
    """Table 3: Prox-GD in place of the first convolution and its ReLU."""
    model = timm.create_model("solver_alexnet").eval()
    x = torch.randn(2, 3, 32, 32)
    expected = model(x)
    convert_model(model, "proxgd", iters=1, targets=["conv1"])
    assert [block.layer for block in conversion_of(model).blocks] == ["conv1"]
    assert torch.equal(model(x), expected)


def test_lenet_by_hand():
    torch.manual_seed(0)
    model = timm.create_model("solver_lenet").eval().double()
    w = model.state_dict()
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    y = functional.max_pool2d(functional.conv2d(x, w["conv1.weight"], w["conv1.bias"]).clamp_min(0), 2)
    y = functional.max_pool2d(functional.conv2d(y, w["conv2.weight"], w["conv2.bias"]).clamp_min(0), 2)
    assert y.shape == (2, 16, 5, 5)
    for name in ("fc1", "fc2"):
        y = (y.reshape(2, -1) @ w[f"{name}.weight"].T + w[f"{name}.bias"]).clamp_min(0)
    y = y @ w["fc.weight"].T + w["fc.bias"]
    torch.testing.assert_close(model(x), y, rtol=1e-12, atol=1e-12)


def test_alexnet_by_hand():
    torch.manual_seed(0)
    model = timm.create_model("solver_alexnet").eval().double()
    w = model.state_dict()
    y = x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    for number, (stride, padding, pooled) in enumerate(
        ((4, 5, 2), (1, 2, 2), (1, 1, 1), (1, 1, 1), (1, 1, 2)), start=1
    ):
        y = functional.conv2d(y, w[f"conv{number}.weight"], w[f"conv{number}.bias"], stride, padding).clamp_min(0)
        y = functional.max_pool2d(y, pooled)
    assert y.shape == (2, 256, 1, 1)
    y = y.flatten(1) @ w["fc.weight"].T + w["fc.bias"]
    torch.testing.assert_close(model(x), y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_timm_conventions(name):
    model = timm.create_model(name, num_classes=7, in_chans=1).eval()
    config = resolve_model_data_config(timm.create_model(name))
    assert config["input_size"] == (3, 32, 32) and config["mean"] == (0.4914, 0.4822, 0.4465)
    x = torch.randn(2, 1, 32, 32)
    features = model.forward_features(x)
    assert torch.equal(model.forward_head(features), model(x)) and model(x).shape == (2, 7)
    assert model.forward_head(features, pre_logits=True).shape == (2, model.num_features)
    assert model.get_classifier() is model.fc
    model.reset_classifier(0)
    assert model(x).shape == (2, model.num_features)
    model.reset_classifier(4)
    assert model(x).shape == (2, 4) and model.num_classes == 4
    assert timm.create_model(name, num_classes=0)(torch.randn(1, 3, 32, 32)).shape == (1, model.num_features)


def test_round_trip(tmp_path):
    model = timm.create_model("solver_lenet", dropout="nd-d", num_classes=7).eval()
    convert_model(model, "proxsg", iters=3)
    save(model, tmp_path / "saved", model_args={"dropout": "nd-d"})
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(load(tmp_path / "saved").eval()(x), model(x))


@pytest.mark.parametrize(("options", "message"), [
    ({"dropout": "dd"}, "has no dropout 'dd'. Did you mean 'd-d'"),
    ({"drop_rate": 1.0}, r"drop_rate in \[0, 1\)"),
    ({"features_only": True}, "forward_features"),
])  # fmt: skip
def test_bad_options(options, message):
    with pytest.raises(OptionError, match=message):
        timm.create_model("solver_lenet", **options)


@pytest.mark.parametrize("name", NAMES)
def test_bad_input(name):
    model = timm.create_model(name)
    with pytest.raises(ShapeError, match=r"32x32 images.*found \(\d+, \d+\)"):
        model(torch.randn(1, 3, 64, 64))
    with pytest.raises(OptionError, match="no global pooling"):
        model.reset_classifier(3, "avg")
    with pytest.raises(OptionError, match="no gradient checkpointing"):
        model.set_grad_checkpointing()
