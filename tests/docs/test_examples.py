"""The scripts of docs/examples run as they are, one after the other in one process: most of their time is importing."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

import solver_plugins
from solver_plugins.train import load_digits

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Runs a script in an empty folder, and returns what it prints, and its names."""

    def script(name: str, *arguments: str) -> tuple[str, dict]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        names = runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out, names

    return script


def test_every_example_has_a_test_and_a_line():
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    source, page = Path(__file__).read_text(), (EXAMPLES / "README.md").read_text()
    assert 0 < len(scripts) <= 5
    assert all(f'"{name}"' in source and f"({name})" in page for name in scripts)


# timm leaves it to Python to close the files of its images.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_finetune_folder(run, tmp_path: Path):
    from PIL import Image

    images, labels = load_digits()
    for split, rows in (("train", range(0, 48)), ("test", range(48, 60))):
        for index in rows:
            folder = tmp_path / "photos" / split / f"digit{labels[index] % 3}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray((images[index] * 15).numpy()).resize((64, 64)).convert("RGB").save(folder / f"{index}.png")
    out, names = run(
        "finetune_folder.py", "photos", "--model", "test_resnet", "--no-pretrained", "--epochs", "1", "--iters", "3",
        "--batch-size", "16", "--workers", "0",
    )  # fmt: skip
    assert "on 12 images of digit0, digit1, digit2" in out
    loaded, images = solver_plugins.load("finetuned").eval(), torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(loaded(images), names["model"](images))
    assert len(solver_plugins.conversion_of(loaded).blocks) > 0
    assert loaded.pretrained_cfg["label_names"] == ["digit0", "digit1", "digit2"]


def test_proxprop_loop(run):
    out, _ = run("proxprop_loop.py")
    small, large = ([float(part.split("%")[0].split()[-1]) for part in line.split(",")] for line in out.splitlines())
    assert large[1] > 80 > 30 > large[0] and max(small) <= 100


def test_opteq_head(run):
    out, _ = run("opteq_head.py")
    assert float(out.split("accuracy ")[1].split("%")[0]) > 30
    assert float(out.split()[-1]) <= 1e-4


def test_dropblock_regularizer(run):
    out, _ = run("dropblock_regularizer.py")
    assert float(out.split("accuracy ")[1].split("%")[0]) > 30
    assert out.count("what DropBlock would add") == 3


def test_inspect_calibrate_save(run):
    out, _ = run("inspect_calibrate_save.py", "--size", "32")
    lines = {line.partition(":")[0]: float(line.split()[-1]) for line in out.splitlines() if " by " in line and
             line.startswith(("calibrated", "loaded", "reverted"))}  # fmt: skip
    raw = float(out.split("raw: logits changed by ")[1].split()[0])
    assert lines["calibrated"] < raw
    assert lines["loaded"] < 1e-5 and lines["reverted"] < 1e-5
