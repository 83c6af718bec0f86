"""``solver-plugins finetune``: dry runs, whole runs, and one message with exit code 2 for every mistake."""

from pathlib import Path

import pytest

from solver_plugins.train import FinetuneConfig, read_config
from tests.cli.test_app import run
from tests.train.runs import tiny

RECIPES = Path(__file__).parents[2] / "configs" / "recipes"


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(tiny(tmp_path / "run").to_yaml())
    return path


def test_run_prints_the_comparison(capsys, config, tmp_path):
    code, out, err = run(capsys, "finetune", str(config), "baseline=true")
    assert code == 0 and "Traceback" not in err
    assert "37 examples" in out and "solver (proxgd, iters=3)" in out and "baseline" in out
    assert (tmp_path / "run" / "report.html").is_file()
    assert "baseline: true" in (tmp_path / "run" / "config.yaml").read_text()


def test_dry_run_writes_nothing(capsys, config, tmp_path):
    code, out, _ = run(capsys, "finetune", str(config), "--dry-run", "epochs=3")
    assert code == 0 and not (tmp_path / "run").exists()
    assert "epochs: 3" in out and "1 of 6 layers become proxgd" in out
    assert "3 epochs of 4 = 12" in out and "TFLOPs" in out and "images of 1x8x8" in out


def test_quickstart_recipe(capsys, tmp_path):
    code, out, _ = run(capsys, "finetune", str(RECIPES / "quickstart.yaml"), "--dry-run", f"output={tmp_path / 'run'}")
    assert code == 0 and "layers become proxsg" in out and "runs: solver, baseline" in out


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_is_valid(path):
    assert read_config(path).output == f"runs/{path.stem}"


@pytest.mark.parametrize(
    "name", ["lenet_cifar10_dd", "lenet_cifar10_dnd", "lenet_cifar10_ndd", "alexnet_cifar10_proxgd"]
)
def test_recipes_of_the_papers_networks(capsys, tmp_path, name):
    """On the digits, as there is no network here: everything else is the recipe's."""
    changes = ("data.name=digits", "data.image=image", "data.train=train", f"output={tmp_path / 'run'}")
    code, out, err = run(capsys, "finetune", str(RECIPES / f"{name}.yaml"), "--dry-run", *changes)
    assert code == 0, err
    assert "images of 3x32x32" in out and "layers become" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("epoch=3",), "Did you mean 'epochs'"),
        (("model.spec=timm/vgg61",), "timm has no model 'vgg61'"),
        (("model.weights=/none.safetensors",), "found nothing at /none.safetensors"),
        (("data.name=/none",), "There is no data set at '/none'"),
        (("data.train=train[:0]",), "found none"),
        (("model.args.num_classes=4",), "asks for 4 classes; the data has 10"),
        (("solver.name=fsta",), "Did you mean 'fista'"),
        (("solver.args.lamm=1",), "Did you mean 'lam'"),
        (("solver.targets=[nothing]",), "nothing"),
        (("optimizer.opt=adamm",), "adamm"),
        (("precision=fp16",), "needs a GPU"),
        (("--resume", "--overwrite"), "found both"),
    ],
)
def test_mistakes_are_one_message(capsys, config, arguments, message):
    code, out, err = run(capsys, "finetune", str(config), *arguments)
    assert code == 2 and not out
    assert err.startswith("Error: ") and message in err and "Traceback" not in err
    # So that the next try, without the mistake, is not refused.
    assert not (config.parent / "run").exists()


def test_output_of_another_run(capsys, config, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("a run")
    code, _, err = run(capsys, "finetune", str(config))
    assert code == 2 and "already holds a run" in err
    assert (tmp_path / "run" / "config.yaml").read_text() == "a run"


def test_options_are_those_of_the_docs(capsys):
    """Paste the output of ``solver-plugins finetune --options`` into docs/finetuning.md where this fails."""
    code, out, _ = run(capsys, "finetune", "--options")
    assert code == 0 and out in (RECIPES.parents[1] / "docs" / "finetuning.md").read_text()


def test_a_config_is_needed(capsys):
    code, _, err = run(capsys, "finetune")
    assert code == 2 and "--options" in err


def test_example_of_the_docs_is_a_config():
    text = (RECIPES.parents[1] / "docs" / "finetuning.md").read_text()
    example = text.partition("## Your own images\n\n```yaml\n")[2].partition("```")[0]
    assert FinetuneConfig.from_yaml(example).solver.solver == "proxgd"
