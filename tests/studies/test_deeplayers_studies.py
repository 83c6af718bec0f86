"""The tables of "Deep Layers as Stochastic Solvers": what is converted, what is searched, and what the report says."""

import json

import pytest
import torch
from torch import nn

from solver_plugins.blocks import SolverBlock
from solver_plugins.errors import OptionError, SolverPluginsError
from solver_plugins.studies import Cell, CellError, Context, Results, read_study_config, run_study
from solver_plugins.studies.deeplayers_solvers import DeepLayersSolvers, _reached
from solver_plugins.studies.deeplayers_table2 import DeepLayersTable2
from solver_plugins.studies.deeplayers_table3 import DeepLayersTable3
from solver_plugins.studies.deeplayers_table4 import CifarVGG, DeepLayersTable4
from solver_plugins.studies.deeplayers_table5 import DeepLayersTable5
from solver_plugins.studies.images import Images
from solver_plugins.studies.searched import FINAL, SEARCH
from solver_plugins.studies.study import Measured
from solver_plugins.train.optimizer import make_optimizer, make_schedule
from solver_plugins.train.tensors import Part

ONE = Part(torch.zeros(1, 3, 32, 32), torch.zeros(1))


def study(made, *changes, scale="paper"):
    found = made(read_study_config(made.name, scale, changes))
    found._images = Images(ONE, ONE, ONE, 10)
    return found


def blocks(model):
    return {name: part for name, part in model.named_modules() if isinstance(part, SolverBlock)}


def solved(made, group, arm):
    model = made.make(group)
    return made._solved(model, group, arm, ONE.images)


@pytest.mark.parametrize(("variant", "names"), [("d-d", ["fc1", "fc2"]), ("d-nd", ["fc1"]), ("nd-d", ["fc2"])])
def test_lenet_has_solvers_where_its_dropouts_were(variant, names):
    table = study(DeepLayersTable2)
    found = blocks(solved(table, variant, "proxsg"))
    assert list(found) == names
    for block in found.values():
        solver = block.solver
        assert (solver.name, solver.config.iters, solver.config.lam, solver.config.step) == ("proxsg", 10, 1e-3, "exp")
        assert solver.tau(block.in_features) == block.in_features // 2
        assert solver.samples_in_evaluation
    plain = solved(table, variant, "dropout")
    assert not blocks(plain) and sum(isinstance(part, nn.Dropout) for part in plain.modules()) == len(names)


def test_sampling_rates_are_those_of_the_paper():
    table = study(DeepLayersTable5, "width=0.0625")
    found = {}
    for p in table.groups():
        (block,) = blocks(solved(table, p, "proxsg")).values()
        found[p] = block.solver.tau(block.in_features)
    # The third column of Table 5.
    assert found == {0.0: 512, 0.1: 461, 0.5: 256, 0.9: 51, 0.95: 26}
    assert [layer.p for layer in table.make(0.95).modules() if isinstance(layer, nn.Dropout)] == [0.5, 0.95]


@pytest.mark.parametrize(
    ("arm", "names", "solver", "live"),
    [
        ("proxsg-nd-d", ["head.fc2"], "proxsg", {"head.drop1"}),
        ("proxsg-d-d", ["head.fc1", "head.fc2"], "proxsg", set()),
        ("proxgd", ["head.fc1", "head.fc2"], "proxgd", {"head.drop1", "head.drop2"}),
    ],
)
def test_fully_connected_layers_of_vgg(arm, names, solver, live):
    table = study(DeepLayersTable4, "width=0.0625", "features=24")
    model = solved(table, "CIFAR-10", arm).train()
    found = blocks(model)
    assert list(found) == names and {block.solver.name for block in found.values()} == {solver}
    assert all(block.solver.config.iters == 30 for block in found.values())
    ones = torch.ones(4, 32)
    dropping = {name for name in ("head.drop1", "head.drop2") if (model.get_submodule(name)(ones) == 0).any()}
    assert dropping == live


def test_the_first_convolution_of_alexnet():
    table = study(DeepLayersTable3)
    assert list(blocks(solved(table, "CIFAR-10", "proxgd"))) == ["conv1"]


def test_vgg_of_the_paper():
    model = CifarVGG(3, 10, 1.0, 512, (0.5, 0.5), False)
    convolutions = [layer.out_channels for layer in model.body if isinstance(layer, nn.Conv2d)]
    assert convolutions == [64] * 2 + [128] * 2 + [256] * 3 + [512] * 6
    # 13 convolutions of 3x3, by hand, and three linear layers.
    sizes = list(zip([3, *convolutions], convolutions, strict=False))
    expected = sum(9 * a * b + b for a, b in sizes) + 2 * (512 * 512 + 512) + 512 * 10 + 10
    assert sum(one.numel() for one in model.parameters()) == expected


def rates_of(fitting, *epochs):
    """Returns the step sizes in the middle of epochs of two steps."""
    settings = fitting.settings()
    optimizer = make_optimizer(settings, nn.Linear(1, 1))
    schedule, found = make_schedule(settings, optimizer, 2), []
    for epoch in epochs:
        schedule.step_update(2 * epoch + 1)
        found.append(optimizer.param_groups[0]["lr"])
    return found


def test_schedules_of_the_paper():
    for name in ("deeplayers-table2", "deeplayers-table3", "deeplayers-table4", "deeplayers-table5"):
        config = read_study_config(name, "paper")
        whole = config.fitting.model_copy(update={"lr": config.search.rates[0]})
        if config.first is not None:
            assert rates_of(whole, 0, 99, 100, 199) == pytest.approx([1e-3, 1e-3, 1e-4, 1e-4])
            whole = config.first
        rates = rates_of(whole, 0, 99, 100, 199, 200, 299)
        assert rates == pytest.approx([1e-2, 1e-2, 1e-3, 1e-3, 1e-4, 1e-4]) and whole.epochs == 300
        assert (whole.momentum, whole.weight_decay) == (0.9, 5e-4)


def searched(*scores):
    return Results(
        Measured(
            Cell(arm, 0, (("variant", "d-d"), ("stage", SEARCH), ("lr", rate))),
            {"validation_accuracy": score}, 0.0, 0.0,
        )
        for arm, rate, score in scores
    )  # fmt: skip


def test_each_arm_takes_its_own_best_step_size():
    table = study(DeepLayersTable2, "search.rates=[0.01, 0.03, 0.1]")
    results = searched(
        ("dropout", 0.01, 20.0), ("dropout", 0.03, 30.0), ("dropout", 0.1, 10.0),
        ("proxsg", 0.01, 50.0), ("proxsg", 0.03, 40.0), ("proxsg", 0.1, None),
    )  # fmt: skip
    cells = {arm: Cell(arm, 2, (("variant", "d-d"), ("stage", FINAL))) for arm in table.arms()}
    assert table._best(cells["dropout"], results)["lr"] == 0.03 and table._best(cells["proxsg"], results)["lr"] == 0.01
    with pytest.raises(OptionError, match="smaller"):
        table._best(cells["proxsg"], searched(("proxsg", 0.01, None)))


def test_solvers_and_iterations_are_arms():
    table = study(DeepLayersSolvers, "iterations={proxsg: [2, 7], fista: [3]}")
    assert table.arms() == ("dropout", "proxsg-2", "proxsg-7", "fista-3")
    for arm in table.arms()[1:]:
        model = solved(table, "d-d", arm).train()
        found = blocks(model)
        assert list(found) == ["fc1", "fc2"]
        assert {f"{one.solver.name}-{one.solver.config.iters}" for one in found.values()} == {arm}
        # A deterministic solver leaves the dropouts live; a sampling one has taken them over.
        assert bool((model.drop2(torch.ones(4, 32)) == 0).any()) == (arm == "fista-3")


def test_time_to_an_accuracy():
    curves = {"validation_accuracy": [10.0, 30.0, 20.0, 40.0], "cpu_seconds": [1.5, 3.0, 4.5, 6.0]}
    one = Measured(Cell("proxgd-3", 0), {"curves": curves}, 0.0, 0.0)
    assert _reached(one, 30.0, "cpu_seconds") == 3.0 and _reached(one, 30.0, "epoch") == 2.0
    assert _reached(one, 41.0, "epoch") is None and _reached(one, None, "epoch") is None


SMALL = ["variants=[d-d]", "controls=[]", "data.train=train[:64]", "fitting.epochs=1"]


def test_a_step_size_that_diverges_is_not_taken(tmp_path):
    config = read_study_config("deeplayers-table2", "smoke", [*SMALL, "search.rates=[0.03, 1e30]", "seeds=[0, 1]"])
    outcome = run_study("deeplayers-table2", config, tmp_path)
    cells = outcome.metrics["cells"]
    search = [cell for cell in cells if cell["stage"] == SEARCH]
    # The search is the same for both arms, and for one seed alone.
    assert {(cell["arm"], cell["lr"], cell["seed"]) for cell in search} == {
        (arm, rate, 0) for arm in ("dropout", "proxsg") for rate in (0.03, 1e30)
    }
    assert {cell["lr"] for cell in search if cell["diverged"]} == {1e30}
    assert all("accuracy" not in cell for cell in search)
    final = [cell for cell in cells if cell["stage"] == FINAL]
    assert len(final) == 4 and {cell["lr"] for cell in final} == {0.03}
    for cell in final:
        sampling = cell["arm"] == "proxsg"
        assert (cell["trial_spread"] is not None) == (cell["deterministic_accuracy"] is not None) == sampling
    table, gain, rates = outcome.tables
    assert len(table.rows) == 2 and rates.rows[0][2] == "-"
    accuracies = {(cell["arm"], cell["seed"]): cell["accuracy"] for cell in final}
    gains = [accuracies["proxsg", seed] - accuracies["dropout", seed] for seed in (0, 1)]
    assert outcome.metrics["summary"]["d-d_proxsg_gain"] == pytest.approx(sum(gains) / 2)
    assert gain.rows[0][1] == "+8.47"
    assert outcome.metrics["summary"]["at_the_edge_of_the_search"] == ["d-d_dropout", "d-d_proxsg"]


def test_frozen_convolutions_are_trained_once_and_kept(tmp_path):
    changes = ["drop_rates=[0.0, 0.9]", "search.rates=[0.01]", "fitting.epochs=1", "controls=[]"]
    table = DeepLayersTable5(read_study_config("deeplayers-table5", "smoke", changes))
    first, final = table.stages()
    assert [cell.name for cell in first] == ["first_p=0.5_stage=first_seed=0"] and len(final) == 4
    table.prepare()
    context = Context(folder=tmp_path)
    with pytest.raises(CellError, match=r"first_p=0\.5_stage=first_seed=0"):
        table.run(final[0], context)
    table.run(first[0], context)
    begun = table._begin(table.make(0.9), first[0], context)
    other = table._begin(table.make(0.9), first[0], context)
    assert all(torch.equal(a, b) for a, b in zip(begun.body.parameters(), other.body.parameters(), strict=True))
    assert not torch.equal(begun.head.fc2.weight, other.head.fc2.weight)
    parts = table._inputs(begun, final[0], context)
    begun.body.eval()
    expected = begun.body(table._ready(begun, context)["test"].images)
    assert torch.allclose(parts["test"].images, expected, atol=1e-5)
    assert table._trained(begun) is begun.head
    assert table.run(final[1], context)["accuracy"] >= 0


def test_finetuning_begins_with_the_first_network(tmp_path):
    changes = ["search.rates=[1e-30]", "fitting.weight_decay=0.0", "data.train=train[:32]"]
    config = read_study_config("deeplayers-table3", "smoke", changes)
    outcome = run_study("deeplayers-table3", config, tmp_path)
    cells = {cell["arm"]: cell for cell in outcome.metrics["cells"]}
    # A step of nothing: the plain copy is the network as it was.
    assert cells["plain"]["accuracy"] == cells["first"]["accuracy"]
    assert [row[0] for row in outcome.tables[0].rows] == ["AlexNet, first", "AlexNet, plain", "AlexNet, proxgd"]
    # The paper has no plain copy that was finetuned, so its gain is over the first network.
    assert outcome.tables[1].rows[0][1] == "+1.21"
    kept = tmp_path / "cells" / "first_beside=CIFAR-10_stage=first_seed=0.safetensors"
    assert kept.is_file()
    assert json.loads((tmp_path / "metrics.json").read_text())["summary"]["CIFAR-10_first_accuracy"] is not None


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("deeplayers-table2", "search.rates=[0.1, 0.01]", "rise"),
        ("deeplayers-table2", "data.test=null", "no test"),
        ("deeplayers-table2", "drop_rate=1.0", "less than 1"),
        ("deeplayers-table4", "beside=CIFAR10", "CIFAR-10"),
        ("deeplayers-table5", "drop_rates=[1.0]", r"in \[0, 1\)"),
        ("deeplayers-table5", "first=null", "expected first"),
        ("deeplayers-solvers", "iterations={proxgdd: [3]}", "proxgd"),
        ("deeplayers-solvers", "iterations={proxgd: [0]}", "at least 1"),
    ],
)
def test_wrong_settings_are_refused(name, change, text):
    with pytest.raises(SolverPluginsError, match=text):
        read_study_config(name, "smoke", [change])


@pytest.mark.parametrize(
    ("change", "text"),
    [("variants=[d-x]", "d-nd"), ("variants=[nd-nd]", "No layer"), ("solver.sampled={stepp: exp}", "stepp")],
)
def test_what_cannot_be_made_is_told_before_anything_is_written(tmp_path, change, text):
    config = read_study_config("deeplayers-table2", "smoke", [change, "data.train=train[:8]"])
    with pytest.raises(SolverPluginsError, match=text):
        run_study("deeplayers-table2", config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
