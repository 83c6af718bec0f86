"""The JSON schema of configs, and what shells complete."""

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from solver_plugins.cli import main
from solver_plugins.train.options import json_schema, option_names

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "configs" / "recipes").glob("*.yaml"))


def test_the_shipped_schema_is_that_of_the_code():
    """Write it anew with: solver-plugins finetune --schema > configs/finetune.schema.json"""
    assert (ROOT / "configs" / "finetune.schema.json").read_text() == json_schema()


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_fit_the_schema_that_they_name(path):
    first = path.read_text().splitlines()[0]
    named = (path.parent / first.partition("$schema=")[2]).resolve()
    jsonschema.validate(yaml.safe_load(path.read_text()), json.loads(named.read_text()))


@pytest.mark.parametrize(
    "wrong", [{"epochs": 0}, {"epoch": 3}, {"optimizer": {"lr": "fast"}}, {"data": {"eval": 1.5}}, {"solver": 3}]
)
def test_the_schema_refuses_what_the_code_refuses(wrong):
    right = {"model": {"spec": "timm/vgg16"}, "output": "runs/x", "solver": {"name": "proxgd", "lam": 0.1}}
    schema = json.loads(json_schema())
    jsonschema.validate(right, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**right, **wrong}, schema)


@pytest.fixture
def completed(capsys, monkeypatch):
    """Returns what bash is given to complete the last of some words."""

    def ask(*words):
        monkeypatch.setenv("_SOLVER_PLUGINS_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", " ".join(["solver-plugins", *words]))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        with pytest.raises(SystemExit):
            main([])
        return capsys.readouterr().out.split()

    return ask


def test_shells_complete_commands_recipes_keys_options_and_studies(completed):
    assert "finetune" in completed("fin")
    assert completed("finetune", "quick") == ["quickstart"]
    assert completed("finetune", "quickstart", "optimizer.l") == ["optimizer.lr=", "optimizer.layer_decay="]
    assert "--resume" in completed("finetune", "--re")
    assert "deeplayers-table2" in completed("study", "run", "deeplayers-t")
    assert "model.spec" in option_names()
