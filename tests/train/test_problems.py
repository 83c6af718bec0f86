"""Several labels at once, and numbers: data, loss, measures, report and predictions, and labels that do not fit."""

import csv
import json
from pathlib import Path

import datasets
import numpy
import pytest
import timm
import torch
import transformers
from PIL import Image
from sklearn.metrics import average_precision_score, f1_score, mean_absolute_error, r2_score

from solver_plugins import load, predict
from solver_plugins.errors import OptionError
from solver_plugins.train import DataError, FinetuneConfig
from solver_plugins.train.config import DataSection
from solver_plugins.train.data import load_splits
from solver_plugins.train.finetune import finetune
from solver_plugins.train.metrics import average_precision
from solver_plugins.train.plan import plan_run
from solver_plugins.train.problems import PROBLEMS
from solver_plugins.train.sections import BestSection
from tests.train.runs import options, tiny
from tests.train.test_run import small_text_model

MULTI, REGRESSION = "multi_label_classification", "regression"
MODEL = {"spec": "timm/test_vit", "args": {"img_size": 8, "patch_size": 4}}
COLOURS = ("blue", "green", "red")


def colours(place, form, count=24):
    """Images of plain colours, which are their labels; the table beside them has the form that is asked for."""
    generator = numpy.random.default_rng(0)
    rows = []
    (place / "images").mkdir(parents=True)
    for number in range(count):
        there = generator.integers(0, 2, 3) if number > 2 else numpy.eye(3, dtype=int)[number]
        pixels = numpy.zeros((8, 8, 3), numpy.uint8)
        pixels[:] = 255 * there[::-1]
        file = f"images/{number}.png"
        Image.fromarray(pixels).save(place / file)
        names = [name for name, one in zip(COLOURS, there, strict=True) if one]
        rows.append({"file": file, "there": there.tolist(), "names": names, "bright": float(there.mean())})
    write = {
        "lists": lambda row: {"labels": row["names"]},
        "numbers": lambda row: {"labels": [COLOURS.index(name) for name in row["names"]]},
        "hot": lambda row: {"labels": [float(one) for one in row["there"]]},
        "columns": lambda row: dict(zip(COLOURS, row["there"], strict=True)),
        "text": lambda row: {"labels": " ".join(row["names"])},
        "bright": lambda row: {"label": row["bright"]},
        "both": lambda row: {"bright": row["bright"], "dark": 1.0 - row["bright"]},
    }[form]
    lines = [json.dumps({"file": row["file"], **write(row)}) for row in rows]
    (place / "all.jsonl").write_text("\n".join(lines))
    return str(place / "all.jsonl")


@pytest.mark.parametrize(("form", "given"), [
    ("lists", {}), ("numbers", {}), ("hot", {}), ("columns", {"label": list(COLOURS)}), ("text", {"separator": " "}),
])  # fmt: skip
def test_several_labels_in_every_form(tmp_path, form, given):
    splits = load_splits(DataSection(name=colours(tmp_path, form), eval=0.25, **given))
    assert splits.problem_type == MULTI and len(splits.train) == 18 and len(splits.eval) == 6
    assert splits.classes == (("0", "1", "2") if form in ("numbers", "hot") else COLOURS)
    read = splits.reader()
    for image, value in zip(splits.train["file"], splits.values(splits.train), strict=True):
        blue, green, red = read(value)
        assert image.getpixel((0, 0)) == (255 * red, 255 * green, 255 * blue)
    assert splits.seen(splits.train) == {0, 1, 2}


def test_measures_against_scikit_learn():
    generator = torch.Generator().manual_seed(0)
    outputs = (torch.randn(50, 4, generator=generator) * 4).round() / 4  # With ties.
    truth = torch.rand(50, 4, generator=generator) < 0.4
    problem = PROBLEMS[MULTI]
    *told, losses = problem.told(outputs, truth.float())
    found, each = problem.measure(told, 4)
    answers, right = (outputs >= 0).numpy(), truth.numpy()
    assert found["map"] == pytest.approx(100 * average_precision_score(right, outputs.numpy(), average="macro"))
    assert found["macro_f1"] == pytest.approx(100 * f1_score(right, answers, average="macro"))
    assert found["micro_f1"] == pytest.approx(100 * f1_score(right, answers, average="micro"))
    assert found["exact"] == pytest.approx(100 * (answers == right).all(1).mean())
    assert each[1] == pytest.approx(100 * average_precision_score(right[:, 1], outputs[:, 1].numpy()))
    assert float(losses.mean()) == pytest.approx(float(problem.loss()(outputs, truth.float())))
    assert average_precision(numpy.zeros(3), numpy.zeros(3, bool)) is None
    problem, targets = PROBLEMS[REGRESSION], torch.randn(50, 4, generator=generator)
    *told, losses = problem.told(outputs, targets)
    found, each = problem.measure(told, 4)
    assert found["rmse"] == pytest.approx(float((outputs - targets).square().mean()) ** 0.5)
    assert found["mae"] == pytest.approx(mean_absolute_error(targets, outputs))
    assert found["r2"] == pytest.approx(r2_score(targets, outputs))
    assert each[2] == pytest.approx(float((outputs - targets)[:, 2].square().mean()) ** 0.5)
    assert float(losses.mean()) == pytest.approx(float(problem.loss()(outputs, targets)))
    measures = {"loss", *(key for one in PROBLEMS.values() for key in one.headings)}
    assert measures == set(BestSection.model_fields["metric"].annotation.__args__[0].__args__)


def test_several_labels_are_learnt_reported_and_predicted(tmp_path):
    data = {"name": colours(tmp_path, "text"), "separator": " ", "eval": "train"}
    config = tiny(
        tmp_path / "run", model=MODEL, data=data,
        batch_size=8, epochs=6, optimizer={"lr": 3e-3}, class_weights="balanced", best={}, baseline=True,
        solver={"name": "proxgd", "iters": 2, "pattern": "all", "targets": ["fc1"]},
    )  # fmt: skip
    assert any("3 classes, several at once" in line for line in plan_run(config).lines)
    results = finetune(config)
    one = results["solver"]
    assert one["problem_type"] == MULTI and one["map"] > 90 and set(one["classes"]) == set(COLOURS)
    report = (tmp_path / "run" / "report.html").read_text()
    assert "mean average precision (%)" in report and "Wilson" not in report and "<td>red</td>" in report
    images = [str(tmp_path / "images" / f"{number}.png") for number in range(24)]
    exact, told = 0, [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    for found, row in zip(predict(one["model"], images), told, strict=True):
        exact += {name for name, _ in found.likeliest} == set(row["labels"].split())
        assert all(share >= 0.5 for _, share in found.likeliest)
    assert 100 * exact / 24 == pytest.approx(one["exact"])
    assert len(predict(one["model"], images[0], top=3)[0].likeliest) == 3
    # Plain timm loads it, too.
    assert timm.create_model(f"local-dir:{results['baseline']['model']}", pretrained=True).num_classes == 3


def test_numbers_are_learnt_reported_and_predicted(tmp_path):
    data = {"name": colours(tmp_path, "both"), "label": ["bright", "dark"], "eval": "train"}
    config = tiny(
        tmp_path / "run", model=MODEL, data=data,
        solver=None, batch_size=8, epochs=8, optimizer={"lr": 3e-3}, best={"metric": "mae"},
    )  # fmt: skip
    assert any("regression of bright, dark" in line for line in plan_run(config).lines)
    one = finetune(config)["plain"]
    rows = [json.loads(line) for line in (tmp_path / "run" / "plain" / "metrics.jsonl").read_text().splitlines()]
    assert one["mae"] == min(row["eval_mae"] for row in rows) and one["r2"] > 0
    images = [str(tmp_path / "images" / f"{number}.png") for number in range(24)]
    told = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    errors = []
    for found, row in zip(predict(one["model"], images), told, strict=True):
        assert found.label is None and [name for name, _ in found.likeliest] == ["bright", "dark"]
        errors += [value - row[name] for name, value in found.likeliest]
    assert numpy.sqrt(numpy.mean(numpy.square(errors))) == pytest.approx(one["rmse"], rel=1e-4)
    report = (tmp_path / "run" / "report.html").read_text()
    assert "<td>dark</td>" in report and "Each target by itself" in report


@pytest.mark.parametrize(("form", "given", "problem"), [
    ("text", {"separator": " "}, MULTI), ("columns", {"label": list(COLOURS)}, MULTI), ("bright", {}, REGRESSION),
    ("both", {"label": ["bright", "dark"]}, REGRESSION),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_tables_as_csv(tmp_path, form, given, problem):
    """Their columns of texts are large_string, as pandas makes them."""
    rows = [json.loads(line) for line in Path(colours(tmp_path, form)).read_text().splitlines()]
    with (tmp_path / "photos.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)
    label = given.get("label", "labels" if form == "text" else None)
    splits = load_splits(DataSection(**{**given, "name": str(tmp_path / "photos.csv"), "label": label, "eval": 0.25}))
    assert splits.problem_type == problem and splits.column == "file" and splits.train[0]["file"].size == (8, 8)


# datasets leaves the table open.
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_a_table_of_files_beside_the_images(tmp_path):
    """metadata.csv in each split, as users of datasets have it."""
    for split in ("train", "test"):
        colours(tmp_path / split, "bright", count=8)
        lines = ["file_name,label"]
        for line in (tmp_path / split / "all.jsonl").read_text().splitlines():
            row = json.loads(line)
            lines.append(f"{row['file']},{row['label']}")
        (tmp_path / split / "metadata.csv").write_text("\n".join(lines))
        (tmp_path / split / "all.jsonl").unlink()
    splits = load_splits(DataSection(name=str(tmp_path)))
    assert splits.problem_type == REGRESSION and splits.classes == ("label",) and len(splits.eval) == 8
    assert splits.column == "image" and splits.train[0]["image"].size == (8, 8)


@pytest.mark.parametrize("problem", [MULTI, REGRESSION])
def test_texts_and_models_of_transformers(tmp_path, problem):
    texts = ["very good film", "bad film", "good", "very very bad film"] * 4
    labels = {MULTI: [["good"], [], ["good"], ["bad"]] * 4, REGRESSION: [1, 0, 1, 0] * 4}[problem]
    datasets.Dataset.from_dict({"text": texts, "stars": labels}).to_parquet(tmp_path / "texts.parquet")
    data = {"name": str(tmp_path / "texts.parquet"), "text": "text", "label": "stars", "eval": "train"}
    config = FinetuneConfig.parse({
        **options(tmp_path / "run", solver=None), "model": {"spec": small_text_model(tmp_path / "model")["spec"]},
        "data": {**data, "problem_type": problem}, "batch_size": 8,
    })  # fmt: skip
    result = finetune(config)["plain"]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(result["model"])
    assert model.config.problem_type == problem and type(load(result["model"])) is type(model)
    found = predict(result["model"], texts[:2])
    assert (found[0].label is None) == (problem == REGRESSION)


def rows(tmp_path, **columns):
    count = len(next(iter(columns.values())))
    images = datasets.Dataset.from_dict(
        {"image": [Image.new("RGB", (8, 8))] * count}, features=datasets.Features({"image": datasets.Image()})
    )
    made = datasets.concatenate_datasets([images, datasets.Dataset.from_dict(columns)], axis=1)
    datasets.DatasetDict(train=made, test=made).save_to_disk(tmp_path / "rows")
    return str(tmp_path / "rows")


@pytest.mark.parametrize(("columns", "given", "message"), [
    ({"label": [["a"], ["b", "c"]]}, {"problem_type": REGRESSION}, "Expected as many numbers"),
    ({"label": [0.5, None]}, {}, r"finite number for each target; found None \(example 1\)"),
    ({"label": [0.5, float("nan")]}, {}, r"finite number.*found nan \(example 1\)"),
    ({"label": ["a", "b"]}, {"problem_type": REGRESSION}, r"finite number.*found 'a' \(example 0\)"),
    ({"label": ["a", "b"]}, {"problem_type": MULTI}, "Expected lists of labels.*data.separator"),
    ({"label": [[0.0, 2.0], [1.0, 0.0]]}, {"problem_type": MULTI}, r"2\.0 in place of 0 or 1"),
    ({"label": [[0.0, 1.0], [1.0]]}, {}, r"1 numbers in place of 2 \(example 1\)"),
    ({"label": [["a"], [None]]}, {}, "class numbers from 0 on, or names"),
    ({"label": [[0], [-1]]}, {}, "class numbers from 0 on, or names"),
    ({"a": [0, 1], "b": [1, 2]}, {"label": ["a", "b"]}, "Say what they are with data.problem_type"),
    ({"a": [0, 1], "b": [1, 2]}, {"label": ["a", "b"], "problem_type": MULTI}, r"2\.0 in place of 0 or 1"),
    ({"a": [0, 1], "b": [1, 1]}, {"label": ["a", "c"]}, "no column 'c'"),
    ({"label": [0, 1], "other": [0, 1]}, {"image": "other"}, "images, or names of their files, in the column 'other'"),
    ({"label": [0, 1], "file": ["x.png", "y.png"]}, {"image": "file"}, "2 of 2 are not there, such as .*x.png"),
])  # fmt: skip
def test_labels_that_do_not_fit(tmp_path, columns, given, message):
    with pytest.raises(DataError, match=message):
        load_splits(DataSection(name=rows(tmp_path, **columns), **given))


@pytest.mark.parametrize(("columns", "changes", "message"), [
    ({"label": [0.5, 1.5]}, {"label_smoothing": 0.1}, "label_smoothing is about one class of several"),
    ({"label": [0.5, 1.5]}, {"class_weights": "balanced"}, "class_weights is about"),
    ({"label": [0.5, 1.5]}, {"best": {"metric": "accuracy"}}, "expected loss, rmse, mae, r2"),
    ({"label": [["a"], ["b"]]}, {"mixup": {}}, "mixup is about"),
    ({"label": [["a"], ["b"]]}, {"best": {"metric": "top5"}}, "not measured for multi_label.*expected loss, map"),
    ({"label": [0, 1]}, {"best": {"metric": "top5"}}, "with 2 outputs; expected loss, accuracy"),
])  # fmt: skip
def test_options_that_do_not_fit(tmp_path, columns, changes, message):
    config = tiny(tmp_path / "run", data={"name": rows(tmp_path, **columns)}, batch_size=2, solver=None,
                  model={"spec": "timm/test_vit"}, **changes)  # fmt: skip
    for run in (plan_run, finetune):
        with pytest.raises(OptionError, match=message):
            run(config)
    assert not (tmp_path / "run").exists()
