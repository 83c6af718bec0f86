"""timm models through save, load and timm's own local-dir."""

import copy
import json
import subprocess
import sys

import pytest
import timm
import torch
from torch import nn

from solver_plugins import calibrate, conversion_of, convert_model, load, refresh_steps, revert_model, save
from solver_plugins.errors import SolverPluginsWarning
from solver_plugins.integrations import LoadingError, SavingError
from solver_plugins.integrations.timm import ARCHITECTURE
from tests.integrations.cases import SOLVERS, TARGETS, TIMM, converted, timm_input, timm_model


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", TIMM)
def test_round_trip(name, solver, tmp_path):
    """Loaded by us or by timm, the model computes the same bits, and is the same conversion."""
    model = timm_model(name)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:  # statistics that are not those of a new model
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    converted(model, solver, targets=TARGETS[name])
    x = timm_input(model)
    save(model, tmp_path / "saved")
    expected = model(x)
    for again in (load(tmp_path / "saved"), timm.create_model(f"local-dir:{tmp_path}/saved", pretrained=True).eval()):
        assert torch.equal(again(x), expected)
        assert conversion_of(again).to_json() == conversion_of(model).to_json()
        save(again, tmp_path / "saved", overwrite=True)  # what it was created with is remembered
    plain = revert_model(load(tmp_path / "saved"))
    assert torch.equal(plain(x), revert_model(model)(x))


def test_dropout_rates_survive(tmp_path):
    """A rate is in no state dict: one that is not taken over by a solver must come back, too."""
    model = timm_model("test_vit", attn_drop_rate=0.25)
    convert_model(model, "fista", targets=["blocks.0.mlp.fc1"], pattern="all", iters=2)
    with pytest.raises(SavingError, match=r"attn_drop: p is 0.25 in the model, 0.0 as built(.|\n)*model_args="):
        save(model, tmp_path / "saved")
    assert not list(tmp_path.iterdir())
    save(model, tmp_path / "saved", model_args={**TIMM["test_vit"], "attn_drop_rate": 0.25})
    again = load(tmp_path / "saved")
    assert again.blocks[0].attn.attn_drop.p == 0.25
    assert again.head_drop.p == 0.1
    torch.manual_seed(0)
    x = timm_input(model)
    torch.manual_seed(1)
    expected = model.train()(x)
    torch.manual_seed(1)
    assert torch.equal(again.train()(x), expected)


def test_weights_stay_plain(tmp_path):
    """Plain timm, in a process without this package, loads the weights; the folder itself it refuses with a hint."""
    model = converted(timm_model("test_byobnet"), "proxgd", targets=TARGETS["test_byobnet"])
    x = timm_input(model)
    save(model, tmp_path / "saved")
    torch.save((x, revert_model(model)(x)), tmp_path / "expected.pt")
    code = f"""
import sys, timm, torch
x, expected = torch.load({str(tmp_path / "expected.pt")!r})
model = timm.create_model("test_byobnet", num_classes=7, checkpoint_path={str(tmp_path / "saved/model.safetensors")!r})
assert torch.equal(model.eval()(x), expected)
try:
    timm.create_model("local-dir:" + {str(tmp_path / "saved")!r}, pretrained=True)
except RuntimeError as error:
    assert "Unknown model (solver_plugins.integrations.timm must be imported first)" in str(error), error
else:
    raise AssertionError("loaded")
assert "solver_plugins" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_new_head(tmp_path):
    """Finetuning a converted backbone: timm leaves out the old classifier; the solvers of the backbone stay."""
    model = converted(timm_model("test_byobnet"), "proxgd", targets=TARGETS["test_byobnet"])
    save(model, tmp_path / "saved")
    again = timm.create_model(f"local-dir:{tmp_path}/saved", pretrained=True, num_classes=3)
    assert again(timm_input(model)).shape == (2, 3)
    assert {block.layer for block in conversion_of(again).blocks} == {b.layer for b in conversion_of(model).blocks}
    name, weight = next((n, p) for n, p in model.named_parameters() if p.dim() == 4)
    assert torch.equal(weight, again.get_parameter(name))


def test_dtype(tmp_path):
    model = converted(timm_model("test_vit"), "fista", targets=["blocks.0.mlp.fc1"]).bfloat16()
    x = timm_input(model).bfloat16()
    refresh_steps(model)  # those of the weights as they are now, rounded
    save(model, tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert torch.equal(again(x), model(x))
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}


def test_after_a_changed_classifier(tmp_path):
    model = timm_model("test_byobnet")
    model.reset_classifier(11)
    save(converted(model, "proxgd"), tmp_path / "saved")
    assert load(tmp_path / "saved")(timm_input(model)).shape == (2, 11)


def test_a_changed_model_is_refused(tmp_path):
    model = timm_model("test_byobnet")
    model.head.fc = nn.Sequential(nn.Linear(model.num_features, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    converted(model, "proxgd")
    with pytest.raises(SavingError, match=r"head.fc: a Sequential in the model, a Linear as built(.|\n)*kind='torch'"):
        save(model, tmp_path / "saved")
    save(model, tmp_path / "saved", kind="torch")
    other = timm_model("test_byobnet")
    other.head.fc = nn.Sequential(nn.Linear(model.num_features, 8), nn.ReLU(), nn.Linear(8, 2))
    x = timm_input(model)
    assert torch.equal(load(tmp_path / "saved", model=other)(x), model(x))


def test_bad_input(tmp_path):
    model = converted(timm_model("test_byobnet"), "proxgd", targets=TARGETS["test_byobnet"])
    with pytest.raises(SavingError, match=r"act_layer=<class .*cannot be written as JSON.*by their names"):
        save(model, tmp_path / "saved", model_args={"act_layer": nn.ReLU})
    with pytest.raises(SavingError, match="unexpected keyword argument 'droprate'"):
        save(model, tmp_path / "saved", model_args={"droprate": 0.5})
    assert not list(tmp_path.iterdir())
    with pytest.raises(LoadingError, match="stands for saved converted models"):
        timm.create_model("solver_plugins")


def test_plain_models(tmp_path):
    """Saved by us or by timm, they are loaded by us and by timm."""
    plain = timm_model("test_byobnet")
    x = timm_input(plain)
    save(plain, tmp_path / "ours")
    timm.models.save_for_hf(plain, tmp_path / "timm", safe_serialization=True)
    for folder in ("ours", "timm"):
        again = load(tmp_path / folder)
        assert type(again) is type(plain) and torch.equal(again(x), plain(x))
        other = timm.create_model(f"local-dir:{tmp_path / folder}", pretrained=True).eval()
        assert torch.equal(other(x), plain(x))
    assert "nothing of `solver_plugins` is needed" in (tmp_path / "ours" / "README.md").read_text()
    save(timm.create_model("solver_lenet"), tmp_path / "lenet")
    card = (tmp_path / "lenet" / "README.md").read_text()
    assert "import solver_plugins  # for its architecture\n" in card and "nothing of" not in card
    # A converted model whose conversion was lost is not a plain one.
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    config["architecture"] = ARCHITECTURE
    (tmp_path / "ours" / "config.json").write_text(json.dumps(config))
    with pytest.raises(LoadingError, match="was a converted timm model"):
        load(tmp_path / "ours")


@pytest.mark.skipif(not hasattr(timm.create_model("test_byobnet"), "_model_args"), reason="timm before 1.0.31")
def test_timm_does_not_save_the_plain_network_in_place_of_a_converted_one(tmp_path):
    model = converted(timm_model("test_byobnet"), "proxgd", targets=TARGETS["test_byobnet"])
    for one in (model, copy.deepcopy(model)):
        with pytest.raises(ValueError, match=r"solver_plugins\.save\(model, folder\)"):
            timm.models.save_for_hf(one, tmp_path / "saved", safe_serialization=True)
    with pytest.raises(FileNotFoundError):
        timm.create_model(f"local-dir:{tmp_path / 'saved'}", pretrained=True)
    timm.models.save_for_hf(revert_model(model), tmp_path / "reverted", safe_serialization=True)


def test_what_was_calibrated_is_beside_the_config(tmp_path):
    model = converted(timm_model("test_vit"), "proxgd", targets=TARGETS["test_vit"])
    x = timm_input(model, 8)
    calibrate(model, [x], progress=False)
    save(model, tmp_path / "saved")
    assert (tmp_path / "saved" / "config.json").stat().st_size < 8000
    for again in (load(tmp_path / "saved"), timm.create_model(f"local-dir:{tmp_path / 'saved'}", pretrained=True)):
        assert torch.equal(again.eval()(x), model(x))
    (tmp_path / "saved" / "solver_plugins.safetensors").unlink()
    with pytest.raises(LoadingError, match=r"needs solver_plugins\.safetensors"):
        load(tmp_path / "saved")


@pytest.mark.parametrize("change, message", [
    (lambda entry: entry["conversion"].update(format=99), "format 99.*upgrade solver_plugins"),
    (lambda entry: entry["conversion"].pop("blocks"), "blocks"),
    (lambda entry: entry["conversion"]["blocks"][0].update(solver="cautious"), "'cautious'.*solver_plugins.solvers"),
    (lambda entry: entry["conversion"]["spec"].update(solver="cautious"), "'cautious'.*solver_plugins.solvers"),
    (lambda entry: entry["conversion"].update(format=1), "format 1.*convert the plain model again"),
    (lambda entry: entry["conversion"]["blocks"][0].update(prior="nothing"), "'nothing'.*solver_plugins.priors"),
    (lambda entry: entry["conversion"]["blocks"][0].update(layer="head.nowhere"), "no head.nowhere"),
])  # fmt: skip
def test_a_conversion_that_cannot_be_done_again(change, message, tmp_path):
    """Never a plain network in its place, neither from us nor from timm."""
    save(converted(timm_model("test_byobnet"), "proxgd", targets=TARGETS["test_byobnet"]), tmp_path / "saved")
    file = tmp_path / "saved" / "config.json"
    config = json.loads(file.read_text())
    change(config["model_args"]["converted"])
    file.write_text(json.dumps(config))
    with pytest.raises(LoadingError, match=message):
        load(tmp_path / "saved")
    with pytest.raises(LoadingError, match=message):
        timm.create_model(f"local-dir:{tmp_path}/saved", pretrained=True)


def test_timm_without_pretrained_has_random_weights_and_says_so(tmp_path):
    model = converted(timm_model("test_byobnet"), "proxgd", targets=TARGETS["test_byobnet"])
    save(model, tmp_path / "saved")
    with pytest.warns(SolverPluginsWarning, match=r"gets random weights.*pass pretrained=True"):
        again = timm.create_model(f"local-dir:{tmp_path}/saved")
    assert conversion_of(again).blocks and not torch.equal(again.stem.conv.weight, model.stem.conv.weight)
