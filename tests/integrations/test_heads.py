"""Equilibrium heads on timm, transformers and plain models: attached, trained, saved, loaded, removed."""

import copy
import json

import pytest
import timm
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, ViTConfig, ViTForImageClassification

from solver_plugins import attach_opteq_head, convert_model, load, remove_opteq_head, revert_model, save
from solver_plugins.dropblock.errors import ClassifierError
from solver_plugins.equilibrium import HeadError, OptEqHead
from solver_plugins.errors import OptionError, SolverPluginsError, UnknownNameError
from solver_plugins.integrations import LoadingError
from solver_plugins.integrations.heads import HeadRecord, head_of

TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 20}


def vit():
    config = ViTConfig(**TINY, image_size=16, patch_size=8, num_labels=5)
    return ViTForImageClassification(config), torch.randn(2, 3, 16, 16)


def bert():
    config = BertConfig(**TINY, vocab_size=30, max_position_embeddings=12, num_labels=4)
    return BertForSequenceClassification(config), torch.randint(0, 30, (2, 6))


def plain():
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 12), nn.ReLU(), nn.Linear(12, 3)), torch.randn(4, 3, 4, 4)


MODELS = {
    "timm": lambda: (timm.create_model("test_resnet", num_classes=7), torch.randn(2, 3, 32, 32)),
    "timm vit": lambda: (timm.create_model("test_vit", num_classes=7, img_size=32), torch.randn(2, 3, 32, 32)),
    "vit": vit,
    "bert": bert,
    "plain": plain,
}


def logits(model, x):
    out = model(x)
    return getattr(out, "logits", out)


def attached(name, **options):
    torch.manual_seed(0)
    model, x = MODELS[name]()
    options |= {"classifier": "3"} if name == "plain" else {}
    return attach_opteq_head(model.eval(), hidden=8, **options), x


@pytest.mark.parametrize("name", MODELS)
def test_attached_trained_and_removed(name):
    torch.manual_seed(0)
    plain_model, x = MODELS[name]()
    expected = logits(plain_model.eval(), x)
    keys = list(plain_model.state_dict())
    model, _ = attached(name)
    record = head_of(model)
    head = model.get_submodule(record.name)
    assert isinstance(head, OptEqHead) and not any("replaced" in key for key in model.state_dict())
    found = logits(model, x)
    assert found.shape == expected.shape
    # By hand: what the classifier read, through the equilibrium.
    read = []
    hook = head.register_forward_pre_hook(lambda module, args: read.append(args[0]))
    logits(model, x)
    hook.remove()
    state = head.equilibrium(read[0])
    for layer in head.equilibrium.layers:
        kernel = layer.kernel()
        moved = torch.relu(state @ kernel.T + layer.U(read[0])) @ kernel
        state = 0.8 * moved + 0.2 * state
    torch.testing.assert_close(state, head.equilibrium(read[0]), rtol=1e-2, atol=1e-3)
    # It learns, backbone included.
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(logits(model, x), torch.arange(len(x)) % 3)
        loss.backward()
        assert all(parameter.grad is not None for parameter in head.parameters())
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    untouched, _ = attached(name)
    assert remove_opteq_head(untouched) is untouched
    assert list(untouched.state_dict()) == keys
    torch.testing.assert_close(logits(untouched, x), expected)
    with pytest.raises(HeadError, match="without one"):
        remove_opteq_head(untouched)


@pytest.mark.parametrize("name", MODELS)
def test_saved_and_loaded(name, tmp_path):
    model, x = attached(name, regularizer={"name": "l1", "eps": 0.2}, lam=0.01, layers=3, activation="tanh")
    save(model, tmp_path / "saved")
    files = {path.name for path in (tmp_path / "saved").iterdir()}
    assert "model.safetensors" in files and not any(file.endswith((".bin", ".pt")) for file in files)
    again = load(tmp_path / "saved", *([plain()[0]] if name == "plain" else []))
    assert not again.training
    assert torch.equal(logits(again, x), logits(model, x))
    assert head_of(again) == head_of(model)
    remove_opteq_head(again)
    assert logits(again, x).shape == logits(model, x).shape


@pytest.mark.parametrize("name", ["vit", "bert"])
def test_save_pretrained_keeps_the_head(name, tmp_path):
    """And with it every checkpoint of the Trainer, which calls it."""
    model, x = attached(name, layers=3, regularizer="l1", lam=0.01)
    model.save_pretrained(tmp_path / "checkpoint")
    again = load(tmp_path / "checkpoint")
    assert torch.equal(logits(again, x), logits(model, x))
    assert head_of(again) == head_of(model) == head_of(copy.deepcopy(model))
    converted = convert_model(again, "proxgd", iters=2, pattern="all", exclude=["output", "W", "U"])
    converted.save_pretrained(tmp_path / "converted")
    both = load(tmp_path / "converted")
    torch.testing.assert_close(logits(both, x), logits(converted, x))
    assert not torch.allclose(logits(both, x), logits(model, x))
    remove_opteq_head(model).save_pretrained(tmp_path / "plain")
    loaded = type(model).from_pretrained(tmp_path / "plain").eval()
    torch.testing.assert_close(logits(loaded, x), logits(model, x))
    torch.testing.assert_close(logits(load(tmp_path / "plain"), x), logits(model, x))


def test_timm_loads_the_folder_itself(tmp_path):
    model, x = attached("timm")
    save(model, tmp_path / "saved")
    again = timm.create_model(f"local-dir:{tmp_path / 'saved'}", pretrained=True).eval()
    assert torch.equal(again(x), model(x))


def test_with_a_conversion(tmp_path):
    model, x = attached("timm")
    plain_output = model(x)
    converted = convert_model(model, "proxgd", iters=2, pattern="all", exclude=["fc.output", "fc.equilibrium"])
    assert not torch.allclose(converted(x), plain_output)
    save(converted, tmp_path / "saved")
    torch.testing.assert_close(load(tmp_path / "saved")(x), converted(x))
    torch.testing.assert_close(revert_model(converted)(x), plain_output)


def test_description_is_json_and_does_it_again():
    model, _ = attached("timm", alpha=0.5, solver="sam", regularizer="half_squared")
    record = HeadRecord.from_json(json.dumps(json.loads(head_of(model).to_json())))
    other = attach_opteq_head(MODELS["timm"]()[0], classifier=record.name, **record.config.options())
    assert head_of(other) == head_of(model)
    assert head_of(MODELS["timm"]()[0]) is None


def test_copies_modes_and_devices():
    model, x = attached("timm")
    model = copy.deepcopy(model).double()
    assert model(x.double()).dtype == torch.float64
    assert remove_opteq_head(model).get_classifier().weight.dtype == torch.float64
    meta = attach_opteq_head(timm.create_model("test_resnet", num_classes=3).to("meta"))
    assert all(parameter.is_meta for parameter in meta.parameters())


def test_errors_leave_the_model_as_it_was(tmp_path):
    model, _ = MODELS["timm"]()
    before = list(model.state_dict())
    for error, options in (
        (OptionError, {"hidden_size": 3}),
        (OptionError, {"layers": 0}),
        (UnknownNameError, {"solver": "andersen"}),
        (UnknownNameError, {"regularizer": "l3"}),
        (SolverPluginsError, {"activation": "gelu"}),
        (OptionError, {"solver": "sam", "gradient": "implicit"}),
        (ClassifierError, {"classifier": "nothing"}),
    ):
        with pytest.raises(error):
            attach_opteq_head(model, **options)
        assert list(model.state_dict()) == before
    with pytest.raises(HeadError, match=r"model\.module"):
        attach_opteq_head(nn.DataParallel(model))
    with pytest.raises(HeadError, match="single Linear"):
        attach_opteq_head(nn.Linear(3, 3))
    attach_opteq_head(model)
    with pytest.raises(HeadError, match="remove_opteq_head"):
        attach_opteq_head(model)
    save(model, tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    config["model_args"]["converted"]["head"]["config"]["layers"] = "two"
    (tmp_path / "saved" / "config.json").write_text(json.dumps(config))
    with pytest.raises(LoadingError, match="layers"):
        load(tmp_path / "saved")
    other = plain()[0]
    keys = list(other.state_dict())
    with pytest.raises(SolverPluginsError):
        load(tmp_path / "saved", other)
    assert list(other.state_dict()) == keys


def test_a_converted_classifier_is_refused():
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 3))
    convert_model(model, "proxsg", iters=2, example_inputs=torch.randn(2, 6))
    with pytest.raises(HeadError, match="exclude"):
        attach_opteq_head(model, classifier="3")
