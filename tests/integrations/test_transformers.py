"""transformers models through save_pretrained and from_pretrained."""

import copy
import json
import os
import pickle
import subprocess
import sys
import warnings

import accelerate
import pytest
import torch
import transformers
from torch import nn

from solver_plugins import calibrate, conversion_of, convert_model, load, refresh_steps, revert_model, save, set_blend
from solver_plugins.blocks import SolverBlock
from solver_plugins.errors import SolverPluginsWarning
from solver_plugins.integrations import LoadingError, SavingError
from solver_plugins.integrations.folder import NOTICE
from solver_plugins.integrations.preprocessing import load_tokenizer
from solver_plugins.integrations.transformers import SolverPluginsConfig, SolverPluginsQuantizer
from solver_plugins.prox import Monotone, declare_activation
from solver_plugins.surgery import ConversionError
from solver_plugins.surgery.model_config import QUANT_METHOD
from tests.integrations.cases import HUGGING_FACE, SOLVERS, converted, hugging_face_inputs, hugging_face_model

MARKS = ("hf_quantizer", "quantization_method", "is_quantized")


@pytest.fixture(autouse=True)
def quiet():
    transformers.utils.logging.disable_progress_bar()


def output(model, inputs):
    """Returns the logits, of copied weights: those of a mapped file are aligned otherwise, and their sums round so."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    with torch.no_grad():
        return model(**inputs)[0]


def poison():
    """Fills memory that will be handed out again with NaN."""
    for size in (1, 2, 8, 16, 24, 32, 48, 64, 128, 512, 1024):
        held = [torch.full((size,), torch.nan) for _ in range(100)]
        del held


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_round_trip(name, solver, tmp_path):
    model = hugging_face_model(name)
    inputs = hugging_face_inputs(name)
    converted(model, solver)
    model.save_pretrained(tmp_path)
    expected = output(model, inputs)
    assert torch.isfinite(expected).all()
    poison()
    for again in (type(model).from_pretrained(tmp_path), load(tmp_path)):
        assert torch.equal(output(again, inputs), expected)
        assert conversion_of(again).to_json() == conversion_of(model).to_json()
        assert again.config.to_json_string() == model.config.to_json_string()
        assert not any(mark in vars(again) for mark in MARKS)
        assert not any(hasattr(m.config, "_is_quantized") for m in again.modules() if hasattr(m, "config"))
    plain = revert_model(again)
    assert not hasattr(plain.config, "quantization_config")
    assert torch.equal(output(plain, inputs), output(revert_model(model), inputs))


@pytest.fixture
def saved(tmp_path):
    """A converted BERT classifier and its folder."""
    model = converted(hugging_face_model("bert"), "fista")
    model.save_pretrained(tmp_path / "saved")
    return model, tmp_path / "saved"


def test_ways_of_loading(saved):
    model, folder = saved
    inputs = hugging_face_inputs("bert")
    expected = output(model, inputs)
    made = transformers.AutoModelForSequenceClassification
    for options in ({}, {"device_map": "cpu"}, {"device_map": "auto"}, {"low_cpu_mem_usage": True}):
        assert torch.equal(output(made.from_pretrained(folder, **options), inputs), expected), options
    assert torch.equal(output(made.from_pretrained(folder.parent, subfolder="saved"), inputs), expected)
    other = folder.parent / "other"
    model.save_pretrained(other, max_shard_size="10KB")
    assert len(list(other.glob("*.safetensors"))) > 1
    assert torch.equal(output(made.from_pretrained(other), inputs), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, "bfloat16"])
def test_dtypes(dtype, saved):
    model, folder = saved
    again = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype)
    real = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    cast = model.to(real)
    refresh_steps(cast)
    inputs = hugging_face_inputs("bert")
    assert torch.equal(output(again, inputs), output(cast, inputs))
    assert {p.dtype for p in again.parameters()} == {real}
    assert all(b.L.dtype == (real if real == torch.float64 else torch.float32) for b in _blocks(again))


def _blocks(model):
    found = [module for module in model.modules() if isinstance(module, SolverBlock)]
    assert found
    return found


def test_what_is_loaded_is_an_ordinary_model(saved, tmp_path):
    """It can be cast, trained, copied, saved with a state dict of its own."""
    _, folder = saved
    again = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    again.half().float()
    again.save_pretrained(tmp_path / "again", state_dict=again.state_dict())
    inputs = hugging_face_inputs("bert")
    assert torch.equal(output(load(tmp_path / "again"), inputs), output(load(tmp_path / "again"), inputs))
    loss = again.train()(**inputs, labels=torch.tensor([0, 1])).loss
    loss.backward()
    assert all(p.grad is not None for p in again.parameters())
    twin = copy.deepcopy(again).eval()
    assert torch.equal(output(twin, inputs), output(again.eval(), inputs))


def test_tied_weights(tmp_path):
    model = converted(hugging_face_model("bert_mlm"), "proxgd")
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert again.get_output_embeddings().weight is again.get_input_embeddings().weight


def test_another_number_of_labels(saved, caplog):
    """The head is made anew, as in a plain model; every step size belongs to the weights that are there."""
    model, folder = saved
    with warnings.catch_warnings(record=True) as ours:
        warnings.simplefilter("always")
        again = transformers.AutoModelForSequenceClassification.from_pretrained(
            folder, num_labels=5, ignore_mismatched_sizes=True
        )
    # Up to transformers 5.22 no loading behind a quantizer looked at sizes, so that we did, and told.
    told = "\n".join([caplog.text, *(str(one.message) for one in ours if one.category is SolverPluginsWarning)])
    assert (
        "classifier.weight" in told
        and "classifier.bias" in told
        and "(3, 16)" in told.replace("[", "(").replace("]", ")")
    )
    head = again.classifier
    assert head.weight.std() < 0.05 and head.weight.abs().max() > 0 and not head.bias.any()
    assert output(again, hugging_face_inputs("bert")).shape == (2, 5)
    assert conversion_of(again).to_json() == conversion_of(model).to_json()
    for name, block in again.named_modules():
        if isinstance(block, SolverBlock):
            before = block.L.clone()
            assert torch.equal(block.refresh_step(), before), name


def test_a_backbone_and_its_heads(tmp_path):
    """The names of a conversion follow the weights: into a model with a head, and out of it."""
    backbone = converted(transformers.AutoModel.from_config(hugging_face_model("bert").config), "fista").eval()
    backbone.save_pretrained(tmp_path / "backbone")
    whole = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "backbone")
    names = [f"bert.{block.layer}" for block in conversion_of(backbone).blocks]
    assert [block.layer for block in conversion_of(whole).blocks] == names
    inputs = hugging_face_inputs("bert")
    assert torch.equal(output(whole.bert, inputs), output(backbone, inputs))

    convert_model(revert_model(whole), "fista", iters=3, pattern="all")
    assert "classifier" in {block.layer for block in conversion_of(whole).blocks}
    whole.save_pretrained(tmp_path / "whole")
    with pytest.warns(SolverPluginsWarning, match="BertModel has no classifier"):
        again = transformers.AutoModel.from_pretrained(tmp_path / "whole")
    assert [block.layer for block in conversion_of(again).blocks] == [name[5:] for name in names]
    assert torch.equal(output(again, inputs), output(whole.bert, inputs))
    again.save_pretrained(tmp_path / "again")
    assert torch.equal(output(load(tmp_path / "again"), inputs), output(again, inputs))


def test_only_the_backbone_was_converted(tmp_path):
    """The config is the same object in both, so the whole model saves the conversion of its part."""
    model = hugging_face_model("bert")
    converted(model.bert, "fista")
    model.save_pretrained(tmp_path)
    inputs = hugging_face_inputs("bert")
    assert torch.equal(output(load(tmp_path), inputs), output(model, inputs))


def test_a_conversion_as_an_argument(saved, tmp_path):
    """Plain weights from one folder, the conversion from elsewhere."""
    model, _ = saved
    conversion = conversion_of(model)
    plain = revert_model(copy.deepcopy(model))
    plain.save_pretrained(tmp_path / "plain")
    again = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "plain", quantization_config=SolverPluginsConfig(conversion)
    )
    inputs = hugging_face_inputs("bert")
    assert torch.equal(output(again, inputs), output(model, inputs))
    assert torch.equal(output(load(tmp_path / "plain"), inputs), output(plain, inputs))


def test_gains_and_blends_of_today(saved, tmp_path):
    """What changes after the conversion is saved, too, by a copy of the model as well."""
    model, _ = saved
    inputs = hugging_face_inputs("bert")
    calibrate(model, [inputs], progress=False)
    set_blend(model, 0.75)
    twin = copy.deepcopy(model)
    set_blend(twin, 0.5)
    for name, one in (("model", model), ("twin", twin), ("pickled", pickle.loads(pickle.dumps(twin)))):
        one.save_pretrained(tmp_path / name)
        assert torch.equal(output(load(tmp_path / name), inputs), output(one, inputs))
    assert not torch.equal(output(model, inputs), output(twin, inputs))
    # ``save_pretrained`` has the config alone for them: a row is one short text there, not a line for each number.
    written = json.loads((tmp_path / "model" / "config.json").read_text())["quantization_config"]["conversion"]
    rows = {block["layer"]: block["gain"] for block in written["blocks"]}
    sizes = {name: 8 * len(model.get_submodule(name).channel_gain) for name in rows}
    assert all(isinstance(row, str) and len(row) < sizes[name] + 20 for name, row in rows.items())
    written["blocks"][0]["gain"] = "float32:?"
    with pytest.raises(LoadingError, match="'float32:'"):
        SolverPluginsConfig(written)
    config = copy.deepcopy(model.config)
    again = type(model).from_pretrained(tmp_path / "model", config=config)
    assert torch.equal(output(again, inputs), output(model, inputs))


def test_save_and_load(saved, tmp_path):
    model, folder = saved
    save(model, tmp_path / "ours")
    assert sorted(os.listdir(tmp_path / "ours")) == sorted([*os.listdir(folder), "README.md", NOTICE])
    with open(tmp_path / "ours" / "README.md") as card:
        assert "Without `import solver_plugins`, transformers logs an unknown quantization type" in card.read()
    with pytest.raises(SavingError, match="not empty"):
        save(model, folder)
    save(model, folder, overwrite=True)
    with pytest.raises(LoadingError, match="leave out model="):
        load(folder, model=model)


def test_what_was_calibrated_is_beside_the_config(saved, tmp_path):
    model, inputs = saved[0], hugging_face_inputs("bert")
    calibrate(model, [inputs], progress=False)
    save(model, tmp_path / "other")
    assert '"gain": [' not in (tmp_path / "other" / "config.json").read_text()
    for again in (load(tmp_path / "other"), type(model).from_pretrained(tmp_path / "other")):
        assert torch.equal(output(again, inputs), output(model, inputs))
        assert again.config.to_dict()["quantization_config"]["conversion"]["blocks"][0]["gain"]
    (tmp_path / "other" / "solver_plugins.safetensors").unlink()
    with pytest.raises(LoadingError, match=r"needs solver_plugins\.safetensors"):
        load(tmp_path / "other")


def test_tokenizers_and_image_processors_go_along(saved, tmp_path):
    model = saved[0]
    words = {
        word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "superb", "bad"])
    }
    tokenizer = transformers.BertTokenizerFast(vocab=words)
    save(model, tmp_path / "given", preprocessing=[tokenizer, transformers.ViTImageProcessor(image_mean=[0.1] * 3)])
    again = load(tmp_path / "given")
    # What it was loaded with goes along without being asked for, of a plain model, too.
    save(again, tmp_path / "along")
    save(revert_model(again), tmp_path / "plain")
    for folder in ("given", "along", "plain"):
        found = load_tokenizer(tmp_path / folder)
        assert found("superb bad")["input_ids"] == tokenizer("superb bad")["input_ids"] == [2, 5, 6, 3]
        assert transformers.AutoTokenizer.from_pretrained(tmp_path / folder)("bad")["input_ids"] == [2, 6, 3]
        assert list(transformers.AutoImageProcessor.from_pretrained(tmp_path / folder).image_mean) == [0.1] * 3
    save(model, tmp_path / "given", overwrite=True)


def test_stubs_of_tokenizers_are_refused(saved, tmp_path):
    with pytest.raises(LoadingError, match=r"Expected a tokenizer in .*vocab\.txt"):
        load_tokenizer(saved[1])
    stub = transformers.AutoTokenizer.from_pretrained(saved[1])
    with pytest.raises(SavingError, match=r"Expected a tokenizer with a vocabulary; found a .* of 5 special tokens"):
        save(saved[0], tmp_path / "other", preprocessing=stub)
    with pytest.raises(SavingError, match="Expected a tokenizer or a processor of transformers; found str"):
        save(saved[0], tmp_path / "other", preprocessing="bert")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("change, message", [
    (lambda entry: entry["conversion"].update(format=99), "format 99.*upgrade solver_plugins"),
    (lambda entry: entry.update(conversion=None), "damaged"),
    (lambda entry: entry.pop("conversion"), "hold a conversion; found none"),
    (lambda entry: entry.update(bits=4), "found bits"),
    (lambda entry: entry["conversion"]["blocks"][0].update(solver="cautious"), "'cautious'.*solver_plugins.solvers"),
    (lambda entry: entry["conversion"]["blocks"][0].update(layer="bert.nowhere"), "no bert.nowhere"),
])  # fmt: skip
def test_a_conversion_that_cannot_be_done_again(change, message, saved):
    _, folder = saved
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))
    for loader in (load, transformers.AutoModelForSequenceClassification.from_pretrained):
        with pytest.raises(LoadingError, match=message):
            loader(folder)


class Halved(nn.Module):
    """An activation of the user's."""

    def forward(self, v):
        return v / (2 + v.abs())


def test_a_conversion_without_a_written_form(tmp_path):
    """It runs; what is saved cannot be mistaken for a plain network."""
    declare_activation(Halved, Monotone(Halved()))
    model = hugging_face_model("bert")
    model.bert.pooler.activation = Halved()
    convert_model(model, "fista", iters=2, targets=["pooler.dense"])
    with pytest.raises(ConversionError, match="cannot be written down"):
        save(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    with pytest.raises(LoadingError, match=r"no written form.*cannot be written down"):
        load(tmp_path / "theirs")


def test_a_quantized_model_is_refused():
    model = hugging_face_model("bert")
    model.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    with pytest.raises(ConversionError, match="quantized with gptq"):
        convert_model(model, "fista", pattern="all")
    assert model.config.quantization_config["quant_method"] == "gptq"


def test_offloaded_weights_are_refused(saved, tmp_path):
    _, folder = saved
    parts = {"bert.embeddings": "cpu", "bert.encoder": "disk", "bert.pooler": "cpu", "classifier": "cpu"}
    with pytest.raises(LoadingError, match=r"offloaded.*device_map without 'disk'"):
        transformers.AutoModelForSequenceClassification.from_pretrained(
            folder, device_map=parts, offload_folder=tmp_path / "offload"
        )


def test_hooks_of_a_device_map_do_not_hide_the_solvers(saved):
    """A model on several devices has accelerate's hooks when the quantizer gets it."""
    model, _ = saved
    plain = revert_model(copy.deepcopy(model))
    quantizer = SolverPluginsQuantizer(SolverPluginsConfig(conversion_of(model)))
    quantizer.preprocess_model(plain)
    accelerate.dispatch_model(plain, {"": "cpu"}, force_hooks=True)
    assert any(hasattr(module, "_hf_hook") for module in plain.modules())
    again = quantizer.postprocess_model(plain)
    inputs = hugging_face_inputs("bert")
    assert torch.equal(output(again, inputs), output(model, inputs))
    assert not torch.equal(output(again, inputs), output(revert_model(model), inputs))


def test_without_this_package(saved, tmp_path):
    """Plain transformers loads the plain network, and its warning says what to import; order of imports is free."""
    model, folder = saved
    inputs = hugging_face_inputs("bert")
    solved = output(model, inputs)
    torch.save((inputs, solved, output(revert_model(model), inputs)), tmp_path / "expected.pt")
    code = f"""
import sys, torch, transformers
inputs, solved, plain = torch.load({str(tmp_path / "expected.pt")!r})
with torch.no_grad():
    made = transformers.AutoModelForSequenceClassification
    assert torch.equal(made.from_pretrained({str(folder)!r})(**inputs)[0], plain)
    assert "solver_plugins" not in sys.modules
    import solver_plugins
    model = made.from_pretrained({str(folder)!r})
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    assert torch.equal(model(**inputs)[0], solved)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    warnings = [line for line in done.stderr.splitlines() if "Unknown quantization type" in line]
    assert len(warnings) == 1
    assert f"got {QUANT_METHOD}" in warnings[0]
    assert "import solver_plugins first" in QUANT_METHOD


def test_imported_before_the_libraries():
    """``import solver_plugins`` costs neither of them, and registers with both once they come."""
    code = """
import sys, solver_plugins
assert not {"timm", "transformers", "accelerate", "datasets"} & sys.modules.keys()
import timm
assert timm.is_model("solver_plugins")
made = [type(timm.create_model(name)).__name__ for name in ("solver_lenet", "solver_alexnet")]
assert made == ["LeNet", "CifarAlexNet"]
assert "transformers" not in sys.modules
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, AUTO_QUANTIZATION_CONFIG_MAPPING
from solver_plugins.surgery.model_config import QUANT_METHOD
assert QUANT_METHOD in AUTO_QUANTIZER_MAPPING and QUANT_METHOD in AUTO_QUANTIZATION_CONFIG_MAPPING
import inspect, timm.models, transformers.quantizers.auto as auto
assert inspect.getsource(auto) and auto.__spec__.loader.exec_module.__name__ == "exec_module"
"""
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], check=True)
