"""A conversion as data: one spec for Python, YAML, files, the command line and JSON, and one way to apply it."""

import json
import subprocess
import sys

import pytest
import timm
import torch
from torch import nn

from solver_plugins import (
    apply_conversion,
    calibrate,
    conversion_of,
    convert_model,
    declare_activation,
    inspect_model,
    list_solvers,
    load,
    revert_model,
    save,
)
from solver_plugins.blocks import blocks_of
from solver_plugins.errors import InputError, OptionError, UnknownNameError
from solver_plugins.prox import Monotone
from solver_plugins.surgery import Conversion, ConversionError, ConversionSpec, TargetError, plan_conversion
from solver_plugins.train import read_config
from tests.surgery.test_convert import MODELS, X, convert, make


def test_options_of_the_solver_stand_beside_the_fields_or_under_args():
    flat = ConversionSpec.parse({"solver": "proxgd", "iters": 3, "lam": 0.1, "targets": ["fc1", "fc2"]})
    assert (flat.solver, flat.iters, flat.args, flat.targets) == ("proxgd", 3, {"lam": 0.1}, ("fc1", "fc2"))
    assert flat == ConversionSpec.parse({"name": "proxgd", "args": {"lam": 0.1, "iters": 3}, "targets": ["fc1", "fc2"]})
    assert flat == ConversionSpec.of("proxgd", {"iters": 3, "lam": 0.1, "targets": iter(["fc1", "fc2"])})
    assert ConversionSpec.from_json(flat.to_json()) == ConversionSpec.from_yaml(flat.to_yaml()) == flat
    assert flat.make_solver().config.lam == 0.1 and ConversionSpec(solver="proxsg").make_solver(0.25).config.p == 0.25


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"solver": "proxdg"}, UnknownNameError, "Unknown solver 'proxdg'. Did you mean 'proxsg' or 'proxgd'"),
    ({"lamm": 1}, OptionError, "ConversionSpec has no option 'lamm'. Did you mean 'lam'"),
    ({"target": 1}, OptionError, "ConversionSpec has no option 'target'. Did you mean 'targets'"),
    ({"options": {"lam": 1}}, OptionError, "stand beside the others, or under 'args'"),
    ({"solver": "proxgd", "eval_mode": "stochastic"}, OptionError, "This solver is deterministic, in training too"),
    ({"lam": -1}, OptionError, "option 'lam': expected a value greater than or equal to 0, found -1"),
    ({"iters": 0}, OptionError, "option 'iters': expected a value greater than or equal to 1"),
    ({"solver": "proxsg", "name": "proxsg"}, OptionError, "option 'solver' is given twice"),
    ({"lam": 1, "args": {"lam": 1}}, OptionError, "option 'lam' is given twice"),
    ({"args": 3}, OptionError, "option 'args': expected a valid dictionary"),
    ({"pattern": 3}, OptionError, "Expected names of patterns"),
    ({"pattern": ["all", "linear"]}, OptionError, "Expected the pattern 'all' alone"),
    ({"pattern": ["linaer"]}, OptionError, "Unknown pattern 'linaer'. Did you mean 'linear'"),
    ({"targets": "fc("}, TargetError, "option 'targets': .* is not a regular expression"),
    ({"exclude": []}, TargetError, "option 'exclude': .* not empty"),
    ({"p": 1.0}, OptionError, r"Expected a rate p in \[0, 1\); found 1.0"),
    ({"solver": "fista", "p": 0.5}, OptionError, "A deterministic solver draws nothing"),
    ({"blend": 2}, OptionError, r"Expected a blend in \[0, 1\]; found 2"),
    ({"blend": True}, OptionError, r"Expected a blend in \[0, 1\]; found True"),
    ({"last": 1}, OptionError, "Expected last to be True, False or None; found 1"),
    ({"nonprox": "drop"}, OptionError, "option 'nonprox': expected 'keep' or 'skip', found 'drop'"),
    ({"calibrate": 0}, OptionError, "option 'calibrate': expected a value greater than or equal to 1"),
    ({"calibrate": "4"}, OptionError, "option 'calibrate': expected an integer, found '4'"),
    ({"calibrate": []}, InputError, "at least one batch"),
    ([1], OptionError, "takes a mapping of options; found list"),
])  # fmt: skip
def test_mistakes_are_told_without_a_model(options, error, message):
    with pytest.raises(error, match=message):
        ConversionSpec.parse(options)


def test_a_finetune_config_is_checked_when_it_is_read(tmp_path):
    """Neither the data nor the model exist: nothing of them is looked at."""
    file = tmp_path / "run.yaml"
    file.write_text("model: {spec: timm/none}\ndata: {name: /none}\nsolver: {name: proxdg}\noutput: there\n")
    with pytest.raises(UnknownNameError, match=r"Unknown solver 'proxdg'\. Did you mean 'proxsg' or"):
        read_config(file)
    with pytest.raises(OptionError, match=r"The config 'run.yaml' has no option 'solver.lamm'. Did you mean 'lam'"):
        read_config(file, ["solver.name=proxgd", "solver.lamm=1"])
    found = read_config(file, ["solver.name=proxgd", "solver.lam=1", "solver.calibrate=2"]).solver
    assert found == ConversionSpec(solver="proxgd", calibrate=2, args={"lam": 1})


def test_a_ready_spec_stands_for_all_options():
    spec = ConversionSpec.parse({"solver": "proxgd", "iters": 3, "pattern": "all", "lam": 0.1})
    one, other = convert(make(), spec), convert(make(), "proxgd", 3, pattern="all", lam=0.1)
    assert conversion_of(one) == conversion_of(other) and conversion_of(one).spec == spec
    report = inspect_model(make(), spec, example_inputs=X, lipschitz=False)
    assert report.spec == spec and report.to_dict()["spec"]["args"] == {"lam": 0.1}
    for call in (convert, lambda *args, **more: inspect_model(*args, example_inputs=X, **more)):
        for more in ({"iters": 4}, {"lam": 0.2}, {"targets": ["fc1"]}):
            with pytest.raises(OptionError, match=f"ConversionSpec alone; found {next(iter(more))} beside it"):
                call(make(), spec, **more)


@pytest.mark.parametrize("solver", list_solvers())
@pytest.mark.parametrize("name", ["convnet", "prelu", "timm_resnet"])
def test_what_is_planned_is_what_is_done(name, solver):
    """The conversion of the plan, that of the converted model, and that of a replayed one are equal."""
    build, x = MODELS[name]
    rate = {"p": 0.3} if solver in list_solvers("sampling") else {}
    spec = ConversionSpec.of(solver, {"iters": 2, "pattern": "all", **rate})
    model = build()
    plan = plan_conversion(model, spec, x)
    assert not blocks_of(model)
    convert_model(model, spec, example_inputs=x)
    assert plan.conversion == conversion_of(model) and plan.conversion.spec == spec and not plan.priors
    again = apply_conversion(build(), Conversion.from_json(plan.conversion.to_json()))
    assert conversion_of(again) == plan.conversion
    assert conversion_of(apply_conversion(revert_model(model), plan.conversion)) == plan.conversion


class Arctan(nn.Module):
    """An activation of the user's."""

    def forward(self, v):
        return v.atan()


def test_an_activation_without_a_name_converts_but_cannot_be_written_down():
    declare_activation(Arctan, Monotone(Arctan()))
    model = make(act=Arctan)
    plan = plan_conversion(model, ConversionSpec(solver="proxgd", iters=3), X)
    assert plan.priors.keys() == {"conv3", "fc1"}
    with pytest.raises(ConversionError, match="conv3: its prior has no registered name, so it cannot be written down"):
        plan.conversion.to_json()
    with pytest.raises(ConversionError, match="conv3: its prior has no registered name and is not among the priors"):
        apply_conversion(model, plan.conversion)
    assert not blocks_of(model)
    apply_conversion(model, plan.conversion, plan.priors)
    assert torch.equal(model.eval()(X), convert(make(act=Arctan), "proxgd", 3).eval()(X))


def test_functions_choose_layers_but_cannot_be_written_down():
    def chosen(name, module):
        return name == "fc1"

    spec = ConversionSpec(solver="proxgd", targets=chosen)
    for write in (spec.to_json, spec.to_yaml):
        with pytest.raises(OptionError, match="to write them down; found a function"):
            write()
    model = convert(make(), spec)
    assert list(blocks_of(model)) == ["fc1"]
    assert conversion_of(model).spec is None and Conversion.from_json(conversion_of(model).to_json())
    assert inspect_model(make(), spec, example_inputs=X).to_dict()["spec"] is None


def test_a_saved_model_says_how_it_was_made(tmp_path):
    spec = ConversionSpec(solver="proxgd", iters=3, targets=("fc1",), blend=0.5, args={"lam": 0.1})
    save(convert_model(timm.create_model("solver_lenet"), spec), tmp_path / "saved")
    assert conversion_of(load(tmp_path / "saved")).spec == spec
    halves = nn.Sequential(make(), make())
    for half, iters in zip(halves, (2, 3), strict=True):
        convert(half, "proxgd", iters)
    assert conversion_of(halves[1]).spec.iters == 3 and conversion_of(halves).spec is None
    assert all("_conversion_spec" not in vars(module) for module in revert_model(halves).modules())


def test_another_format_is_refused():
    data = conversion_of(convert(make(), "proxgd")).options()
    for found, remedy in ((1, "convert the plain model again"), (3, "upgrade solver_plugins"), ("x", "again")):
        with pytest.raises(OptionError, match=f"expected a conversion of format 2; found format {found!r}.*{remedy}"):
            Conversion.parse({**data, "format": found})


def test_calibrated_at_once():
    batches = [X, 2 * X, X - 1]
    expected = convert(make(), "proxgd", 5, pattern="all")
    calibrate(expected, batches, progress=False)
    for given in (batches, iter(batches)):
        model = convert(make(), "proxgd", 5, pattern="all", calibrate=given)
        assert torch.equal(model.eval()(X), expected.eval()(X)) and conversion_of(model).spec.calibrate == 3
    first = convert(make(), "proxgd", 5, pattern="all", calibrate=batches[:1])
    spec = ConversionSpec(solver="proxgd", iters=5, pattern="all", calibrate=1)
    model = convert(make(), spec, calibrate=batches)
    assert torch.equal(model.eval()(X), first.eval()(X)) and conversion_of(model).spec == spec
    assert inspect_model(make(), "proxgd", calibrate=batches, example_inputs=X).spec.calibrate == 3


def test_calibration_that_fails_leaves_a_plain_model():
    for given, error, message in (
        (X, InputError, "found Tensor. For a single batch"),
        ([], InputError, "at least one batch"),
        ([X * torch.inf], InputError, "not finite"),
    ):
        model = make()
        with pytest.raises(error, match=message):
            convert(model, "proxgd", calibrate=given)
        assert not blocks_of(model)
    with pytest.raises(OptionError, match="Expected batches, as this conversion is calibrated on 4"):
        convert(make(), ConversionSpec(solver="proxgd", calibrate=4))


DUMMY = '    colour: int = Field(7, ge=0, description="A dummy of this test.")\n\n'
PATCHED = f"""
import importlib.abc
import importlib.machinery
import importlib.util
import sys


class Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, name):
        before, mark, after = self.get_source(name).partition("    hints: ClassVar")
        return compile(before + {DUMMY!r} + mark + after, self.path, "exec")


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "solver_plugins.surgery.spec":
            return None
        file = path[0] + "/spec.py"
        return importlib.util.spec_from_file_location(name, file, loader=Loader(name, file))


sys.meta_path.insert(0, Finder())
"""
CHECKS = """
import contextlib
import io
import json
import pathlib

import torch
from torch import nn

from solver_plugins import apply_conversion, conversion_of, convert_model, inspect_model
from solver_plugins.cli import main
from solver_plugins.errors import OptionError
from solver_plugins.integrations.scripts import convert_from_file
from solver_plugins.surgery import Conversion
from solver_plugins.train import FinetuneConfig

found = {}
x = torch.randn(2, 4)


def net():
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU())


model = convert_model(net(), "proxgd", colour=3, example_inputs=x)
found["convert_model"] = conversion_of(model).spec.colour
text = conversion_of(model).to_json()
found["JSON"] = json.loads(text)["spec"]["colour"]
found["replayed"] = conversion_of(apply_conversion(net(), Conversion.from_json(text))).spec.colour
report = inspect_model(net(), "proxgd", colour=3, example_inputs=x)
found["inspect_model"] = report.to_dict()["spec"]["colour"]

run = "model: {spec: timm/none}\\noutput: none\\nsolver: {name: proxgd, colour: %s}\\n"
config = FinetuneConfig.from_yaml(run % 3)
found["YAML"] = FinetuneConfig.from_yaml(config.to_yaml()).solver.colour
pathlib.Path("solver.yaml").write_text("solver: proxgd\\ncolour: 3\\ntargets: [fc1]\\npattern: all\\n")
import timm
found["file"] = conversion_of(convert_from_file(timm.create_model("solver_lenet"), "solver.yaml")).spec.colour


def cli(*args):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main(args)
    return out.getvalue()


shown = cli("inspect", "timm/solver_lenet", "--solver", "proxgd", "--colour", "3", "--json", "--no-lipschitz")
found["CLI"] = json.loads(shown)["spec"]["colour"]
found["help"] = "A dummy of this test." in " ".join(cli("inspect", "--help").replace("│", " ").split())
found["options"] = "  colour: 7  # A dummy of this test." in cli("finetune", "--options")
found["messages"] = []
for wrong in (
    lambda: convert_model(net(), "proxgd", colur=3, example_inputs=x),
    lambda: inspect_model(net(), "proxgd", colour=-1, example_inputs=x),
    lambda: FinetuneConfig.from_yaml(run % "red"),
):
    try:
        wrong()
    except OptionError as error:
        found["messages"].append(str(error))
print(json.dumps(found))
"""


def test_a_new_option_is_one_field(tmp_path):
    """One line in spec.py, put in while it is imported, is an option everywhere; no other file knows its name."""
    done = subprocess.run(
        [sys.executable, "-c", PATCHED + CHECKS], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    unknown, negative, word = found.pop("messages")
    assert found.pop("help") and found.pop("options")
    assert set(found.values()) == {3} and len(found) == 7, found
    assert "has no option 'colur'. Did you mean 'colour'" in unknown
    assert "option 'colour': expected a value greater than or equal to 0, found -1" in negative
    assert "option 'solver.colour': expected a valid integer" in word
