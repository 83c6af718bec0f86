"""Predictions of saved models are those of the evaluation, whatever library the model is from."""

import json
import subprocess
import sys

import datasets
import numpy
import pytest
import torch
import transformers
from PIL import Image

import solver_plugins
from solver_plugins.integrations.errors import LoadingError
from solver_plugins.train import DataError
from solver_plugins.train.finetune import finetune
from tests.train.runs import tiny
from tests.train.test_everyday import photos, small_vit
from tests.train.test_run import small_text_model


def share_right(folder, place, **options):
    """Returns the percentage of right answers on PLACE/test/CLASS/IMAGE."""
    found = solver_plugins.predict(folder, place / "test", **options)
    return 100 * numpy.mean([one.label == one.source.split("/")[-2] for one in found])


@pytest.mark.parametrize("library", ["timm", "transformers"])
def test_predictions_are_those_of_the_evaluation(tmp_path, library):
    place = photos(tmp_path / "photos", count=6)
    # One photo stored sideways: without turning it, another image would be judged.
    file = place / "test" / "cat" / "0.jpg"
    with Image.open(file) as image:
        turned = image.transpose(Image.Transpose.ROTATE_90)
        exif = image.getexif()
        exif[0x0112] = 6
        turned.save(file, exif=exif)
    processor = {"image_mean": [0.2] * 3, "image_std": [0.3] * 3, "size": {"height": 16, "width": 16}}
    model = (
        {"spec": "timm/test_resnet"} if library == "timm" else small_vit(tmp_path / "vit", 16, **processor, resample=3)
    )
    data = {"name": str(place), "image_size": 16, "mean": [0.4, 0.5, 0.6], "std": [0.25, 0.2, 0.3]}
    results = finetune(
        tiny(tmp_path / "run", model=model, solver=None, data=data, epochs=2, batch_size=4, optimizer={"lr": 1e-3})
    )
    folder = tmp_path / "run" / "plain" / "model"
    assert share_right(folder, place) == pytest.approx(results["plain"]["accuracy"])
    assert share_right(folder, place, batch_size=5) == pytest.approx(results["plain"]["accuracy"])
    both = solver_plugins.predict(folder, file, top=2)[0]
    assert sum(share for _, share in both.likeliest) == pytest.approx(1) and both.likeliest[0][0] == both.label
    upright = tmp_path / "upright.png"
    with Image.open(file) as image:
        from PIL import ImageOps

        ImageOps.exif_transpose(image).save(upright)
    assert solver_plugins.predict(folder, upright)[0].probability == pytest.approx(both.probability, abs=1e-6)


def test_texts(tmp_path):
    texts, spec = ["very good film", "bad film", "good", "very very bad film"] * 4, small_text_model(tmp_path / "model")
    rows = datasets.Dataset.from_dict({"sentence": texts, "label": [name.count("good") for name in texts]})
    datasets.DatasetDict(train=rows, test=rows.select(range(7))).save_to_disk(tmp_path / "data")
    data = {"name": str(tmp_path / "data"), "text": "sentence"}
    finetune(
        tiny(tmp_path / "run", model=spec, data=data, epochs=12, optimizer={"lr": 1e-2}, batch_size=8, baseline=True)
    )
    for name in ("solver", "baseline"):
        folder = tmp_path / "run" / name / "model"
        found = solver_plugins.predict(folder, texts[:2])
        assert [one.label for one in found] == ["1", "0"] and found[0].source == texts[0]
        # The tokenizer beside the model is the one it was trained with, not one made out of nothing.
        assert transformers.AutoTokenizer.from_pretrained(folder).tokenize("good film") == ["good", "film"]


def test_on_the_command_line(tmp_path):
    torch.manual_seed(0)
    import timm

    model = timm.create_model("test_resnet", num_classes=2)
    model.pretrained_cfg["label_names"] = ["cat", "dog"]
    solver_plugins.save(model, tmp_path / "model")
    place = photos(tmp_path / "photos", splits=("test",), count=1)
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "solver_plugins.cli",
        "predict",
        str(tmp_path / "model"),
        str(place),
    ]
    done = subprocess.run([*command, "--top", "2", "--json"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert {one["label"] for one in json.loads(done.stdout)} <= {"cat", "dog"} and len(json.loads(done.stdout)) == 2
    (place / "broken.jpg").write_text("no picture")
    with pytest.raises(DataError, match=r"broken\.jpg"):
        solver_plugins.predict(tmp_path / "model", [place])
    (tmp_path / "run" / "plain").mkdir(parents=True)
    (tmp_path / "model").rename(tmp_path / "run" / "plain" / "model")
    with pytest.raises(LoadingError, match=r"holds some: .*run.plain.model\."):
        solver_plugins.predict(tmp_path / "run", [place])
    (tmp_path / "run" / "plain" / "model").rename(tmp_path / "model")
    with pytest.raises(DataError, match="found no file ending in"):
        solver_plugins.predict(tmp_path / "model", [tmp_path / "model"])
