"""What people expect of a finetuning command every day, each once reported as wrong or missing."""

import json
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace

import numpy
import psutil
import pytest
import timm
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file

from solver_plugins.errors import OptionError
from solver_plugins.train import DataError, FinetuneConfig, OutputError
from solver_plugins.train.arms import make_arm
from solver_plugins.train.comparison import _blocks, _curves, wilson
from solver_plugins.train.config import DataSection
from solver_plugins.train.data import example_of, load_splits
from solver_plugins.train.diagnosis import worst_block
from solver_plugins.train.finetune import finetune
from solver_plugins.train.models import build_model
from solver_plugins.train.outputs import LOCK
from solver_plugins.train.preparation import image_preparation, image_settings
from solver_plugins.train.problems import PROBLEMS, SINGLE
from solver_plugins.train.reading import given_options
from tests.train.runs import VIT, options, tiny


def photos(place, *, splits=("train", "test"), classes=("cat", "dog"), count=4, suffix="jpg"):
    generator = numpy.random.default_rng(0)
    for split in splits:
        for name in classes:
            folder = place / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(0, 256, (24, 16, 3), dtype=numpy.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.{suffix}")
    return place


def small_vit(folder, side=32, **processor):
    settings = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=side, patch_size=8
    )
    transformers.ViTForImageClassification(settings).save_pretrained(folder)
    if processor:
        transformers.ViTImageProcessor(**processor).save_pretrained(folder)
    return {"spec": f"hf/{folder}"}


def test_images_are_normalised_as_the_models_processor_says(tmp_path):
    wanted = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "size": {"height": 16, "width": 16}}
    config = tiny(tmp_path / "run", model=small_vit(tmp_path / "vit", 16, **wanted, resample=2), solver=None)
    model = build_model(config, load_splits(config.data))
    found = image_settings(config, model)
    assert found["mean"] == (0.1, 0.2, 0.3) and found["std"] == (0.4, 0.5, 0.6)
    assert found["input_size"] == (3, 16, 16) and found["interpolation"] == "bilinear"


def test_trained_weights_without_a_processor_are_not_guessed_about(tmp_path):
    config = tiny(tmp_path / "run", model=small_vit(tmp_path / "vit"), solver=None)
    model = build_model(config, load_splits(config.data))
    with pytest.raises(DataError, match=r"image processor.*data\.mean and data\.std"):
        image_settings(config, model)
    told = tiny(tmp_path / "run", model=config.model.options(), solver=None, data={"mean": [0.5], "std": [0.5]})
    assert image_settings(told, model)["mean"] == (0.5, 0.5, 0.5)


def test_photos_are_turned_upright(tmp_path):
    config = tiny(tmp_path, model={"spec": "timm/test_resnet"}, data={"image_size": 8})
    _, evaluation, _ = image_preparation(config, timm.create_model("test_resnet"))
    pixels = numpy.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=numpy.uint8)
    upright = Image.fromarray(pixels)
    sideways = upright.transpose(Image.Transpose.ROTATE_90)
    sideways.getexif()[0x0112] = 6
    sideways.save(tmp_path / "photo.png", exif=sideways.getexif())
    with Image.open(tmp_path / "photo.png") as stored:
        assert torch.equal(evaluation(stored), evaluation(upright))


@pytest.mark.parametrize("how", ["reset", "zero", "library", "timm"])
def test_a_new_classifier_on_pretrained_weights(tmp_path, how):
    """timm draws that of EfficientNets at 0.3 for ten classes, however many features; 'timm' means the library."""
    source = timm.create_model("test_efficientnet")
    torch.save(source.state_dict(), tmp_path / "published.pth")
    model = {"spec": "timm/test_efficientnet", "weights": str(tmp_path / "published.pth"), "head_init": how}
    built = build_model(tiny(tmp_path / "run", model=model), load_splits(DataSection()))
    weight = built.get_classifier().weight
    assert weight.shape[0] == 10
    # A layer of torch is drawn within one over the root of its inputs.
    low, high = {"zero": (0, 0), "reset": (0.9, 1)}.get(how, (3, 5.1))
    assert low <= float(weight.detach().abs().max()) * weight.shape[1] ** 0.5 <= high
    assert torch.equal(built.conv_stem.weight, source.conv_stem.weight)


@pytest.mark.parametrize("how", ["reset", "zero", "library"])
def test_a_new_classifier_of_transformers(tmp_path, how):
    settings = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=8, patch_size=4,
        num_channels=1, num_labels=3,
    )  # fmt: skip
    transformers.ViTForImageClassification(settings).save_pretrained(tmp_path / "vit")
    config = tiny(tmp_path / "run", model={"spec": f"hf/{tmp_path / 'vit'}", "head_init": how})
    built = build_model(config, load_splits(DataSection()))
    weight = built.classifier.weight.detach()
    low, high = {"zero": (0, 0), "reset": (0.2, 0.25), "library": (0.02, 0.1)}[how]
    assert weight.shape == (10, 16) and low <= float(weight.abs().max()) <= high
    # A classifier that the file has is kept.
    kept = load_splits(DataSection())
    kept = replace(kept, classes=("0", "1", "2"))
    stored = load_file(tmp_path / "vit" / "model.safetensors")["classifier.weight"]
    assert torch.equal(build_model(config, kept).classifier.weight, stored)


def test_one_example_is_too_few_for_batch_norm(tmp_path):
    model = {"spec": "timm/test_efficientnet", "args": {"in_chans": 1}}
    config = tiny(
        tmp_path / "run", model=model, solver=None, batch_size=1, data={"image_size": 8, "train": "train[:4]"}
    )
    with pytest.raises(OptionError, match=r"at least two examples.*Raise batch_size"):
        finetune(config)


def test_damaged_images_are_named_before_training(tmp_path):
    place = photos(tmp_path / "photos")
    broken = place / "test" / "dog" / "2.jpg"
    broken.write_bytes(broken.read_bytes()[:300])
    (place / "train" / "cat" / "0.jpg").write_text("no picture")
    with pytest.raises(DataError, match=r"2 cannot: .*cat.0\.jpg .*dog.2\.jpg .*[Tt]runcated"):
        load_splits(DataSection(name=str(place)))
    assert len(load_splits(DataSection(name=str(place), check=False)).train) == 8


def test_damage_met_later_names_its_file(tmp_path):
    place = photos(tmp_path / "photos")
    data = {"name": str(place), "check": False}
    broken = place / "train" / "dog" / "1.jpg"
    broken.write_bytes(broken.read_bytes()[:200])
    config = tiny(
        tmp_path / "run", model={"spec": "timm/test_resnet"}, solver=None, data={**data, "image_size": 16}, batch_size=4
    )
    with pytest.raises(DataError, match=r"dog.1\.jpg"):
        finetune(config)


def test_classes_that_cannot_be_told_apart_or_measured(tmp_path):
    with pytest.raises(DataError, match="at least two classes"):
        load_splits(DataSection(name=str(photos(tmp_path / "one", classes=("cat",)))))
    place = photos(tmp_path / "more")
    photos(place, splits=("train",), classes=("cow",))
    (note,) = load_splits(DataSection(name=str(place))).notes()
    assert "nothing in the evaluated split is cow" in note


def test_what_does_not_fill_a_batch_is_said(tmp_path, capsys):
    finetune(tiny(tmp_path / "run", solver=None, batch_size=60))
    assert "leaves out 4 examples" in capsys.readouterr().out


def test_two_runs_do_not_meet_in_one_folder(tmp_path):
    folder = tmp_path / "run"
    config = tiny(folder, epochs=2)
    finetune(config)
    assert not (folder / LOCK).exists()
    # Another process that lives, then one that is gone.
    code = "import time; time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", code])
    try:
        held = {"pid": other.pid, "host": socket.gethostname()}
        held["started"] = psutil.Process(other.pid).create_time()
        (folder / LOCK).write_text(json.dumps(held))
        before = sorted(path.name for path in folder.iterdir())
        for how in ({"resume": True}, {"overwrite": True}):
            with pytest.raises(OutputError, match=rf"Process {other.pid} is working in"):
                finetune(config, **how)
        assert sorted(path.name for path in folder.iterdir()) == before
        (folder / LOCK).write_text(json.dumps({**held, "host": "elsewhere"}))
        with pytest.raises(OutputError, match="on 'elsewhere'"):
            finetune(config, resume=True)
        (folder / LOCK).write_text(json.dumps(held))
    finally:
        other.kill()
        other.wait()
    assert finetune(config, resume=True)["solver"]["steps"] == 8


def test_a_finished_run_can_be_extended(tmp_path):
    finetune(tiny(tmp_path / "run", epochs=1))
    extended = finetune(tiny(tmp_path / "run", epochs=3), resume=True)
    whole = finetune(tiny(tmp_path / "whole", epochs=3))
    assert extended["solver"]["steps"] == 12 and extended["solver"]["accuracy"] == whole["solver"]["accuracy"]
    assert extended["solver"]["loss"] == whole["solver"]["loss"]
    with pytest.raises(OutputError, match=r"epochs was 3 and is now 2.*--overwrite"):
        finetune(tiny(tmp_path / "run", epochs=2), resume=True)


def test_no_block_is_blamed_for_what_it_did_not_do(tmp_path):
    config = tiny(tmp_path / "run")
    model, loaders = make_arm(config, load_splits(config.data), "solver", 1)
    batch = example_of(loaders.eval)
    assert "'blocks.0.mlp.fc1'" in worst_block(model, batch, torch.float32)
    with torch.no_grad():
        # Nothing is left to solve here, so this block has not made a loss infinite.
        for parameter in model.blocks[0].mlp.fc1.parameters():
            parameter.zero_()
    assert worst_block(model, batch, torch.float32) == ""


def test_unknown_optimizers_have_near_names(tmp_path):
    with pytest.raises(OptionError, match=r"Did you mean .*'adamw'"):
        finetune(tiny(tmp_path / "run", optimizer={"opt": "adamww"}))


@pytest.mark.parametrize("epochs", [1, 2, 40])
def test_reports_count_in_whole_epochs(epochs):
    rows = [{"epoch": one + 1, "train_loss": 1.0, "eval_loss": 1.0, "eval_accuracy": 50.0} for one in range(epochs)]
    for row in rows:
        row["blocks"] = {"fc": {"L": 0.5, "residual": 1e-7}}
    for figure in (*_curves({"solver": rows}, PROBLEMS[SINGLE]), *_blocks(rows)):
        (axes,) = figure.axes
        low, high = axes.get_xlim()
        ticks = [tick for tick in axes.get_xticks() if low <= tick <= high]
        assert ticks and all(tick == round(tick) for tick in ticks) and low < 1 <= epochs < high


def test_given_options_are_the_ones_that_were_given(tmp_path):
    config = tiny(tmp_path / "run", epochs=3)
    text = given_options(config)
    assert "epochs: 3" in text and "label_smoothing" not in text and "momentum" not in text
    assert FinetuneConfig.from_yaml(text) == config


@pytest.mark.parametrize(("share", "count", "low", "high"), [(0.9, 59, 0.797, 0.954), (1.0, 10, 0.722, 1.0)])
def test_wilson_intervals(share, count, low, high):
    """The first from scipy.stats.binomtest(53, 59).proportion_ci(method="wilson") at 53/59."""
    from scipy.stats import binomtest

    right = round(share * count)
    found = binomtest(right, count).proportion_ci(method="wilson")
    assert wilson(right / count, count) == pytest.approx((found.low, found.high), abs=1e-4)
    assert wilson(share, count) == pytest.approx((low, high), abs=0.01)


def test_stopped_by_hand_says_how_to_go_on(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(
        FinetuneConfig.parse(
            options(tmp_path / "run", epochs=400, model={"spec": "timm/test_vit", "args": VIT})
        ).to_yaml()
    )
    # A test run in the background ignores Ctrl-C, and its children would inherit that.
    with subprocess.Popen(
        [sys.executable, "-m", "solver_plugins.cli", "finetune", str(config)],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        try:
            deadline = time.monotonic() + 120
            while not list((tmp_path / "run").glob("solver/checkpoints/step-*")) and time.monotonic() < deadline:
                time.sleep(0.2)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130 and "--resume" in said and "Traceback" not in said
    assert not (tmp_path / "run" / LOCK).exists()
