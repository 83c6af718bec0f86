"""Models from one line of text."""

import json

import pytest
import timm
import torch
from torch import nn

from solver_plugins.integrations.models import ModelError, load_model, read_value
from tests.surgery.models import bert


def test_timm():
    model = load_model("timm/test_resnet", num_classes=5)
    assert isinstance(model, timm.models.resnet.ResNet) and model.num_classes == 5


def test_transformers_weights_and_class(tmp_path, capsys):
    saved = bert()
    saved.save_pretrained(tmp_path)
    loaded = load_model(f"hf/{tmp_path}")
    assert type(loaded) is type(saved)
    assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in saved.state_dict().items())
    assert "random" not in capsys.readouterr().err


def test_transformers_without_weights_says_so(tmp_path, capsys):
    config = bert().config
    config.architectures = ["BertForSequenceClassification"]
    config.save_pretrained(tmp_path)
    model = load_model(f"hf/{tmp_path}", num_labels=4)
    assert model.num_labels == 4 and "random" in capsys.readouterr().err
    data = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**data, "architectures": None}))
    assert type(load_model(f"hf/{tmp_path}")).__name__ == "BertModel"
    (tmp_path / "config.json").write_text(json.dumps({**data, "architectures": ["BertForNothing"]}))
    with pytest.raises(ModelError, match="no class 'BertForNothing'"):
        load_model(f"hf/{tmp_path}")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="No config"):
        load_model(f"hf/{tmp_path}")


def test_unknown_setting_of_a_config(tmp_path):
    bert().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"no setting 'hidden_siz'.*Did you mean 'hidden_size'"):
        load_model(f"hf/{tmp_path}", hidden_siz=3)


def test_no_network_says_where_it_looked(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"Looked for .*cache.*without a network"):
        load_model("hf/nobody/no-such-model")
    with pytest.raises(ModelError, match=r"pretrained=True\) failed.*without a network: .*timm/local-dir:FOLDER"):
        load_model("timm/test_resnet", pretrained=True)


@pytest.mark.parametrize("spec", ["", "timm/", "hf/", "resnet18.a1_in1k", "keras/vgg16", None])
def test_other_specifications(spec):
    with pytest.raises(ModelError, match="Expected a model as 'timm/NAME'"):
        load_model(spec)


def test_folder_that_is_no_model(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_model(f"hf/{tmp_path}")


def test_values_of_the_command_line():
    assert [read_value(text) for text in ("1", "0.5", "true", "False", "None", "[1, 2]", "relu", "1e-3")] == [
        1, 0.5, True, False, None, [1, 2], "relu", 0.001,
    ]  # fmt: skip
    assert isinstance(load_model("timm/test_resnet", act_layer="relu"), nn.Module)
