"""A model's own dropout as structured dropout, and back."""

import copy
import json
import pickle

import pytest
import timm
import torch
from torch import nn
from torch.testing import assert_close
from transformers import BertConfig, BertForSequenceClassification

from solver_plugins import convert_dropout, inspect_dropout, revert_dropout
from solver_plugins.dropblock import BlockSizeError, SampledScheme
from solver_plugins.errors import OptionError, UnknownNameError
from solver_plugins.surgery import ConversionError, TargetError
from tests.dropblock.test_layers import whole_or_nothing


class Net(nn.Module):
    """One dropout of each kind."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.map_drop = nn.Dropout(0.4, inplace=True)
        self.channel_drop = nn.Dropout2d(0.3)
        self.zero_drop = nn.Dropout(0.0)
        self.unused_drop = nn.Dropout(0.2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.pooled_drop = nn.Dropout(0.5)
        self.fc1 = nn.Linear(4, 6)
        self.drop = nn.Dropout(0.5)
        self.attention_drop = nn.Dropout(0.1)
        self.fc = nn.Linear(6, 2)

    def forward(self, x):
        x = self.zero_drop(self.channel_drop(self.map_drop(torch.relu(self.conv(x)))))
        x = self.drop(self.fc1(self.pooled_drop(self.pool(x)).flatten(1)))
        x = x * self.attention_drop(x.softmax(-1))
        return self.fc(nn.functional.dropout(x, 0.1, self.training))


IMAGES = torch.randn(8, 3, 8, 8)


def test_what_is_converted_and_why_the_rest_is_not(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    model = Net()
    before = copy.deepcopy(model)
    report = inspect_dropout(model, block_size=2, example_inputs=IMAGES)
    assert {row.name: (row.dims, row.scheme) for row in report.converted} == {
        "map_drop": (2, "GridBlocks(theta=0.6, block_size=2)"),
        "pooled_drop": (2, "GridBlocks(theta=0.5, block_size=2)"),
        "drop": (1, "GridBlocks(theta=0.5, block_size=2)"),
    }
    reasons = {row.name: row.reason for row in report.rows if not row.converted}
    assert "whole channels" in reasons["channel_drop"]
    assert "rate is 0" in reasons["zero_drop"]
    assert "never called" in reasons["unused_drop"]
    assert "attention weights" in reasons["attention_drop"]
    assert "a function" in reasons["the model"]
    text = str(report)
    assert "3 of 8 dropouts become dropblock" in text and "left alone: it drops whole channels" in text
    assert "3 of 8 dropouts" in repr(report) and "map_drop" in report._repr_html_()
    assert json.loads(report.to_json())["dropouts"][0]["name"] == "map_drop"
    assert [type(module) for module in model.modules()] == [type(module) for module in before.modules()]


def test_convert_and_revert():
    model = Net()
    keys, hook = list(model.state_dict()), []
    model.drop.register_forward_hook(lambda module, args, output: hook.append((args[0], output)))
    assert convert_dropout(model, block_size=2, theta=0.25, example_inputs=IMAGES) is model
    assert list(model.state_dict()) == keys
    assert isinstance(model.drop, nn.Dropout) and "GridBlocks(theta=0.25, block_size=2)" in repr(model.drop)
    model.train()(IMAGES)
    seen, dropped = hook[-1]
    kept = dropped != 0
    assert_close(dropped, torch.where(kept, 4 * seen, 0.0))
    assert (kept[:, ::2] == kept[:, 1::2]).all()
    again = pickle.loads(pickle.dumps(copy.deepcopy(_without_hooks(model))))
    assert torch.equal(seeded(model), seeded(again))
    plain = Net()
    plain.load_state_dict(model.state_dict())
    assert_close(model.eval()(IMAGES), plain.eval()(IMAGES), rtol=0, atol=0)
    assert revert_dropout(model) is model
    assert type(model.drop) is nn.Dropout and vars(model.drop).keys() == vars(nn.Dropout()).keys()
    assert torch.equal(seeded(model), seeded(plain))
    with pytest.raises(ConversionError, match="without any"):
        revert_dropout(model)


def seeded(model):
    torch.manual_seed(0)
    return model.train()(IMAGES)


def _without_hooks(model):
    model.drop._forward_hooks.clear()
    return model


def test_pooled_maps_lose_channels_and_maps_lose_squares():
    model = convert_dropout(Net(), block_size=2, example_inputs=IMAGES).train()
    y = model.pooled_drop(torch.ones(100, 4, 1, 1)).flatten(1) != 0
    assert (y[:, ::2] == y[:, 1::2]).all() and (y[:, 0] != y[:, 2]).any()
    y = model.map_drop(torch.ones(20, 4, 8, 8)) != 0
    blocks = y.unflatten(3, (4, 2)).unflatten(2, (4, 2)).float().mean((3, 5))
    assert set(blocks.unique().tolist()) == {0.0, 1.0}


def test_targets_reach_dropouts_at_rate_zero():
    model = convert_dropout(Net(), block_size=2, theta=0.9, targets=["zero_drop"], example_inputs=IMAGES)
    assert "theta=0.9" in repr(model.zero_drop) and type(model.drop) is nn.Dropout
    assert model.zero_drop.p == 0
    model = convert_dropout(Net(), "overlapping", 3, exclude=["map_drop"], example_inputs=IMAGES, inplace=False)
    assert type(model.map_drop) is nn.Dropout and "Overlapping" in repr(model.drop)


def test_a_sampler():
    model = convert_dropout(Net(), SampledScheme(whole_or_nothing, 0.25), example_inputs=IMAGES).train()
    y = model.drop(torch.ones(50, 6))
    assert set(y.unique().tolist()) == {0.0, 4.0}


def test_timm_drop_blocks_keep_their_own_settings():
    model = timm.create_model("resnet10t", drop_block_rate=0.1, num_classes=2)
    convert_dropout(model, "overlapping")
    early, late = model.layer3[0].drop_block, model.layer4[0].drop_block
    # timm's rate of the earlier stage is a quarter, with larger blocks.
    assert (early.structured_scheme.theta, early.structured_scheme.block_size) == (0.975, 5)
    assert (late.structured_scheme.theta, late.structured_scheme.block_size) == (0.9, 3)
    assert late.structured_coupled
    kept = late.train()(torch.ones(2000, 2, 7, 7)) != 0
    assert (kept[:, 0] == kept[:, 1]).all()
    assert abs(kept.double().mean() - 0.9) < 0.02
    assert model(torch.randn(2, 3, 64, 64)).isfinite().all()
    revert_dropout(model)
    assert type(late).__name__ == "DropBlock2d"


def test_transformers():
    config = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=50, intermediate_size=16)
    model = BertForSequenceClassification(config)
    report = inspect_dropout(model, block_size=4)
    assert {row.name for row in report.converted} >= {"dropout", "bert.embeddings.dropout"}
    left = {row.name: row.reason for row in report.rows if not row.converted}
    assert all("attention" in reason for reason in left.values())
    convert_dropout(model, block_size=4, theta=0.5)
    assert model.train()(torch.ones(2, 5, dtype=torch.long)).logits.isfinite().all()


def test_compiles():
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    convert_dropout(model, block_size=2, example_inputs=torch.randn(2, 4))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    y = compiled(torch.randn(64, 4)) != 0
    assert (y[:, ::2] == y[:, 1::2]).all() and not y.all()


def test_errors_leave_the_model_alone():
    model = Net()
    classes = [type(module) for module in model.modules()]
    cases = [
        (UnknownNameError, "Unknown scheme 'blocks'", {"scheme": "blocks", "block_size": 2}),
        (BlockSizeError, "'map_drop': Blocks on a grid.*block_size=3 for 8 x 8.*nearest.*2 or 4", {"block_size": 3}),
        (BlockSizeError, "positive whole", {"block_size": 0}),
        (OptionError, "needs a block_size", {}),
        (OptionError, r"in \(0, 1\]", {"block_size": 2, "theta": 0.0}),
        (OptionError, "dims", {"block_size": 2, "dims": 3}),
        (OptionError, "such as SampledScheme", {"scheme": whole_or_nothing}),
        (OptionError, "has the rate 0: give theta=", {"block_size": 2, "targets": ["zero_drop"]}),
        (TargetError, "matches no dropout. Did you mean 'drop'", {"block_size": 2, "targets": ["dropp"]}),
        (TargetError, "channel_drop: it drops whole channels", {"block_size": 2, "targets": ["channel_drop"]}),
        (TargetError, "matches no dropout", {"block_size": 2, "exclude": ["nothing"]}),
    ]
    for error, message, options in cases:
        with pytest.raises(error, match=message):
            convert_dropout(model, example_inputs=IMAGES, **options)
        assert [type(module) for module in model.modules()] == classes
    with pytest.raises(ConversionError, match="it has none"):
        convert_dropout(nn.Linear(2, 2), block_size=2, example_inputs=torch.randn(1, 2))
    with pytest.raises(ConversionError, match="0: its rate is 0"):
        convert_dropout(nn.Sequential(nn.Dropout(0.0)), block_size=2, example_inputs=torch.randn(1, 2))
    with pytest.raises(ConversionError, match="OptimizedModule"):
        convert_dropout(torch.compile(model, backend="eager"), block_size=2)
    convert_dropout(model, block_size=2, example_inputs=IMAGES)
    with pytest.raises(ConversionError, match="converted already; call revert_dropout"):
        convert_dropout(model, block_size=2, example_inputs=IMAGES)
