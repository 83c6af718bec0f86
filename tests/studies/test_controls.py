"""What solvers are compared with: what is put into a network, what is searched, and how differences are reported."""

import pytest
import torch
from torch import nn

from solver_plugins.blocks import SolverBlock
from solver_plugins.dropblock import AveragedDropout
from solver_plugins.errors import OptionError
from solver_plugins.studies import Cell, Results, read_study_config, run_study
from solver_plugins.studies.comparison import paired
from solver_plugins.studies.controls import untuned
from solver_plugins.studies.deeplayers_pretrained import DeepLayersPretrained
from solver_plugins.studies.deeplayers_table2 import DeepLayersTable2
from solver_plugins.studies.deeplayers_table3 import DeepLayersTable3
from solver_plugins.studies.dropblock_regularizer import DropBlockRegularizer
from solver_plugins.studies.images import Images
from solver_plugins.studies.opteq_head import OptEqHeadStudy
from solver_plugins.studies.searched import FINAL, SEARCH
from solver_plugins.studies.study import Measured
from solver_plugins.train.tensors import Part

CONTROLS = ["none", "dropout-tuned", "averaged", "averaged-tuned", "proxsg-tuned", "gain", "biases"]
ONE = Part(torch.zeros(1, 3, 32, 32), torch.zeros(1))


def study(made=DeepLayersTable2, *changes):
    found = made(read_study_config(made.name, "paper", [f"controls={CONTROLS}", *changes]))
    found._images = Images(ONE, ONE, ONE, 10)
    return found


def put(table, arm, p=None, group="d-d"):
    torch.manual_seed(0)
    return table._solved(table.make(group), group, arm, ONE.images, p)


def dropouts(model):
    return [layer.p for layer in model.modules() if isinstance(layer, nn.Dropout)]


def test_what_a_control_puts_into_the_network():
    table, x = study(), torch.randn(3, 3, 32, 32)
    plain = put(table, "dropout").eval()
    assert dropouts(plain) == [0.5, 0.5] and dropouts(put(table, "none")) == [0.0, 0.0]
    assert dropouts(put(table, "dropout-tuned", 0.1)) == [0.1, 0.1]
    averaged = [layer for layer in put(table, "averaged-tuned", 0.2).modules() if isinstance(layer, AveragedDropout)]
    assert [(layer.p, layer.masks) for layer in averaged] == [(0.2, 10)] * 2
    gained, biases = put(table, "gain"), put(table, "biases")
    assert gained.fc1.gain.shape == (120,) and gained.fc2.gain.shape == (84,) and dropouts(gained) == [0.0, 0.0]
    frozen = {name for name, one in biases.named_parameters() if not one.requires_grad}
    assert frozen == {"fc1.weight", "fc2.weight"}
    # In evaluation, every control begins as the same network.
    for model in (put(table, "none"), put(table, "averaged"), gained, biases):
        assert torch.equal(model.eval()(x), plain(x))


@pytest.mark.parametrize(("p", "tau"), [(0.1, 360), (0.0, 400)])
def test_a_tuned_solver_samples_at_its_own_rate(p, tau):
    model = put(study(), "proxsg-tuned", p)
    found = [part for part in model.modules() if isinstance(part, SolverBlock)]
    assert len(found) == 2 and found[0].solver.tau(400) == tau and found[0].solver.samples_in_evaluation


def test_no_dropout_is_a_rate():
    table = study(DeepLayersTable2, "drop_rate=0")
    assert dropouts(put(table, "dropout")) == [0.0, 0.0]
    assert sum(isinstance(part, SolverBlock) for part in put(table, "proxsg").modules()) == 2


def test_convolutions_get_a_gain_per_channel():
    table = study(DeepLayersTable3, "controls=[gain, biases]")
    model = put(table, "gain", group="CIFAR-10")
    channels = model.conv1.layer.out_channels
    assert model.conv1.gain.shape == (channels, 1, 1)
    with torch.no_grad():
        model.conv1.gain[0] = 2.0
    x = torch.randn(1, 3, 32, 32)
    assert torch.allclose(model.conv1(x)[:, 0], 2 * model.conv1.layer(x)[:, 0])


def test_a_pretrained_network_gets_controls_where_its_blocks_are(tmp_path):
    changes = [
        "controls=[gain, biases]", "arms={raw: {}}", "data.train=train[:32]", "search.rates=[1e-3]", "fitting.epochs=1",
    ]  # fmt: skip
    table = DeepLayersPretrained(read_study_config("deeplayers-pretrained", "smoke", changes))
    table.prepare()
    assert dict(table.sites("")) == {"layer3.0.conv1": None, "layer4.0.conv1": None}
    model = table._solved(table.make(""), "", "biases", table._images.train.images[:1])
    frozen = {name for name, one in model.named_parameters() if not one.requires_grad}
    assert frozen == {"layer3.0.conv1.weight", "layer4.0.conv1.weight"}
    outcome = run_study(table.name, table.config, tmp_path)
    main, differences, _ = outcome.tables
    assert [row[0] for row in main.rows] == ["plain", "raw", "gain", "biases"]
    assert [row[0] for row in differences.rows] == ["test_resnet, raw"]
    assert differences.columns == ("", "over 'plain'", "over 'gain'", "over 'biases'")


@pytest.mark.parametrize("name", ["heads", "solvers", "table2", "table3", "table4", "table5", "pretrained"])
@pytest.mark.parametrize("scale", ["short", "paper"])
def test_every_study_that_could_claim_a_gain_has_controls(name, scale):
    config = read_study_config(f"deeplayers-{name}", scale)
    assert config.controls and (not any("tuned" in one for one in config.controls) or config.search.drop_rates)


def searched(*scores):
    return Results(
        Measured(
            Cell(arm, 0, (("variant", "d-d"), ("stage", SEARCH), ("lr", rate), *([("p", p)] if p is not None else []))),
            {"validation_accuracy": score}, 0.0, 0.0,
        )
        for arm, rate, p, score in scores
    )  # fmt: skip


def test_a_tuned_arm_chooses_among_all_rates():
    table = study(DeepLayersTable2, "search.rates=[0.01, 0.1]", "search.drop_rates=[0.1, 0.25]", "variants=[d-d]")
    search, final = table.stages()
    rates = {cell.arm: [(cell["lr"], dict(cell.setting).get("p")) for cell in search if cell.arm == cell.arm]
             for cell in search}  # fmt: skip
    assert set(rates) == {"dropout", "proxsg", *CONTROLS} == {cell.arm for cell in final}
    own = [(cell["lr"], cell["p"]) for cell in search if cell.arm == "dropout-tuned"]
    assert own == [(0.01, 0.1), (0.1, 0.1), (0.01, 0.25), (0.1, 0.25)]
    cell = Cell("dropout-tuned", 1, (("variant", "d-d"), ("stage", FINAL)))
    found = [("dropout-tuned", 0.01, 0.1, 50.0), ("dropout-tuned", 0.1, 0.25, None), ("dropout", 0.1, None, 40.0)]
    assert table._best(cell, searched(*found)) == {"lr": 0.01, "p": 0.1}
    # The network's own rate, and none, are searched by arms of their own.
    assert table._best(cell, searched(*found, ("dropout", 0.01, None, 60.0))) == {"lr": 0.01, "p": 0.5}
    assert table._best(cell, searched(*found, ("none", 0.1, None, 70.0))) == {"lr": 0.1, "p": 0.0}
    solver = Cell("proxsg-tuned", 1, cell.setting)
    assert table._best(solver, searched(("none", 0.1, None, 70.0), ("proxsg", 0.01, None, 20.0))) == {
        "lr": 0.01, "p": 0.5
    }  # fmt: skip


def test_differences_are_paired_with_standard_errors():
    assert paired([1.0, 3.0, 2.0]) == "+2.00 ± 0.58" and paired([1.0]) == "+1.00"
    table = study(DeepLayersTable2, "controls=[none, proxsg-tuned]", "variants=[d-d]", "seeds=[0, 1]")
    accuracy = {"dropout": (50.0, 52.0), "proxsg": (55.0, 58.0), "none": (60.0, 61.0), "proxsg-tuned": (60.0, 62.0)}
    results = Results(
        Measured(
            Cell(arm, seed, (("variant", "d-d"), ("stage", FINAL))),
            {"lr": 0.1, "accuracy": one, "deterministic_accuracy": one + 1 if "proxsg" in arm else None,
             "trial_spread": None, "diverged": False, "training_cpu_seconds": 2.0, "curves": {}}, 0.0, 0.0,
        )
        for arm, both in accuracy.items() for seed, one in enumerate(both)
    )  # fmt: skip
    _, gain, differences = table.tables(results)
    assert [row[0] for row in gain.rows] == ["LeNet-D-D, proxsg", "LeNet-D-D, proxsg-tuned"]
    assert differences.columns == ("", "over 'dropout'", "over 'none'")
    assert differences.rows[0][1:] == ("+5.50 ± 0.50 (+6.50 ± 0.50)", "-4.00 ± 1.00 (-3.00 ± 1.00)")


def test_without_dropping_all_controls_are_the_plain_network(tmp_path):
    """A rate of zero, and gains that do not move: the same numbers, from the search to the test split."""
    changes = [
        "variants=[d-d]", "data.train=train[:32]", "fitting.epochs=1", "drop_rate=0", "search.drop_rates=[0.0]",
        "controls=[none, averaged, dropout-tuned]",
    ]  # fmt: skip
    outcome = run_study("deeplayers-table2", read_study_config("deeplayers-table2", "smoke", changes), tmp_path)
    found = {cell["arm"]: cell for cell in outcome.metrics["cells"] if cell["stage"] == FINAL}
    assert found["none"]["accuracy"] == found["dropout"]["accuracy"] == found["averaged"]["accuracy"]
    assert found["dropout-tuned"]["validation_accuracy"] == found["none"]["validation_accuracy"]
    assert found["dropout-tuned"]["p"] == 0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("controls=[nonne]", "none"),
        ("controls=[fista-tuned]", "Unknown control"),
        ("search.drop_rates=[1.0]", r"\[0, 1\)"),
    ],
)
def test_wrong_controls_are_refused(change, text, tmp_path):
    with pytest.raises(OptionError, match=text):
        run_study("deeplayers-table2", read_study_config("deeplayers-table2", "smoke", [change]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "arms", "rows"),
    [
        ("opteq-head", "[linear-tuned, opteq-tuned, gain]", ["mlp", "opteq", "opteq-tuned"]),
        (
            "dropblock-regularizer", "[dropout-tuned, sampled-tuned, deterministic-tuned, gain]",
            ["sampled", "deterministic", "sampled-tuned", "deterministic-tuned"],
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("frozen", [True, False])
def test_classifiers_have_the_controls(name, arms, rows, frozen, tmp_path):
    key = "backbone.frozen" if name == "opteq-head" else "frozen"
    changes = [
        f"controls={arms}", "search.drop_rates=[0.5]", f"{key}={str(frozen).lower()}", "fitting.epochs=1",
        "data.train=train[:32]", "search.epochs=1",
    ]  # fmt: skip
    outcome = run_study(name, read_study_config(name, "smoke", changes), tmp_path)
    final = {cell["arm"]: cell for cell in outcome.metrics["cells"] if cell["stage"] == FINAL}
    assert all(final[arm]["p"] in (0.0, 0.5, pytest.approx(0.3)) for arm in final if arm.endswith("tuned"))
    assert all(cell["loss"] > 0 and cell["ece"] is not None for cell in final.values())
    accuracy, differences, *_ = outcome.tables
    assert [row[0].split(", ")[1] for row in differences.rows] == rows
    assert "over 'gain'" in differences.columns and "NLL" in accuracy.columns and "p" in accuracy.columns


@pytest.mark.parametrize("frozen", [True, False])
def test_what_stands_before_a_classifier(frozen):
    changes = ["controls=[gain, mlp-tuned]", "search.drop_rates=[0.5]", f"backbone.frozen={str(frozen).lower()}"]
    table = OptEqHeadStudy(read_study_config("opteq-head", "smoke", changes))
    table.prepare()
    found = {}
    for arm, p in (("linear", None), ("gain", None), ("mlp-tuned", 0.4)):
        torch.manual_seed(0)
        whole = table.make("")
        table._put(whole, untuned(arm))
        model = table._trained(whole)
        known = table._convert(Cell(arm, 0, (("backbone", ""), ("stage", FINAL))), model, {}, p)
        found[arm] = model, known["head_parameters"]
    features = table.make("").num_features
    x = torch.randn(4, features) if frozen else torch.randn(4, 1, 16, 16)
    # Gains begin at one, and are trained.
    assert torch.equal(found["gain"][0].eval()(x), found["linear"][0].eval()(x))
    assert found["gain"][1] == found["linear"][1] + features
    assert 0.4 in dropouts(found["mlp-tuned"][0])
    assert found["mlp-tuned"][1] == features * 16 + 16 + 16 * 10 + 10


@pytest.mark.parametrize(
    ("arm", "p", "kept"),
    [("none", None, None), ("gain", None, None), ("sampled", None, 0.7), ("sampled-tuned", 0.25, 0.75),
     ("deterministic-tuned", 0.0, None), ("dropout-tuned", 0.5, 0.5)],
)  # fmt: skip
def test_rates_of_dropblock(arm, p, kept):
    table = DropBlockRegularizer(read_study_config("dropblock-regularizer", "smoke"))
    section = table.additions(arm, p).sections[1]
    assert (section and section.theta) == kept
    if section is not None:
        assert section.scheme == ("dropout" if "dropout" in arm else "dropblock")
    assert table.equals("", "sampled-tuned") == [("sampled", pytest.approx(0.3)), ("none", 0.0)]
