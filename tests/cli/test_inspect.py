"""``solver-plugins inspect``: the same report as in Python, as a table, as JSON and as a picture."""

import json

import matplotlib.image
import pytest
import timm
import torch

from solver_plugins import inspect_model
from solver_plugins.cli.figures import draw_report
from solver_plugins.errors import OptionError
from solver_plugins.surgery import speaking
from tests.cli.test_app import run
from tests.surgery.models import bert

SMALL = ("inspect", "timm/test_resnet", "--solver", "proxgd")


def test_table(capsys):
    code, out, err = run(capsys, *SMALL, "--pattern", "all", "--no-lipschitz", "--iters", "3")
    assert code == 0 and not err
    assert "layers become proxgd, iters=3" in out and "linear-norm-skip-act" in out
    assert "use --gate channel, --calibrate or --blend" in " ".join(out.split())
    assert max(len(line) for line in out.splitlines()) <= 100


def test_json_is_the_report_and_nothing_else(capsys):
    torch.manual_seed(0)
    code, out, err = run(
        capsys, *SMALL, "--json", "--pattern", "linear-norm-act", "--pattern", "linear", "--exclude", "fc"
    )
    assert code == 0 and not err
    torch.manual_seed(0)
    model = timm.create_model("test_resnet")
    with speaking("command line"):
        expected = inspect_model(model, "proxgd", pattern=["linear-norm-act", "linear"], exclude=["fc"])
    found = json.loads(out)
    assert found == json.loads(expected.to_json())
    assert found["totals"]["converted"] > 0 and all(row["L"] > 0 for row in found["blocks"] if row["converted"])


def test_arguments_reach_model_solver_and_selection(capsys):
    code, out, _ = run(
        capsys, "inspect", "timm/test_vit", "--json", "--p", "0.25", "--no-last", "--targets", "fc1",
        "--targets", "fc2",
        "--model-arg", "act_layer=relu", "--model-arg", "num_classes=7", "--option", "lam=0.01", "--no-lipschitz",
    )  # fmt: skip
    assert code == 0
    found = json.loads(out)
    assert found["options"] == {"iters": 10, "lam": 0.01}
    converted = [row for row in found["blocks"] if row["converted"]]
    assert {row["name"].rpartition(".")[2] for row in converted} == {"fc1", "fc2"}
    assert {row["p"] for row in converted} == {0.25} and {row["prior"] for row in converted} == {"relu", "identity"}
    assert found["blocks"][-1]["output_shape"][-1] == 7
    code, out, _ = run(
        capsys, *SMALL, "--json", "--targets", r"layer1\.\d+\.conv\d", "--pattern", "all", "--no-lipschitz"
    )
    names = [row["name"] for row in json.loads(out)["blocks"] if row["converted"]]
    assert code == 0 and names and all(name.startswith("layer1.") for name in names)


def test_transformers_folder(capsys, tmp_path):
    bert().save_pretrained(tmp_path)
    code, out, _ = run(capsys, "inspect", f"hf/{tmp_path}", "--json", "--no-lipschitz")
    found = json.loads(out)
    assert code == 0 and found["model"] == "BertForSequenceClassification"
    converted = [row["name"] for row in found["blocks"] if row["converted"]]
    assert converted == ["classifier"]


def test_figure(capsys, tmp_path):
    file = tmp_path / "blocks.png"
    code, _, err = run(capsys, *SMALL, "--pattern", "linear-norm-act", "--figure", str(file))
    assert code == 0 and str(file) in err
    picture = matplotlib.image.imread(file)
    assert picture.shape[0] > 400 and picture.shape[1] > 800 and picture.std() > 0.01
    # The colour of the pattern, and nothing left beside the picture itself.
    assert (abs(picture[..., :3] - torch.tensor([0x00, 0x9E, 0x73]).numpy() / 255).max(-1) < 0.01).any()
    assert list(tmp_path.iterdir()) == [file]


def test_figure_of_a_model_in_which_nothing_is_converted(tmp_path):
    report = inspect_model(timm.create_model("test_resnet"), "rcd", last=False, lipschitz=False)
    draw_report(report, tmp_path / "none.svg")
    assert "left alone" in (tmp_path / "none.svg").read_text()
    report = inspect_model(timm.create_model("test_resnet"), "proxgd", pattern="all", lipschitz=False)
    with pytest.raises(OptionError, match="constants"):
        draw_report(report, tmp_path / "none.png")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("timm/vgg61",), "Did you mean 'vgg19'"),
        (("vgg16",), "Did you mean 'timm/vgg16'"),
        (("hf//nowhere/at/all",), "there is none"),
        (("timm/test_resnet", "--iters", "0"), "iters"),
        (("timm/test_resnet", "--option", "decai=0.5"), "Did you mean 'decay'"),
        (("timm/test_resnet", "--option", "decay"), "key=value"),
        (("timm/test_resnet", "--option", "decay=1", "--option", "decay=1"), "twice"),
        (("timm/test_resnet", "--model-arg", "nonsense=1"), "nonsense"),
        (("timm/test_resnet", "--pattern", "norm"), "Unknown pattern"),
        (("timm/test_resnet", "--pattern", "all", "--pattern", "linear"), "alone"),
        (("timm/test_resnet", "--targets", "conv9"), "matches no layer"),
        (("timm/test_resnet", "--nonprox", "drop"), "nonprox"),
        (("timm/test_resnet", "--p", "1.5"), "rate"),
        (("timm/test_resnet", "--figure", "blocks.jpg"), ".png"),
        (("timm/test_resnet", "--figure", "nowhere/blocks.png"), "existing folder"),
        (("timm/test_resnet", "--figure", "blocks.png", "--no-lipschitz"), "drop one"),
    ],
)
def test_mistakes(capsys, args, message):
    code, out, err = run(capsys, "inspect", *args)
    assert code == 2 and message in err and not out
