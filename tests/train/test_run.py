"""Whole runs: what they train, write, count, and how they stop."""

import json
import math

import datasets
import pytest
import timm
import torch
import transformers
from accelerate import Accelerator
from safetensors.torch import save_file

import solver_plugins
from solver_plugins.errors import OptionError
from solver_plugins.integrations.models import ModelError
from solver_plugins.train import DivergedError, LaunchError, OutputError
from solver_plugins.train.data import load_splits, make_loaders
from solver_plugins.train.evaluate import evaluate
from solver_plugins.train.finetune import finetune
from solver_plugins.train.launch import end_processes, make_accelerator
from solver_plugins.train.models import build_model
from tests.train.runs import DIGITS, VIT, tiny, weights

DOUBLE = {"spec": "timm/test_vit", "args": VIT, "dtype": "float64"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    config = tiny(folder, baseline=True, epochs=2, trackers=["tensorboard"])
    return folder, config, finetune(config)


def accuracy_of(model, config):
    splits = load_splits(config.data)
    loader = make_loaders(config, splits, model, 1).eval
    right = 0
    with torch.no_grad():
        for batch in loader:
            right += int((model.eval()(batch["image"]).argmax(-1) == batch["labels"]).sum())
    return 100 * right / 37


def test_exports_are_what_was_evaluated(finished):
    folder, config, results = finished
    assert json.loads((folder / "results.json").read_text()) == results
    solver = solver_plugins.load(folder / "solver" / "model")
    assert solver_plugins.solver_report(solver).blocks
    assert accuracy_of(solver, config) == pytest.approx(results["solver"]["accuracy"])
    plain = timm.create_model(f"local-dir:{folder / 'baseline' / 'model'}", pretrained=True)
    assert accuracy_of(plain, config) == pytest.approx(results["baseline"]["accuracy"])
    # The solver's weights are those of the plain network, under the same names.
    assert timm.create_model("test_vit", num_classes=10, **VIT).load_state_dict(weights(folder))
    assert results["solver"]["count"] == 37 and results["solver"]["steps"] == 8


def test_exports_know_their_classes_and_how_images_are_prepared(tmp_path):
    """So that timm's own way to prepare an image for a loaded model is the one that it was trained with."""
    finetune(
        tiny(
            tmp_path / "run", baseline=True, model={"spec": "timm/test_resnet", "args": {"in_chans": 1}},
            solver={"name": "proxgd", "iters": 2, "pattern": "all", "targets": ["conv1"]},
            data={**DIGITS, "image_size": 24, "mean": [0.3], "std": [0.2]},
        )
    )  # fmt: skip
    folder = tmp_path / "run"
    for model in (
        solver_plugins.load(folder / "solver" / "model"),
        timm.create_model(f"local-dir:{folder / 'solver' / 'model'}", pretrained=True),
        timm.create_model(f"local-dir:{folder / 'baseline' / 'model'}", pretrained=True),
    ):
        data = timm.data.resolve_model_data_config(model)
        assert tuple(data["input_size"]) == (1, 24, 24) and data["crop_pct"] == 1.0
        assert (tuple(data["mean"]), tuple(data["std"])) == ((0.3,), (0.2,))
        assert model.pretrained_cfg["label_names"] == [str(digit) for digit in range(10)]


def test_rows_report_and_tracker(finished):
    folder, _, results = finished
    rows = [json.loads(line) for line in (folder / "solver" / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2] and rows[-1]["step"] == 8
    assert rows[-1]["eval_accuracy"] == results["solver"]["accuracy"]
    assert all(block["L"] > 0 and block["residual"] >= 0 for block in rows[-1]["blocks"].values())
    assert list((folder / "logs").rglob("events.out.tfevents*"))
    report = (folder / "report.html").read_text()
    assert report.count("data:image/png;base64,") == 4 and "http" not in report
    assert f"{results['baseline']['accuracy']:.2f}" in report and "proxgd" in report
    assert len(list((folder / "solver" / "checkpoints").iterdir())) == 2


def test_output_folders(finished, tmp_path):
    folder, config, _ = finished
    with pytest.raises(OutputError, match=r"--resume.*--overwrite"):
        finetune(config)
    with pytest.raises(OutputError, match=r"seed was 0 and is now 1"):
        finetune(tiny(folder, baseline=True, epochs=2, seed=1), resume=True)
    (tmp_path / "letters.txt").write_text("dear")
    with pytest.raises(OutputError, match=r"holds letters.txt, which is not a run"):
        finetune(tiny(tmp_path), overwrite=True)
    assert (tmp_path / "letters.txt").read_text() == "dear"


def test_overwrite_starts_anew_and_gives_the_same(tmp_path):
    config = tiny(
        tmp_path / "run",
        solver={"name": "proxsg", "iters": 2, "p": 0.3, "targets": ["head"], "args": {"eval_mode": "stochastic"}},
        trials=3,
    )
    first = finetune(config)
    before = weights(tmp_path / "run")
    second = finetune(config, overwrite=True)
    assert all(torch.equal(value, before[name]) for name, value in weights(tmp_path / "run").items())
    assert first["solver"]["accuracy"] == second["solver"]["accuracy"] and first["solver"]["trials"] == 3


def test_accumulation_is_the_larger_batch(tmp_path):
    for count in (1, 4):
        finetune(tiny(tmp_path / str(count), model=DOUBLE, accumulation=count))
    one, four = weights(tmp_path / "1"), weights(tmp_path / "4")
    assert all(torch.allclose(one[name], four[name], rtol=0, atol=1e-11) for name in one)


def test_bf16_trains(tmp_path):
    results = finetune(tiny(tmp_path / "run", precision="bf16", epochs=4, optimizer={"lr": 3e-3}))
    rows = [json.loads(line) for line in (tmp_path / "run" / "solver" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["train_loss"] < rows[0]["train_loss"] and math.isfinite(results["solver"]["loss"])


def test_loss_that_is_not_finite_stops_the_run(tmp_path):
    config = tiny(
        tmp_path / "run", optimizer={"opt": "sgd", "lr": 1e25, "args": {"nesterov": False}}, checkpoints={"every": 1}
    )
    with pytest.raises(DivergedError, match=r"at step \d+ .*worst block is 'blocks.0.mlp.fc1'.*checkpoint is kept"):
        finetune(config)
    assert list((tmp_path / "run" / "solver" / "checkpoints").glob("step-*"))


def test_calibrate_refresh_and_solver_options(tmp_path):
    config = tiny(
        tmp_path / "run",
        refresh=2,
        solver={"name": "fista", "iters": 2, "args": {"lam": 0.01}, "calibrate": 2},
    )
    finetune(config)
    model = solver_plugins.load(tmp_path / "run" / "solver" / "model")
    (block,) = (module for module in model.modules() if isinstance(module, solver_plugins.SolverLinear))
    assert block.channel_gain is not None and block.solver.config.lam == 0.01


def test_plain_model_alone(tmp_path):
    assert list(finetune(tiny(tmp_path / "run", solver=None))) == ["plain"]


@pytest.mark.parametrize("in_order", [False, True])
def test_own_weights_of_other_classes(tmp_path, in_order):
    source = timm.create_model("test_vit", num_classes=7, **VIT)
    state = {(f"other.{name}" if in_order else name): value for name, value in source.state_dict().items()}
    torch.save(state, tmp_path / "weights.pt")
    model = {"spec": "timm/test_vit", "args": VIT, "weights": str(tmp_path / "weights.pt"), "in_order": in_order}
    config = tiny(tmp_path / "run", model=model)
    built = build_model(config, load_splits(config.data))
    assert torch.equal(built.blocks[0].mlp.fc1.weight, source.blocks[0].mlp.fc1.weight)
    assert built.head.out_features == 10


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"spec": "timm/test_vit", "args": {**VIT, "num_classes": 3}}, "asks for 3 classes; the data has 10"),
        ({"spec": "timm/test_vitt"}, "Did you mean"),
        ({"spec": "hf/./none"}, "Looked for the folder"),
        ({"spec": "timm/test_vit", "args": VIT, "weights": "WEIGHTS"}, "model.in_order=true"),
    ],
)
def test_models_that_cannot_be_built(tmp_path, model, message):
    save_file({"a.weight": torch.zeros(10, 2)}, tmp_path / "w.safetensors")
    if model.get("weights"):
        model = {**model, "weights": str(tmp_path / "w.safetensors")}
    with pytest.raises(ModelError) as error:
        finetune(tiny(tmp_path / "run", model=model))
    assert message in str(error.value)


def test_optimizers_that_cannot_be_made(tmp_path):
    with pytest.raises(OptionError, match="optimizer 'adamm'"):
        finetune(tiny(tmp_path / "run", optimizer={"opt": "adamm"}))


def test_processes_that_do_not_know_of_each_other(tmp_path, environment):
    Accelerator(cpu=True)
    environment["WORLD_SIZE"] = "2"
    with pytest.raises(LaunchError, match="2 processes were started, but this one believes it is one of 1"):
        finetune(tiny(tmp_path / "run"))
    with pytest.raises(LaunchError, match=r"cannot find each other.*unset WORLD_SIZE"):
        finetune(tiny(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_evaluation_leaves_mode_and_random_numbers_alone(tmp_path):
    config = tiny(tmp_path)
    splits = load_splits(config.data)
    model = build_model(config, splits).train()
    accelerator: Accelerator = make_accelerator(config)
    try:
        loader = accelerator.prepare(make_loaders(config, splits, model, 1).eval)
        before = torch.get_rng_state()
        found = evaluate(accelerator, model, loader, torch.float32, (0,), 5)
    finally:
        end_processes(accelerator)
    assert model.training and torch.equal(torch.get_rng_state(), before)
    assert found.count == 37 and found.trials == 1 and found.spread == 0
    assert found.accuracy == pytest.approx(accuracy_of(model, config))


def small_text_model(folder):
    """Writes a BERT of nine words; returns the section of a config that names it."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "very", "film"]
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    settings = transformers.BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16, hidden_act="relu",
    )  # fmt: skip
    transformers.BertForMaskedLM(settings).save_pretrained(folder)
    return {"spec": f"hf/{folder}"}


def test_texts(tmp_path):
    model = small_text_model(tmp_path / "model")
    texts = ["very good film", "bad film", "good", "very very bad film"] * 8
    rows = datasets.Dataset.from_dict({"sentence": texts, "label": [name.count("good") for name in texts]})
    datasets.DatasetDict(train=rows, test=rows.select(range(7))).save_to_disk(tmp_path / "data")
    config = tiny(
        tmp_path / "run",
        model=model,
        data={"name": str(tmp_path / "data"), "text": "sentence"},
        epochs=12,
        optimizer={"lr": 1e-2},
        baseline=True,
        batch_size=8,
    )
    results = finetune(config)
    assert results["solver"]["accuracy"] == 100 and results["baseline"]["accuracy"] == 100
    assert solver_plugins.solver_report(solver_plugins.load(tmp_path / "run" / "solver" / "model")).blocks
    transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "baseline" / "model")
