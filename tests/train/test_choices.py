"""What a config can choose beside solvers: which weights are kept, what is trained, measured and repeated."""

import json
from types import SimpleNamespace

import datasets
import numpy
import pytest
import torch
from safetensors.torch import load_file
from sklearn.metrics import f1_score, top_k_accuracy_score
from torch import nn

from solver_plugins.errors import OptionError
from solver_plugins.surgery.errors import TargetError
from solver_plugins.train import DataError, FinetuneConfig, LaunchError
from solver_plugins.train.best import BestWeights
from solver_plugins.train.config import DataSection
from solver_plugins.train.data import load_splits
from solver_plugins.train.finetune import finetune, flat_options
from solver_plugins.train.launch import end_processes, make_accelerator
from solver_plugins.train.metrics import BINS, measure
from solver_plugins.train.sections import BestSection
from solver_plugins.train.seeds import differences_of, finetune_seeds
from solver_plugins.train.trainable import Trainable
from tests.train.runs import DIGITS, options, tiny, weights


def test_measures_against_scikit_learn():
    generator = numpy.random.default_rng(0)
    scores = generator.random((200, 7))
    scores /= scores.sum(1, keepdims=True)
    labels = generator.integers(0, 6, 200)  # Class 6 never occurs.
    answers, confidence = scores.argmax(1), scores.max(1)
    in_top5 = numpy.array([label in row.argsort()[-5:] for label, row in zip(labels, scores, strict=True)])
    found, per_class = measure(labels, answers, confidence, in_top5, 7)
    assert found["accuracy"] == pytest.approx(100 * (labels == answers).mean())
    assert found["macro_f1"] == pytest.approx(100 * f1_score(labels, answers, average="macro"))
    assert found["top5"] == pytest.approx(100 * top_k_accuracy_score(labels, scores, k=5, labels=range(7)))
    assert per_class[6] is None
    assert per_class[2] == pytest.approx(100 * (answers[labels == 2] == 2).mean())
    expected = 0.0
    for low in range(BINS):
        inside = (confidence >= low / BINS) & (confidence < (low + 1) / BINS)
        if inside.any():
            expected += inside.mean() * abs(confidence[inside].mean() - (labels == answers)[inside].mean())
    assert found["ece"] == pytest.approx(100 * expected)


def test_the_best_epoch_is_exported(tmp_path):
    """A rate that grows too large: the last epoch is worse than an earlier one."""
    config = tiny(
        tmp_path / "run", epochs=6, optimizer={"opt": "sgd", "lr": 0.6, "args": {"nesterov": False}}, solver=None,
        best={"metric": "loss"}, checkpoints={"keep": 1},
    )  # fmt: skip
    result = finetune(config)["plain"]
    rows = [json.loads(line) for line in (tmp_path / "run" / "plain" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["eval_loss"] for row in rows]
    assert result["epoch"] == 1 + losses.index(min(losses)) < 6
    assert result["loss"] == min(losses)
    kept = load_file(tmp_path / "run" / "plain" / "best.safetensors")
    assert all(torch.equal(value, kept[name]) for name, value in weights(tmp_path / "run", "plain").items())
    stopped = finetune(config.model_copy(update={"best": BestSection(metric="loss", patience=1)}), overwrite=True)
    assert stopped["plain"]["steps"] < 24 and stopped["plain"]["loss"] <= losses[0]


def test_best_compares_as_its_metric_says():
    rows = [{"epoch": 1, "eval_accuracy": 3.0, "eval_ece": 5.0, "eval_top5": None},
            {"epoch": 2, "eval_accuracy": 4.0, "eval_ece": 6.0, "eval_top5": None},
            {"epoch": 3, "eval_accuracy": 4.0, "eval_ece": 5.5, "eval_top5": None}]  # fmt: skip

    def best(metric):
        return BestWeights(BestSection(metric=metric), None, SimpleNamespace(distributed_type="NO")).epoch(rows)

    assert (best("accuracy"), best("ece"), best(None)) == (2, 1, 2)
    rows[0]["eval_loss"], rows[1]["eval_loss"], rows[2]["eval_loss"] = float("nan"), 2.0, 1.0
    assert best("loss") == 3
    with pytest.raises(OptionError, match="top5"):
        best("top5")


def test_a_linear_probe_trains_the_head_alone(tmp_path):
    config = tiny(tmp_path / "run", solver=None, train=["head"], epochs=2)
    finetune(config)
    trained = weights(tmp_path / "run", "plain")
    first = tiny(tmp_path / "once", solver=None, epochs=1, train=["head"], optimizer={"lr": 1e-30, "weight_decay": 0.0})
    finetune(first)
    start = weights(tmp_path / "once", "plain")
    moved = {name for name, value in trained.items() if not torch.equal(value, start[name])}
    assert moved == {"head.weight", "head.bias"}


def test_layers_thaw_when_they_are_told_to():
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, 2))
    config = FinetuneConfig.parse(options("x", freeze=["0", "1"], unfreeze={3: "1", 4: ".*"}, solver=None, epochs=5))
    chosen = Trainable(config, model)
    for epoch, expected in ((1, {"3.weight", "3.bias"}), (3, {"3.weight", "3.bias", "1.weight", "1.bias"})):
        model.train()
        chosen.start(epoch)
        assert {name for name, one in model.named_parameters() if one.requires_grad} == expected
        assert model[1].training == (epoch == 3)
    assert len(chosen.at(4)) == 6 and "from epoch 4" in chosen.describe()
    with pytest.raises(TargetError, match="freeze: 'hed' matches no layer"):
        Trainable(FinetuneConfig.parse(options("x", freeze=["hed"])), model)
    with pytest.raises(TargetError, match="at least one layer"):
        Trainable(FinetuneConfig.parse(options("x", freeze=".*")), model)


def test_thawing_changes_frozen_layers_only_from_their_epoch_on(tmp_path):
    common = {"solver": None, "freeze": r"blocks.*", "optimizer": {"opt": "sgd", "lr": 0.1}}
    finetune(tiny(tmp_path / "a", epochs=1, **common))
    finetune(tiny(tmp_path / "b", epochs=2, unfreeze={2: r"blocks\.0\.mlp.*"}, **common))
    before, after = weights(tmp_path / "a", "plain"), weights(tmp_path / "b", "plain")
    assert not torch.equal(before["blocks.0.mlp.fc1.weight"], after["blocks.0.mlp.fc1.weight"])
    assert torch.equal(before["blocks.0.attn.qkv.weight"], after["blocks.0.attn.qkv.weight"])


def test_a_share_of_the_training_split_is_evaluated():
    rows = {"image": [[0]] * 50, "label": [0] * 40 + [1] * 10}
    from solver_plugins.train.data import _divided

    found = datasets.Dataset.from_dict({**rows, "number": list(range(50))})
    train, held = _divided(found, found["label"], 0.2)
    assert sorted(held["label"]) == [0] * 8 + [1] * 2 and not set(train["number"]) & set(held["number"])
    assert len(train) == 40 and held["number"] == _divided(found, found["label"], 0.2)[1]["number"]
    splits = load_splits(DataSection(eval=0.1))
    assert len(splits.eval) + len(splits.train) == 1437
    with pytest.raises(DataError, match="single example"):
        _divided(found.select([0, 45]), [0, 1], 0.5)
    with pytest.raises(OptionError, match="less than 1"):
        DataSection.parse({"eval": 1.5})


def test_class_weights(tmp_path):
    splits = load_splits(DataSection(**DIGITS))
    found = splits.weights("balanced")
    counts = numpy.bincount(splits.train["label"])
    assert found.mean() == pytest.approx(1) and torch.allclose(found * torch.tensor(counts), found[0] * counts[0])
    with pytest.raises(DataError, match="Expected 10 class_weights"):
        splits.weights([1.0])
    one = finetune(tiny(tmp_path / "one", solver=None))["plain"]
    other = finetune(tiny(tmp_path / "other", solver=None, class_weights=[100.0] + [0.01] * 9))["plain"]
    assert other["per_class"][0] == 100 and one["loss"] != other["loss"]


def test_seeds_are_runs_of_their_own(tmp_path):
    changed = options(tmp_path / "run", baseline=True, data={**DIGITS, "train": "train[:32]"})
    config = FinetuneConfig.parse({**changed, "seeds": [0, 3]})
    found = finetune_seeds(config)
    alone = finetune(FinetuneConfig.parse({**changed, "seed": 3, "output": str(tmp_path / "alone")}))
    assert found["seeds"]["3"]["solver"]["loss"] == alone["solver"]["loss"]
    pairs = [found["seeds"][seed]["solver"]["loss"] - found["seeds"][seed]["baseline"]["loss"] for seed in ("0", "3")]
    assert found["differences"]["loss"][0] == pytest.approx(numpy.mean(pairs))
    assert found["differences"]["loss"][1] == pytest.approx(numpy.std(pairs, ddof=1) / 2**0.5)
    assert json.loads((tmp_path / "run" / "results.json").read_text())["summary"]["solver"]["loss"]
    assert "seed-3/report.html" in (tmp_path / "run" / "report.html").read_text()
    again = finetune_seeds(config, resume=True)
    assert again["seeds"] == found["seeds"]
    assert differences_of({"0": {"plain": {}}}) == {}


def test_memory_options_change_no_result(tmp_path):
    plain = finetune(tiny(tmp_path / "plain"))
    less = finetune(tiny(tmp_path / "less", gradient_checkpointing=True, channels_last=True))
    assert less["solver"]["loss"] == pytest.approx(plain["solver"]["loss"], rel=1e-5)


@pytest.mark.slow
def test_a_compiled_run_gives_the_same(tmp_path):
    plain, compiled = (finetune(tiny(tmp_path / str(how), compile=how)) for how in (False, True))
    assert compiled["solver"]["loss"] == pytest.approx(plain["solver"]["loss"], rel=1e-3)


@pytest.mark.parametrize(("name", "message"), [("wandbb", "Did you mean 'wandb'"), ("comet_ml", "is not installed")])
def test_trackers_that_are_not_there(tmp_path, name, message):
    with pytest.raises(OptionError, match=message):
        finetune(tiny(tmp_path / "run", trackers=[name]))


def test_trackers_get_the_config(tmp_path):
    found = flat_options(tiny(tmp_path / "run"))
    assert found["solver.name"] == "proxgd" and found["epochs"] == 1 and found["data.name"] == "digits"
    assert all(isinstance(value, (bool, int, float, str)) for value in found.values())


def test_deepspeed_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(LaunchError, match=r"multi_gpu\.yaml"):
        try:
            make_accelerator(tiny(tmp_path / "run"))
        finally:
            end_processes(None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": [1]}, "at least two different seeds"),
        ({"seeds": [1, 1]}, "at least two different seeds"),
        ({"seeds": [1, 2], "seed": 3}, "found both"),
        ({"mixup": {}, "class_weights": "balanced"}, "found both"),
        ({"best": {"metric": "f1"}}, "macro_f1"),
        ({"best": {"patience": 0}}, "greater than or equal to 1"),
        ({"unfreeze": {"soon": ["head"]}}, "unfreeze"),
        ({"class_weights": "even"}, "balanced"),
    ],
)
def test_choices_that_do_not_fit(tmp_path, changes, message):
    with pytest.raises(OptionError, match=message):
        FinetuneConfig.parse(options(tmp_path, **changes))


def test_models_that_cannot_recompute(tmp_path):
    with pytest.raises(TargetError, match="gradient_checkpointing is not available"):
        finetune(
            tiny(tmp_path / "run", model={"spec": "timm/solver_lenet"}, solver=None, gradient_checkpointing=True,
                 data={**DIGITS, "image_size": 32})
        )  # fmt: skip
