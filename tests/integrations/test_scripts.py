"""Solver files, as the patched scripts read them."""

import pytest
import timm

from solver_plugins import conversion_of
from solver_plugins.errors import OptionError, UnknownNameError
from solver_plugins.integrations.scripts import convert_from_file
from solver_plugins.surgery import ConversionSpec


def test_a_model_is_converted(tmp_path):
    file = tmp_path / "solver.yaml"
    file.write_text("solver: proxsg\niters: 4\ntargets: [fc2]\nlam: 1e-2\neval_mode: stochastic\n")
    model = timm.create_model("solver_lenet")
    assert convert_from_file(model, file) is model
    (block,) = conversion_of(model).blocks
    assert (block.layer, block.solver) == ("fc2", "proxsg")
    assert (model.fc2.solver.config.iters, model.fc2.solver.config.lam) == (4, 0.01)
    assert model.fc2.solver.config.eval_mode == "stochastic"


def test_an_empty_file_has_defaults(tmp_path):
    (tmp_path / "solver.yaml").write_text("")
    assert ConversionSpec.from_file(tmp_path / "solver.yaml").solver == "proxsg"


@pytest.mark.parametrize(("text", "error", "message"), [
    ("itters: 4", OptionError, "'solver.yaml' has no option 'itters'. Did you mean 'iters'"),
    ("target: [fc]", OptionError, "has no option 'target'. Did you mean 'targets'"),
    ("solver: proxgd\ndecay: 1", OptionError, "has no option 'decay'"),
    ("options_of_solver: {}", OptionError, "has no option 'options_of_solver'"),
    ("iters: '4'", OptionError, "option 'iters': expected an integer, found '4'"),
    ("lam: -1", OptionError, "lam"),
    ("solver: proxsd", UnknownNameError, "Did you mean 'proxsg'"),
    ("- 1", OptionError, "takes a mapping"),
    ("a: [", OptionError, "not valid YAML"),
])  # fmt: skip
def test_mistakes(tmp_path, text, error, message):
    file = tmp_path / "solver.yaml"
    file.write_text(text)
    model = timm.create_model("solver_lenet")
    with pytest.raises(error, match=message):
        convert_from_file(model, file)
    assert type(model.fc1).__name__ == "Linear"


def test_no_such_file(tmp_path):
    with pytest.raises(OptionError, match=r"Cannot read 'solver.yaml': No such file"):
        ConversionSpec.from_file(tmp_path / "solver.yaml")
    (tmp_path / "solver.txt").write_text("")
    with pytest.raises(OptionError, match=r"ending in .json, .yaml, .yml; found 'solver.txt'"):
        ConversionSpec.from_file(tmp_path / "solver.txt")
