"""The dry run as data and as a table."""

import json

import pytest
import timm
import torch
from torch import nn

from solver_plugins import SolverLinear, convert_model, inspect_model, solver_report
from solver_plugins.blocks import SolverBlock
from solver_plugins.errors import OptionError
from solver_plugins.prox import prox_for
from solver_plugins.registry import SOLVERS
from solver_plugins.surgery.cost import cost_of
from solver_plugins.surgery.errors import changes_scale
from tests.surgery.test_convert import X, make


def test_rows_totals_and_json():
    model = make()
    report = inspect_model(model, "proxsg", iters=10, example_inputs=X)
    assert not any(isinstance(module, SolverBlock) for module in model.modules()), "a dry run changes nothing"
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
    totals = data["totals"]
    assert (totals["layers"], totals["converted"]) == (5, 2)
    assert totals["patterns"] == {"dropout-linear-act": 1, "dropout-linear": 1}


def test_table():
    text = str(inspect_model(make(), "proxgd", iters=3, pattern="all", example_inputs=X))
    assert "5 of 5 layers become proxgd" in text and "linear-norm-skip-act" in text and "5x" in text
    text = str(inspect_model(make(), "rcd", last=False, example_inputs=X))
    assert "0 of 5 layers" in text and "Left alone" in text


def test_coordinates_count_outputs():
    report = inspect_model(make(), "rcd", p=0.25, targets=["conv3"], example_inputs=X, lipschitz=False)
    rows = {row.name: row for row in report.converted}
    assert rows["conv3"].tau == round(0.75 * 6) and rows["conv3"].L is None


def test_real_model_and_bad_options():
    report = inspect_model(timm.create_model("test_resnet"), "proxgd", pattern="all", lipschitz=False)
    assert {row.pattern for row in report.converted} >= {"linear-norm-act", "linear-norm-skip-act"}
    with pytest.raises(OptionError, match="iters"):
        inspect_model(nn.Linear(2, 2), "proxgd", itrs=3)


def test_constant_is_the_one_that_the_converted_block_has():
    model = make()
    with torch.no_grad():
        for norm in (model.bn1, model.bn2):
            norm.weight.uniform_(-2, 2)
            norm.running_var.uniform_(0.1, 3)
        model.bn2.weight[0] = 0
    for solver in ("proxgd", "ms2gd"):
        rate = {} if solver == "proxgd" else {"p": 0.5}
        report = inspect_model(model, solver, pattern="all", example_inputs=X, **rate)
        converted = convert_model(model, solver, pattern="all", example_inputs=X, inplace=False, **rate)
        found = {block.name: block for block in solver_report(converted).blocks}
        assert len(found) == 5
        for row in report.converted:
            assert found[row.name].outlet == row.outlet and found[row.name].tau == row.tau
            assert pytest.approx(found[row.name].L, rel=1e-6) == row.L
            assert row.step == pytest.approx(found[row.name].step, rel=1e-4)


def test_operations_are_counted():
    """Against the multiply-adds of each layer by hand: conv1 has 6 x 6 outputs for an image of 12 x 11."""
    options = {"iters": 4, "pattern": "all", "example_inputs": X, "lipschitz": False}
    report = inspect_model(make(), "proxgd", path="two_step", **options)
    rows = {row.name: row for row in report.rows}
    by_hand = {
        "conv1": 2 * 6 * 6 * 4 * 3 * 9,
        "conv2": 2 * 6 * 6 * 4 * 4 * 9,
        "conv3": 2 * 4 * 4 * 6 * 4 * 9,
        "fc1": 2 * 5 * 6,
        "fc2": 2 * 3 * 5,
    }
    assert {name: row.plain_flops for name, row in rows.items()} == by_hand
    assert all(row.cost == 7 and row.flops == 7 * row.plain_flops and row.memory > 0 for row in rows.values())
    totals = report.totals
    assert totals["plain_flops"] == sum(by_hand.values()) and totals["flops"] == 7 * totals["plain_flops"]
    # Layers that stay plain count as such.
    options = {"iters": 4, "targets": ["fc1"], "example_inputs": X, "lipschitz": False}
    report = inspect_model(make(), "proxgd", path="two_step", **options)
    assert report.totals["plain_flops"] == sum(by_hand.values())
    assert report.totals["flops"] == sum(by_hand.values()) + 6 * by_hand["fc1"]


def test_paths_are_shown_and_counted():
    """The Gram matrix of fc1 (6 -> 5): one plain product, 5 x 5 x 6 multiply-adds once, 5 x 5 for each further step."""
    options = {"iters": 4, "example_inputs": X, "lipschitz": False}
    report = inspect_model(make(), "proxgd", pattern="all", **options)
    rows = {row.name: row for row in report.rows}
    assert {rows[name].path for name in ("conv1", "conv2", "conv3")} == {"two_step"}
    fc1 = rows["fc1"]
    # 3 B (12 - 5) > 30 from B = 2 on.
    assert (fc1.path, fc1.gram_from) == ("gram", 2) and rows["conv1"].gram_from is None
    assert fc1.flops == (2 * 5 * 5 * 6 + len(X) * 2 * (5 * 6 + 3 * 5 * 5)) // len(X)
    assert "path" in str(report) and "gram" in str(report)
    forced = inspect_model(make(), "proxgd", path="loop", targets=["fc1"], **options).converted[0]
    assert (forced.path, forced.gram_from, forced.cost) == ("loop", None, 7)
    sampled = {row.name: row for row in inspect_model(make(), "proxsg", **options).converted}
    assert sampled["fc1"].path == "masked" and sampled["fc1"].gram_from is None


@pytest.mark.parametrize(
    ("solver", "options", "products", "behind"),
    [
        # One product for the layer's output, two for each further iteration.
        ("proxgd", {}, 19, 19),
        ("fista", {}, 19, 19),
        # Behind a norm, what is added to A u costs one product, and so does the first sample.
        ("proxsg", {"p": 0.5}, 19, 21),
        # Gradient sampling draws by the A^T x that the iteration computes; the loop, which PReLU takes, has it twice.
        ("proxsg", {"p": 0.5, "sampling": "gradient"}, 19, 30),
        ("ms2gd", {"p": 0.5}, 19, 20),
        ("s2gd", {}, 19, 20),
        ("rcd", {"p": 0.5}, 19, 19),
        # A check of the residual, and one recorded iteration.
        ("proxgd", {"gradient": "implicit"}, 23, 23),
    ],
)
def test_products_of_each_solver(solver, options, products, behind):
    made, layer = SOLVERS.get(solver).from_options(iters=10, **options), nn.Conv2d(8, 6, 3, groups=2)
    state = torch.get_rng_state()
    plain = cost_of(layer, (2, 8, 9, 9), made, prox_for("relu"))
    assert plain.plain == 2 * (2 * 49 * 6 * 4 * 9) and plain.solver == products * plain.plain
    chain = cost_of(layer, (2, 8, 9, 9), made, prox_for(nn.PReLU()), behind=True, normed=True)
    assert chain.solver == behind * chain.plain
    assert torch.equal(state, torch.get_rng_state())


def test_memory_is_what_autograd_keeps():
    """Against the tensors that a real block saves."""
    layer, x = nn.Linear(30, 40), torch.randn(7, 30, requires_grad=True)
    block = SolverLinear.from_linear(layer, activation=nn.ReLU(), solver="fista", iters=6)
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(x)
    own = {tensor.untyped_storage().data_ptr() for tensor in (x, layer.weight, layer.bias)}
    expected = sum(tensor.untyped_storage().nbytes() for key, tensor in kept.items() if key not in own)
    assert cost_of(layer, (7, 30), block.solver, block.prior).memory == pytest.approx(expected, rel=0.02)


def test_norms_and_skips_tell_that_they_change_the_scale():
    report = inspect_model(make(), "proxgd", iters=2, pattern="all", example_inputs=X, lipschitz=False)
    told = {row.name for row in report.rows if changes_scale() in row.reason}
    assert told == {"conv1", "conv2"} and report.to_dict()["warnings"] == list(report.warnings)
    assert len(report.warnings) == 1 and report.warnings[0].endswith(changes_scale())
    assert changes_scale().split(":")[0] in " ".join(str(report).split())
    for keywords in ({"iters": 1}, {"iters": 5, "blend": 0.1}):
        report = inspect_model(make(), "proxgd", pattern="all", example_inputs=X, lipschitz=False, **keywords)
        assert not report.warnings and not any(changes_scale() in row.reason for row in report.rows)


def test_table_fits_and_groups_layers_that_repeat(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    report = inspect_model(timm.create_model("vit_tiny_patch16_224"), "proxgd", pattern="all", lipschitz=False)
    text = str(report)
    assert "blocks.*.mlp.fc1 (12 layers)" in text and max(map(len, text.splitlines())) <= 80
    monkeypatch.setenv("COLUMNS", "150")
    assert "768x14x14" not in text and "3x224x224 → 192x14x14" in str(report)
    monkeypatch.setenv("COLUMNS", "60")
    lines = str(inspect_model(make(), "proxsg", p=0.5, pattern="all", example_inputs=X)).splitlines()
    assert max(map(len, lines)) <= 80
    assert repr(report) == "<Report: VisionTransformer: 50 of 50 layers become proxgd, iters=10>"


def test_a_dry_run_counts_the_gate():
    """A gate keeps one more tensor per iteration, and a product per iteration where the solve would collapse."""
    model, x = nn.Sequential(nn.Linear(30, 40), nn.ReLU()), torch.zeros(7, 30)
    reports = [inspect_model(model, "proxgd", 5, example_inputs=x, gate=gate) for gate in (None, "channel")]
    free, gated = (report.rows[0].memory for report in reports)
    made = SOLVERS.get("proxgd").from_options(iters=5)
    assert gated == cost_of(model[0], (7, 30), made, prox_for("relu"), gate="channel").memory // 7 > 1.3 * free


def test_the_backward_pass_is_counted():
    """By hand: 400 -> 120 with 256 rows, and the gate's recursion on the weight without a prior."""
    layer, made = nn.Linear(400, 120), SOLVERS.get("proxgd").from_options(iters=10)
    cost = cost_of(layer, (256, 400), made, prox_for("relu"), backward=True)
    plain, small, gram = 2 * 256 * 400 * 120, 2 * 256 * 120 * 120, 2 * 120 * 120 * 400
    assert cost.plain == plain and cost.solver == plain + 9 * small + gram
    assert cost.backward == 2 * plain + 18 * small + gram and cost.training == pytest.approx(4.0, rel=0.02)
    assert cost_of(layer, (256, 400), made, prox_for("relu")).training is None
    wide = nn.Linear(64, 256)
    free, gated = (cost_of(wide, (4096, 64), made, prox_for(None), gate=gate) for gate in (None, "channel"))
    assert free.solver < 1.3 * free.plain and gated.solver - free.plain == 18 * 2 * 64 * 64 * 256
