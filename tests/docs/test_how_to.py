"""A reader goes from the README to a finetuned, merged and exported model on own images, line by line.

The lines are those of the pages. What a reader has and a test has not is replaced: a small network without weights in
the place of a pretrained one, and fewer epochs.
"""

import re
import shlex
from pathlib import Path

import onnxruntime
import pytest
import timm
import torch
import yaml
from PIL import Image

import solver_plugins
from solver_plugins.blocks import blocks_of
from solver_plugins.cli import main
from solver_plugins.train import FinetuneConfig

ROOT = Path(__file__).parents[2]
MODELS = {"photos.yaml": "timm/test_vit", "MY.yaml": "timm/test_resnet", "quickstart": "timm/solver_lenet"}
STANDINS = {"FOLDER": "runs/photos/solver/model", "timm/resnet18": "timm/test_resnet"}
DONE: list[list[str]] = []
"""Calls that were made already: two pages export the same folder."""
SMALL = ["model.pretrained=false", "epochs=1", "batch_size=4", "schedule.warmup_epochs=0"]


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def commands(page: str) -> list[list[str]]:
    """Returns the calls of ``solver-plugins`` in the blocks of a page, without their comments."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text_of(page), re.DOTALL | re.MULTILINE)
    shell = [block.replace("\\\n", " ") for language, block in blocks if language in ("", "text")]
    lines = [line for block in shell for line in block.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("solver-plugins ")]


def yaml_of(page: str, number: int = 0) -> str:
    return re.findall(r"^```yaml\n(.*?)^```$", text_of(page), re.DOTALL | re.MULTILINE)[number]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reader's folder: photos of cats and dogs, and the files that the pages print."""
    place = tmp_path_factory.mktemp("reader")
    for split, count in (("train", 8), ("test", 4)):
        for shade, name in enumerate(("cat", "dog")):
            home = place / "photos" / split / name
            home.mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (32, 32), (120 * shade, 20 * number, 90)).save(home / f"{number}.jpg")
    Image.new("RGB", (40, 30), (120, 60, 90)).save(place / "my.jpg")
    (place / "photos.yaml").write_text(yaml_of("README.md"))
    (place / "MY.yaml").write_text(yaml_of("docs/finetuning.md").replace("runs/photos", "runs/mine"))
    return place


def call(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Runs a command as a reader types it, in small, and returns what it prints."""
    for written, small in STANDINS.items():
        words = [word.replace(written, small) for word in words]
    if words[0] == "export" and words in DONE:
        return ""
    DONE.append(words)
    if words[0] == "finetune":
        words = [*words, f"model.spec={MODELS[words[1]]}", *SMALL]
        # A run that another line of the page has made is not continued with other options.
        words += ["output=runs/again"] if "--resume" in words else []
        words += ["data.train=train[:16]", "data.eval=test[:16]"] if words[1] == "quickstart" else []
    with pytest.raises(SystemExit) as stopped:
        main(words)
    out, err = capsys.readouterr()
    assert not stopped.value.code, f"solver-plugins {shlex.join(words)}\n{err}"
    return out


# timm leaves it to Python to close the files of its images.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_the_readme_leads_to_a_merged_and_exported_model(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    printed = [call(words, capsys) for words in commands("README.md")]
    assert [words[0] for words in commands("README.md")] == ["finetune", "finetune", "predict", "export", "export"]
    assert "Report: runs/photos/report.html" in printed[1] and Path("runs/photos/report.html").is_file()
    assert re.search(r"my\.jpg: (cat|dog) [01]\.\d+", printed[2])

    trained = solver_plugins.load("runs/photos/solver/model").eval()
    merged = timm.create_model("local-dir:model-plain", pretrained=True).eval()
    assert blocks_of(trained) and not blocks_of(merged)
    images = torch.randn(3, 3, 160, 160)
    with torch.no_grad():
        expected = trained(images)
        torch.testing.assert_close(merged(images), expected, rtol=1e-4, atol=1e-4)
    session = onnxruntime.InferenceSession("model.onnx")
    (found,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-3, atol=1e-3)


# After the test above, in its folder.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("page", ["docs/install.md", "docs/convert.md", "docs/finetuning.md", "docs/deploying.md"])
def test_the_commands_of_a_page_run(page, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    if not Path("runs/photos").is_dir():
        call(commands("README.md")[1], capsys)
    assert commands(page)
    for words in commands(page):
        call(words, capsys)


def test_the_fragments_of_configs_are_options():
    """The blocks of docs/finetuning.md that show single options; the last one lists them all."""
    base = yaml.safe_load(yaml_of("docs/finetuning.md"))
    blocks = re.findall(r"^```yaml\n(.*?)^```$", text_of("docs/finetuning.md"), re.DOTALL | re.MULTILINE)
    keys = 0
    options = [option for block in blocks[1:-1] for option in re.split(r"^(?=\w)", block, flags=re.MULTILINE) if option]
    for option in map(yaml.safe_load, options):
        beside = {"freeze": ["stem"]} if "unfreeze" in option else {}
        FinetuneConfig.parse({**base, **beside, **option})
        keys += 1
    assert keys > 10
