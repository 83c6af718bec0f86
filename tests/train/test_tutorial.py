"""From a folder of photos to a plain network of timm: what a newcomer does, command by command.

Weights and photos come from package registries. Read it from top to bottom; every ``$`` is a command of a shell.
"""

import json
import os
import signal
import subprocess
import sys
import time

import datasets
import pytest
import yaml

from tests.train.downloads import cifar10, efficientnet_lite0

pytestmark = pytest.mark.slow


@pytest.fixture
def shell(tmp_path):
    """Runs commands in a folder of their own, as a user does; ``start`` leaves one running."""

    def start(text):
        command = text.replace("solver-plugins", f"{sys.executable} -m solver_plugins.cli", 1).split()
        path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
        return subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip

    def run(text):
        process = start(text)
        out, err = process.communicate(timeout=900)
        assert process.returncode == 0, err[-3000:]
        return out

    run.start = start
    return run


def test_from_photos_to_a_plain_network(tmp_path, shell, tmp_path_factory):
    # Photos: a folder for each split, and in it a folder for each class.
    downloads = tmp_path_factory.mktemp("downloads")
    found = datasets.load_from_disk(str(cifar10(downloads, 1500, 400)))
    classes = {0: "airplane", 1: "automobile", 8: "ship"}
    for split in ("train", "test"):
        for number, row in enumerate(found[split]):
            if row["label"] in classes:
                folder = tmp_path / "photos" / split / classes[row["label"]]
                folder.mkdir(parents=True, exist_ok=True)
                row["img"].save(folder / f"{number}.jpg", quality=95)

    # A config: EfficientNet-Lite0 with its ImageNet weights; its classifier becomes a solver behind a gate.
    (tmp_path / "photos.yaml").write_text(yaml.dump({
        "model": {
            "spec": "timm/tf_efficientnet_lite0", "weights": str(efficientnet_lite0(downloads)), "in_order": True,
        },
        "solver": {"name": "proxgd", "iters": 3, "gate": "channel", "pattern": "all", "targets": ["classifier"]},
        "data": {"name": "photos", "image_size": 64},
        "optimizer": {"lr": 2.0e-3, "clip": 1.0},
        "augmentation": {"hflip": 0.5},
        "epochs": 3,
        "batch_size": 16,
        "output": "runs/photos",
    }))  # fmt: skip

    # What will happen? Nothing is trained or written.
    # $ solver-plugins finetune photos.yaml --dry-run
    plan = shell("solver-plugins finetune photos.yaml --dry-run")
    assert "3 classes, images of 3x64x64" in plan and "runs: solver, baseline" in plan and "classifier" in plan
    assert not (tmp_path / "runs").exists()

    # Train. The power fails after the first epoch (kill -9), and the same command with --resume goes on.
    # $ solver-plugins finetune photos.yaml
    process = shell.start("solver-plugins finetune photos.yaml")
    run = tmp_path / "runs" / "photos"
    while not list((run / "solver").glob("checkpoints/step-*")):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    # $ solver-plugins finetune photos.yaml --resume
    told = shell("solver-plugins finetune photos.yaml --resume")
    assert "solver: continues from step-" in told and "Report: runs/photos/report.html" in told
    results = json.loads((run / "results.json").read_text())
    assert results["solver"]["accuracy"] > 80 and results["baseline"]["accuracy"] > 80
    # It is the run that it would have been without the power failure, to the last digit.
    shell("solver-plugins finetune photos.yaml output=runs/again baseline=false")
    again = json.loads((tmp_path / "runs" / "again" / "results.json").read_text())
    assert again["solver"]["loss"] == results["solver"]["loss"]

    # Use it: predictions are those of the evaluation.
    # $ solver-plugins predict runs/photos/solver/model photos/test --json
    answers = json.loads(shell("solver-plugins predict runs/photos/solver/model photos/test --json"))
    right = [answer["label"] == answer["source"].split("/")[-2] for answer in answers]
    assert 100 * sum(right) / len(right) == pytest.approx(results["solver"]["accuracy"])

    # Take it elsewhere: as a plain network that timm loads where this package is not installed ...
    # $ solver-plugins export runs/photos/solver/model --to plain --output plain
    shell("solver-plugins export runs/photos/solver/model --to plain --output plain")
    code = (
        "import sys, json, timm, torch; sys.modules['solver_plugins'] = None\n"
        "from PIL import Image\n"
        "model = timm.create_model('local-dir:plain', pretrained=True).eval()\n"
        "prepare = timm.data.create_transform(**timm.data.resolve_model_data_config(model))\n"
        "names, right = model.pretrained_cfg['label_names'], []\n"
        "for file in sys.argv[1:]:\n"
        "    logits = model(prepare(Image.open(file).convert('RGB'))[None])\n"
        "    right.append(names[int(logits.argmax())] == file.split('/')[-2])\n"
        "print(100 * sum(right) / len(right))\n"
    )
    files = [answer["source"] for answer in answers]
    plain = subprocess.run([sys.executable, "-c", code, *files], cwd=tmp_path, capture_output=True, text=True)
    assert float(plain.stdout) == pytest.approx(results["solver"]["accuracy"]), plain.stderr[-2000:]

    # ... or as ONNX, checked against the model as it is written.
    # $ solver-plugins export runs/photos/solver/model --to onnx --output photos.onnx
    shell("solver-plugins export runs/photos/solver/model --to onnx --output photos.onnx")
    assert (tmp_path / "photos.onnx").stat().st_size > 1_000_000
