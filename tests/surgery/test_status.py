"""How the blocks of a converted model are, and that looking leaves no trace."""

import json
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from solver_plugins import SolverLinear, calibrate, convert_model, gates_of, list_solvers, solver_report
from solver_plugins.blocks import SolverBlock
from solver_plugins.errors import OptionError
from solver_plugins.surgery import ConversionError, RecordError
from tests.surgery.test_convert import X, convert, make


def small(solver="proxgd", **keywords):
    return convert(make(), solver, **{"pattern": "all", **({} if solver in DETERMINISTIC else {"p": 0.5}), **keywords})


DETERMINISTIC = ("proxgd", "fista", "anderson")


def traces(model):
    return {
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "buffers": {name: (id(value), value.clone()) for name, value in model.named_buffers()},
        "classes": [type(module) for module in model.modules()],
        "modes": [module.training for module in model.modules()],
        "hooks": [len(module._forward_hooks) for module in model.modules()],
        "solvers": [getattr(module, "solver", None) for module in model.modules()],
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state()[1].tolist(),
        "python": random.getstate(),
        "gradients": [parameter.grad for parameter in model.parameters()],
    }


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one is other or one == other


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("solver", list_solvers())
def test_leaves_no_trace(solver, training):
    model = small(solver, iters=3).train(training)
    before = traces(model)
    report = solver_report(model, X)
    assert same(before, traces(model))
    assert len(report.blocks) == 5 and report.training is training
    assert all(block.calls == 1 and block.verdict not in (None, "not called") for block in report.blocks)


def test_leaves_no_trace_of_a_failed_pass_or_a_moving_weight():
    model, wrong = small(), torch.randn(4, 3, 2, 2)
    before = traces(model)
    with pytest.raises(RecordError, match="failed with this batch"):
        solver_report(model, wrong)
    assert same(before, traces(model))
    model = nn.Sequential(spectral_norm(nn.Linear(5, 4)), nn.ReLU()).train()
    convert_model(model, "proxgd", example_inputs=torch.randn(2, 5))
    batch = torch.randn(2, 5)
    before = traces(model)
    solver_report(model, batch)
    assert same(before, traces(model))


def test_numbers_are_those_of_diagnose():
    block = SolverLinear.from_linear(nn.Linear(6, 4).double(), activation=nn.ReLU(), solver="fista", iters=7, lam=1e-3)
    x = torch.randn(5, 6, dtype=torch.float64)
    expected, row = block.diagnose(x), solver_report(block, x).blocks[0]
    assert row.objective_first == pytest.approx(float(expected.objective[0].mean()), rel=1e-12)
    assert row.objective_last == pytest.approx(float(expected.objective[-1].mean()), rel=1e-12)
    assert row.last_residual == pytest.approx(float(expected.residual[-1].max()), rel=1e-9)
    plain = nn.functional.linear(x, block.weight, block.bias)
    assert row.scale == pytest.approx(float((block(x).std() / plain.std()).detach()), rel=1e-6)
    assert row.step == pytest.approx(1 / (float(block.L) + 1e-3)) and row.prior == "relu"


def test_scale_of_chains_is_that_of_their_output():
    """Against the plain network, whose modules are called in the same way up to the first block."""
    model, plain = small(iters=10, targets=["conv1"]).train(), make().train()
    outputs = [net.bn1(net.conv1(X)) for net in (model, plain)]
    row = solver_report(model, X).blocks[0]
    assert (row.name, row.outlet, row.role) == ("conv1", "bn1", "norm")
    assert (
        row.scale == pytest.approx(float((outputs[0].std() / outputs[1].std()).detach()), rel=1e-4) and row.scale > 1.5
    )
    model = small(iters=10, targets=["conv2"]).eval()
    row = solver_report(model, X).blocks[0]
    plain = make().eval()
    first = plain.act1(plain.bn1(plain.conv1(X)))
    expected = plain.act2(plain.bn2(plain.conv2(first)) + first)
    found = model.act1(model.bn1(model.conv1(X)))
    found = model.act2(model.bn2(model.conv2(found)) + found)
    assert row.role == "activation" and row.outlet == "act2"
    assert row.scale == pytest.approx(float((found.std() / expected.std()).detach()), rel=1e-4)


def test_one_iteration_is_the_plain_network():
    report = solver_report(small(iters=1), X)
    assert all(block.scale == pytest.approx(1, rel=1e-4) for block in report.blocks)
    assert not report.warnings


def test_constants_are_certified_followed_or_stale():
    model = small(targets=["fc1"]).train()
    block = model.fc1

    def constant():
        return solver_report(model).blocks[0]

    assert (constant().constant, constant().drift) == ("certified", pytest.approx(1))
    with torch.no_grad():
        block.weight.mul_(2)
    assert (constant().constant, constant().drift) == ("stale", pytest.approx(4, rel=1e-3))
    before = constant().L
    model(X)
    now = constant()
    assert now.constant == "followed" and now.drift == pytest.approx(4, rel=1e-2) and 2 * before < now.L
    model.eval()
    assert constant().constant == "certified"


def test_a_solve_that_blows_up_is_told():
    model = small(targets=["fc1"], iters=50).train()
    with torch.no_grad():
        model.fc1.L.mul_(1e-3)
    report = solver_report(model, X)
    assert report.blocks[0].verdict in ("rises", "not finite")
    assert "fc1" in report.warnings[0] and "objective" in report.warnings[0]
    assert json.loads(report.to_json())["totals"]["blocks"] == 1, "infinite numbers are still JSON"


def test_gains_and_blends_are_seen_in_the_scale():
    model = small(iters=10).train(False)
    before = {block.name: block for block in solver_report(model, X).blocks}
    calibrate(model, [X])
    after = {block.name: block for block in solver_report(model, X).blocks}
    assert before["conv1"].gain is None and after["conv1"].gain < 1
    assert before["conv1"].scale > 1.5 and after["conv1"].scale == pytest.approx(1, abs=0.2)
    report = solver_report(small(iters=10, blend=0.0).eval(), X)
    assert all(block.blend == 0 and block.scale == pytest.approx(1, rel=1e-4) for block in report.blocks)


def test_an_outlet_that_several_layers_share():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.norm1 = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
            self.two, self.norm2, self.act = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()

        def forward(self, x):
            x = self.act(self.norm1(self.one(x)) + x)
            return self.act(self.norm2(self.two(x)) + x)

    torch.manual_seed(1)
    x, model = torch.randn(4, 3, 8, 8), Shared().eval()
    both = convert_model(model, "proxgd", pattern="all", example_inputs=x, inplace=False)
    rows = {block.name: block for block in solver_report(both, x).blocks}
    assert rows["one"].outlet == rows["two"].outlet == "act"
    alone = convert_model(model, "proxgd", targets=["one"], pattern="all", example_inputs=x, inplace=False)
    assert rows["one"].scale == pytest.approx(solver_report(alone, x).blocks[0].scale, rel=1e-6)
    assert rows["one"].scale != pytest.approx(rows["two"].scale, rel=1e-6)


def test_implicit_residual_and_rates():
    report = solver_report(small("proxgd", targets=["fc1"], gradient="implicit", iters=200).train(), X)
    assert report.blocks[0].residual == 0 and report.blocks[0].verdict == "converged"
    report = solver_report(small("proxsg", p=0.25, targets=["fc1"]))
    assert (report.blocks[0].p, report.blocks[0].tau) == (0.25, round(0.75 * 6))


def test_a_block_that_is_not_called():
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.use_two = nn.Linear(4, 4), nn.Linear(4, 4), True

        def forward(self, x):
            x = torch.relu(self.one(x))
            return torch.relu(self.two(x)) if self.use_two else x

    model = convert_model(Branch(), "proxgd", example_inputs=torch.randn(2, 4))
    model.use_two = False
    report = solver_report(model, (torch.randn(2, 4),))
    assert [block.verdict == "not called" for block in report.blocks] == [False, True]
    assert "two: not called" in report.warnings[-1]


def test_text():
    model = small(iters=10)
    text = str(solver_report(model, {"x": X}))
    assert "5 solver blocks (proxgd, iters=10), training mode" in text
    for word in ("conv3", "residual", "scale", "verdict", "calibrate(model, batches)"):
        assert word in text
    assert max(map(len, text.splitlines())) <= 100
    assert "drift" in str(solver_report(model)) and "verdict" not in str(solver_report(model))
    assert repr(solver_report(model)).startswith("<SolverReport: ConvNet: 5 solver blocks")
    assert solver_report(model)._repr_html_().startswith("<pre")


def test_bad_input():
    with pytest.raises(ConversionError, match="inspect_model"):
        solver_report(make())
    with pytest.raises(OptionError, match="found str"):
        solver_report("vgg16")
    model = small()
    with pytest.raises(RecordError, match=r"pass batch\[0\]"):
        solver_report(model, [X, torch.zeros(4)])
    with pytest.raises(RecordError, match="found int"):
        solver_report(model, 3)
    assert any(isinstance(module, SolverBlock) for module in model.modules())


def test_how_far_training_and_evaluation_are_apart():
    """Behind a BatchNorm: the constant of the batch's own scales over that of the running ones."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    x = torch.randn(8, 3, 8, 8)
    model = convert_model(net, "proxgd", 3, pattern="all", example_inputs=x)
    (apart,) = (block.of_evaluation for block in solver_report(model.eval(), x).blocks)
    assert apart == pytest.approx(1, rel=1e-4)
    report = solver_report(model.train(), x)
    assert report.blocks[0].of_evaluation > 1.5
    assert any("off that of evaluation" in line for line in report.warnings) and "L / eval" in str(report)


def test_a_gated_block_is_looked_at_behind_its_gate():
    """The iterate before its gate solves another problem, whose objective may rise."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32), nn.GELU()).double().eval()
    x = torch.randn(8, 64, dtype=torch.float64)
    convert_model(net, "proxgd", iters=6, gate="channel", pattern="all", example_inputs=x)
    with torch.no_grad():
        gates_of(net)["0.solver_gate"].uniform_(0.01, 0.05)
    (block,), found = solver_report(net, x).blocks, net[0].diagnose(x)
    assert block.objective_first == pytest.approx(float(found.objective[0].mean()))
    assert block.objective_last == pytest.approx(float(found.objective[-1].mean()))
    assert block.last_residual == pytest.approx(float(found.residual[-1].max()), abs=1e-12)
    assert block.verdict == "converged"
