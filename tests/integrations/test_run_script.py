"""Scripts that know nothing of this package, run with their model converted."""

import sys
import textwrap

import pytest

from solver_plugins.cli import main
from solver_plugins.errors import OptionError
from solver_plugins.integrations.scripts import run_script

TIMM = """
    import argparse, pathlib
    from timm.models import create_model
    import helper  # Beside the script.
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    args = parser.parse_args()
    teacher_first = create_model("test_vit", act_layer="relu")
    second = create_model("test_vit", act_layer="relu")
    names = [type(model.blocks[0].mlp.fc1).__name__ for model in (teacher_first, second)]
    pathlib.Path(args.out).write_text(" ".join([*names, __name__, helper.WORD]))
"""
TRAINER = """
    import pathlib, sys, transformers
    settings = transformers.ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
                                      image_size=8, patch_size=4, hidden_act="relu")
    model = transformers.AutoModelForImageClassification.from_config(settings)
    args = transformers.TrainingArguments(sys.argv[1] + ".d", report_to="none", use_cpu=True)
    trainer = transformers.Trainer(model, args)
    names = [type(one).__name__ for one in trainer.callback_handler.callbacks]
    pathlib.Path(sys.argv[1]).write_text(" ".join([type(model.vit.layers[0].mlp.fc1).__name__, *names]))
"""


def written(folder, text, name="script.py"):
    (folder / "helper.py").write_text("WORD = 'beside'")
    (folder / "solver.yaml").write_text("solver: proxgd\niters: 2\n")
    (folder / name).write_text(textwrap.dedent(text))
    return folder / name


def test_the_first_model_of_a_timm_script_is_converted(tmp_path, monkeypatch):
    script = written(tmp_path, TIMM)
    with pytest.raises(SystemExit) as ended:
        main(["run", str(script), "--out", str(tmp_path / "out"), f"--solver-config={tmp_path / 'solver.yaml'}"])
    assert not ended.value.code
    monkeypatch.delitem(sys.modules, "helper")
    assert (tmp_path / "out").read_text() == "SolverLinear Linear __main__ beside"


def test_a_trainer_gets_the_callback(tmp_path):
    script = written(tmp_path, TRAINER)
    run_script(script, [str(tmp_path / "out")], tmp_path / "solver.yaml")
    first, *callbacks = (tmp_path / "out").read_text().split()
    assert first == "SolverLinear" and "SolverCallback" in callbacks
    run_script(script, [str(tmp_path / "plain")])
    first, *callbacks = (tmp_path / "plain").read_text().split()
    assert first == "Linear" and "SolverCallback" not in callbacks


def test_what_cannot_be_run(tmp_path):
    with pytest.raises(OptionError, match="there is no file"):
        run_script(tmp_path / "none.py")
    script = written(tmp_path, "import torch\nmodel = torch.nn.Linear(2, 2)\n")
    with pytest.raises(OptionError, match="made no model"):
        run_script(script, [], tmp_path / "solver.yaml")
    (tmp_path / "solver.yaml").write_text("solver: proxgdd\n")
    with pytest.raises(Exception, match="Did you mean"):
        run_script(script, [], tmp_path / "solver.yaml")
