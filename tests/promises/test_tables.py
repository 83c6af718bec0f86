"""The tables are complete: every registered solver has a row, every model has something to convert."""

import pytest
import torch

from solver_plugins import list_solvers
from solver_plugins.surgery import ConversionSpec, plan_conversion
from tests.promises.cases import EVERYWHERE, MODELS, PAIRS, SOLVERS, build


def test_every_registered_solver_has_a_row():
    assert set(SOLVERS) == set(list_solvers())
    assert {solver for _, solver in PAIRS} == set(SOLVERS)
    assert {model for model, _ in PAIRS} == set(MODELS)


@pytest.mark.parametrize("model", MODELS)
def test_every_model_has_a_block_for_each_kind_of_solver(model):
    plain, example = build(model), MODELS[model].inputs(torch.float32)
    for solver in EVERYWHERE:
        plan = plan_conversion(plain, ConversionSpec.of(solver, {"pattern": "all", **SOLVERS[solver]}), example)
        assert plan.selection.chosen, plan.selection.explain()
