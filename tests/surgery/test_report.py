"""The dry run as data and as a table."""

import json

import pytest
import timm
import torch
from torch import nn

from solver_plugins import inspect_model
from solver_plugins.blocks import TrackedStep
from solver_plugins.errors import OptionError
from tests.surgery.test_convert import X, make


def test_rows_totals_and_json():
    model = make()
    report = inspect_model(model, "proxsg", iters=10, example_inputs=X)
    assert not any(isinstance(module, TrackedStep) for module in model.modules()), "a dry run changes nothing"
    rows = {row.name: row for row in report.rows}
    assert list(rows) == ["conv1", "conv2", "conv3", "fc1", "fc2"]
    fc1 = rows["fc1"]
    assert (fc1.converted, fc1.pattern, fc1.p, fc1.tau, fc1.prior, fc1.cost) == (
        True, "dropout-linear-act", 0.5, 3, "relu", 19.0,
    )  # fmt: skip
    exact = float(torch.linalg.matrix_norm(model.fc1.weight.detach(), 2)) ** 2
    assert pytest.approx(exact, rel=1e-3) == fc1.L and fc1.step == pytest.approx(1 / (fc1.L + 1e-3))
    assert not rows["conv1"].converted and "not converted by sampling solvers" in rows["conv1"].reason
    data = json.loads(report.to_json())
    assert data["totals"] == {
        "layers": 5, "converted": 2, "patterns": {"dropout-linear-act": 1, "dropout-linear": 1},
    }  # fmt: skip


def test_table():
    text = str(inspect_model(make(), "proxgd", iters=3, pattern="all", example_inputs=X))
    assert "5 of 5 layers become proxgd" in text and "linear-norm-skip-act" in text and "5x" in text
    text = str(inspect_model(make(), "rcd", example_inputs=X))
    assert "0 of 5 layers" in text and "left alone" in text


def test_coordinates_count_outputs():
    report = inspect_model(make(), "rcd", p=0.25, example_inputs=X, lipschitz=False)
    rows = {row.name: row for row in report.converted}
    assert rows["conv3"].tau == round(0.75 * 6) and rows["conv3"].L is None


def test_real_model_and_bad_options():
    report = inspect_model(timm.create_model("test_resnet"), "proxgd", pattern="all", lipschitz=False)
    assert {row.pattern for row in report.converted} >= {"linear-norm-act", "linear-norm-skip-act"}
    with pytest.raises(OptionError, match="iters"):
        inspect_model(nn.Linear(2, 2), "proxgd", itrs=3)
