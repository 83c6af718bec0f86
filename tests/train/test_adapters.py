"""Adapters of PEFT in a run: trained beside solvers, resumed, exported merged and apart, or refused."""

import json
import shutil
import sys

import peft
import pytest
import torch
from safetensors.torch import load_file

from solver_plugins import load, predict
from solver_plugins.blocks import blocks_of, gates_of, set_blend
from solver_plugins.errors import OptionError
from solver_plugins.integrations import LoadingError
from solver_plugins.train import FinetuneConfig
from solver_plugins.train.arms import make_arm
from solver_plugins.train.data import load_splits
from solver_plugins.train.evaluate import evaluate
from solver_plugins.train.finetune import finetune
from solver_plugins.train.launch import Alone
from solver_plugins.train.plan import plan_run
from tests.train.runs import options, tiny, weights
from tests.train.test_run import small_text_model

# PEFT 0.21 asks transformers by a name that transformers 5.23 has given up.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

RATE = {"optimizer": {"lr": 0.01}}
SOLVERS = {"name": "proxgd", "iters": 3, "pattern": "all", "gate": "channel"}
LORA = {"target_modules": ["qkv", "fc1"], "r": 2, "lora_alpha": 4}


def loss_of(model, config):
    """The mean loss on the evaluated split, by an evaluation of its own."""
    splits = load_splits(config.data)
    _, loaders = make_arm(config, splits, "baseline", 1)
    return evaluate(Alone(), model, loaders.eval, torch.float32, (config.seed,), 1).loss


def test_a_plain_model_trains_its_adapters_and_its_classifier(tmp_path):
    config = tiny(tmp_path / "run", solver=None, peft=LORA, epochs=2, **RATE)
    result = finetune(config)["plain"]
    start = make_arm(config, load_splits(config.data), "plain", 1)[0].state_dict()
    merged = weights(tmp_path / "run", "plain")
    moved = {name for name, value in merged.items() if not torch.equal(value, start[name])}
    assert moved == {f"{name}.weight" for name in ("head", "blocks.0.attn.qkv", "blocks.0.mlp.fc1")} | {"head.bias"}
    change = merged["blocks.0.attn.qkv.weight"] - start["blocks.0.attn.qkv.weight"]
    assert torch.linalg.matrix_rank(change, rtol=1e-4) == 2
    assert loss_of(load(result["model"]), config) == pytest.approx(result["loss"], rel=1e-5)
    # The folder of the adapter is one of PEFT, for the model that anyone builds.
    base = make_arm(config, load_splits(config.data), "plain", 1)[0]
    adapted = peft.PeftModel.from_pretrained(base, result["adapter"])
    assert loss_of(adapted.eval(), config) == pytest.approx(result["loss"], rel=1e-5)


def test_adapters_and_solvers_train_together(tmp_path):
    config = tiny(
        tmp_path / "run", solver=SOLVERS, peft={**LORA, "merge": False}, epochs=2, ema={"decay": 0.5},
        best={"metric": "loss"}, **RATE,
    )  # fmt: skip
    result = finetune(config)["solver"]
    base = load(result["model"])
    assert (tmp_path / "run" / "solver" / "base").samefile(result["model"]) and len(blocks_of(base)) == 6
    # Gates of adapted layers and of others have opened; what solvers add is there.
    assert all(bool(gate.any()) for gate in gates_of(base).values())
    start = make_arm(config, load_splits(config.data), "solver", 1)[0].state_dict()
    kept = load_file(f"{result['model']}/model.safetensors")
    moved = {name for name, value in kept.items() if not torch.equal(value, start[name])}
    assert moved <= {"head.weight", "head.bias"}
    plain_loss = loss_of(base, config)
    adapted = peft.PeftModel.from_pretrained(base, result["adapter"]).eval()
    assert loss_of(adapted, config) == pytest.approx(result["loss"], rel=1e-5) != pytest.approx(plain_loss, rel=1e-5)


@pytest.mark.parametrize("changes", [
    {"solver": {"name": "proxsg", "iters": 2, "targets": ["fc1"], "p": 0.5}, "peft": {**LORA, "merge": False}},
    {"solver": None, "peft": {**LORA, "lora_dropout": 0.3}},
])  # fmt: skip
def test_resumed_is_the_same_run(tmp_path, changes):
    """All checkpoints but one in the middle of the first epoch are lost."""
    config = tiny(tmp_path / "whole", epochs=2, checkpoints={"every": 1, "keep": 9}, **RATE, **changes)
    ((name, result),) = finetune(config).items()
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    place = tmp_path / "killed" / name
    for path in (place / "checkpoints").iterdir():
        if path.name != "step-00000003":
            shutil.rmtree(path)
    for path in (place / "result.json", place / "adapter", place / "model", place / "base"):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    killed = config.model_copy(update={"output": str(tmp_path / "killed")})
    (tmp_path / "killed" / "config.yaml").write_text(killed.to_yaml())
    resumed = finetune(killed, resume=True)[name]
    assert resumed["loss"] == result["loss"]
    for part in ("adapter/adapter_model", "model/model", "base/model"):
        file = tmp_path / "whole" / name / f"{part}.safetensors"
        if file.is_file():
            one, other = load_file(file), load_file(place / f"{part}.safetensors")
            assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("name", ["loha", "lokr", "ia3"])
def test_other_methods_run_the_solver_inside(tmp_path, name):
    own = {"feedforward_modules": []} if name == "ia3" else {"r": 2}
    section = {"name": name, "target_modules": ["qkv", "fc1"], "merge": False, **own}
    config = tiny(tmp_path / "run", solver={**SOLVERS, "gate": None}, peft=section, epochs=2, **RATE)
    result = finetune(config)["solver"]
    adapted = peft.PeftModel.from_pretrained(load(result["model"]), result["adapter"]).eval()
    assert loss_of(adapted, config) == pytest.approx(result["loss"], rel=1e-5)
    set_blend(adapted, 0.0)
    assert loss_of(adapted, config) != pytest.approx(result["loss"], rel=1e-5)


def test_a_model_of_transformers(tmp_path):
    """PEFT knows BERT's layers; the exported model says its classes, and predicts without PEFT."""
    import datasets

    texts = ["very good film", "bad film", "good", "very very bad film"] * 4
    datasets.Dataset.from_dict({"text": texts, "label": [1, 0, 1, 0] * 4}).to_parquet(tmp_path / "texts.parquet")
    config = FinetuneConfig.parse({
        **options(tmp_path / "run", solver={"name": "proxgd", "iters": 2, "targets": ["intermediate.dense"]}),
        "model": {"spec": small_text_model(tmp_path / "model")["spec"]}, "peft": {"r": 2}, "epochs": 2, "batch_size": 4,
        "data": {"name": str(tmp_path / "texts.parquet"), "text": "text", "eval": "train"}, **RATE,
    })  # fmt: skip
    assert any(line.startswith("peft: lora on 2 layers, and all of classifier") for line in plan_run(config).lines)
    result = finetune(config)["solver"]
    answers = [int(one.label) for one in predict(result["model"], texts)]
    right = [one == other for one, other in zip(answers, [1, 0, 1, 0] * 4, strict=True)]
    assert 100 * sum(right) / 16 == pytest.approx(result["accuracy"])
    told = json.loads((tmp_path / "run" / "solver" / "adapter" / "adapter_config.json").read_text())
    assert told["modules_to_save"] == ["classifier"]


def test_predictions_of_an_adapter_beside_its_base(tmp_path):
    from tests.train.test_everyday import photos

    place = photos(tmp_path / "photos", count=6)
    config = tiny(
        tmp_path / "run", model={"spec": "timm/test_vit"}, data={"name": str(place)}, batch_size=4, epochs=2, **RATE,
        solver=SOLVERS, peft={**LORA, "merge": False},
    )  # fmt: skip
    result = finetune(config)["solver"]
    found = predict(result["adapter"], place / "test")
    right = [one.label == one.source.split("/")[-2] for one in found]
    assert 100 * sum(right) / len(right) == pytest.approx(result["accuracy"])
    shutil.rmtree(result["model"])
    with pytest.raises(LoadingError, match="no base beside them"):
        predict(result["adapter"], place / "test")


@pytest.mark.parametrize(("changes", "message"), [
    ({"peft": {"target_modules": ["qkv"], "rank": 4}}, r"no option 'rank' \(peft\). PEFT calls it 'r'"),
    ({"peft": {"target_modules": ["qkv"], "lora_alfa": 4}}, "Did you mean 'lora_alpha'"),
    ({"peft": {"target_modules": ["qkw"]}}, "PEFT cannot put lora on.*Did you mean 'qkv'"),
    ({"peft": {}}, "target_modules=all-linear"),
    ({"peft": {"target_modules": ["qkv"], "r": 0}}, "should be a positive integer"),
    ({"peft": {"target_modules": ["qkv"], "init_lora_weights": "pissa"}}, "changes the weights of the base"),
    ({"peft": LORA, "solver": SOLVERS}, "solvers of several iterations, such as 'blocks.0.attn.qkv'.*merge=false"),
    ({"peft": {**LORA, "use_dora": True, "merge": False}, "solver": SOLVERS}, "would leave the solver out"),
])  # fmt: skip
def test_adapters_that_do_not_fit(tmp_path, changes, message):
    config = tiny(tmp_path / "run", **{"solver": None, **changes})
    for run in (plan_run, finetune):
        with pytest.raises(OptionError, match=message):
            run(config)
    assert not (tmp_path / "run").exists()


def test_peft_is_an_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(OptionError, match=r"pip install 'solver-plugins\[peft\]'"):
        plan_run(tiny(tmp_path / "run", solver=None, peft=LORA))
