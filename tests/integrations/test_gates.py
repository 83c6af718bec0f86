"""Gates of saved models: apart from the plain weights, and there again when the model is loaded."""

import copy

import pytest
import safetensors.torch
import torch
from torch import nn

from solver_plugins import convert_model, gates_of, load, save
from tests.integrations.cases import hugging_face_inputs, hugging_face_model, timm_input, timm_model


def aligned(model: nn.Module) -> nn.Module:
    """Returns a copy in memory of its own: sums over weights in a mapped file, which lie elsewhere, round otherwise."""
    return copy.deepcopy(model)


@pytest.mark.parametrize("kind", ["channel", "scalar"])
@pytest.mark.parametrize("family", ["timm", "transformers"])
def test_gates_are_saved_beside_the_plain_weights(family, kind, tmp_path):
    """The weights in the folder are those of the plain model: same names, loaded by the plain library."""
    torch.manual_seed(0)
    timms = family == "timm"
    model = timm_model("test_vit", drop_path_rate=0.0) if timms else hugging_face_model("bert")
    inputs = {"x": timm_input(model)} if timms else hugging_face_inputs("bert")
    names = set(model.state_dict())
    convert_model(model, "proxgd", 3, pattern="all", gate=kind, example_inputs=inputs).eval()
    with torch.no_grad():
        for gate in gates_of(model).values():
            gate.uniform_(0, 1)
    save(model, tmp_path / "saved")
    assert set(safetensors.torch.load_file(tmp_path / "saved" / "model.safetensors")) <= names
    note = "one gate" if kind == "scalar" else "a gate per channel"
    assert f"| {note} |" in (tmp_path / "saved" / "README.md").read_text()
    again = load(tmp_path / "saved")
    gates = gates_of(again)
    assert all(torch.equal(gates[name], gate) for name, gate in gates_of(model).items())
    outputs = [one(**inputs) for one in (aligned(again), model)]
    outputs = [one if isinstance(one, torch.Tensor) else one.logits for one in outputs]
    assert torch.equal(*outputs)


def test_gates_that_save_pretrained_writes_are_no_surprise_when_they_are_loaded(tmp_path):
    model = convert_model(hugging_face_model("bert"), "proxgd", 3, pattern="all", gate="channel").eval()
    with torch.no_grad():
        for gate in gates_of(model).values():
            gate.uniform_(0, 1)
    model.save_pretrained(tmp_path)
    again, found = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not found["unexpected_keys"] and not found["missing_keys"]
    assert all(torch.equal(gates_of(again)[name], gate) for name, gate in gates_of(model).items())
    inputs = hugging_face_inputs("bert")
    assert torch.equal(aligned(again)(**inputs).logits, model(**inputs).logits)
