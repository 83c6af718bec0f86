"""Blocks without a prior in evaluation: one product with a weight that is kept, and never a stale one."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from solver_plugins import SolverBlock, SolverConv2d, SolverLinear
from tests.solve.cases import CASES

F64 = torch.float64
AFFINE = sorted(set(CASES) - {"anderson", "fista"})


def made(solver="proxgd", inputs=12, outputs=8, **options):
    torch.manual_seed(0)
    return SolverLinear(inputs, outputs, solver=solver, iters=6, dtype=F64, **options).eval()


def loop(block, u):
    """What the iterations as they are written compute."""
    plain = copy.deepcopy(block)
    plain.solver = type(block.solver).from_options(**{**block.solver.config.options(), "path": "loop"})
    return plain(u)


def assert_close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("outputs", [8, 20])
@pytest.mark.parametrize("solver", AFFINE)
def test_kept_after_the_first_pass(solver, outputs, rows):
    block, u = made(solver, outputs=outputs, **CASES[solver]), torch.randn(rows, 12, dtype=F64)
    with torch.no_grad():
        expected = loop(block, u)
        assert_close(block(u), expected)
        kept = block.collapsed.kept
        assert kept is not None
        assert_close(block(u), expected)
        assert block.collapsed.kept is kept, "formed once"


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(6, 4, 1), nn.Conv2d(3, 5, 4, 4), nn.Conv2d(4, 6, (1, 2), (3, 2), groups=2)]
)
def test_convolutions_whose_windows_do_not_overlap(layer):
    torch.manual_seed(0)
    block = SolverBlock.from_layer(layer.double(), None, "proxgd", 5).eval()
    u = torch.randn(2, layer.in_channels, 9, 8, dtype=F64)
    with torch.no_grad():
        assert_close(block(u), loop(block, u))
        assert block.collapsed.kept is not None
    overlapping = SolverConv2d(3, 2, 3, solver="proxgd", iters=3).eval()
    with torch.no_grad():
        overlapping(torch.randn(1, 3, 5, 5))
    assert overlapping.collapsed.kept is None


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("change", [
    lambda block: block.weight.mul_(1.1), lambda block: block.weight.data[2].mul_(1.5),
    lambda block: block.bias.add_(1.0), lambda block: block.set_blend(0.3),
    lambda block: block.set_scale(torch.rand(8, dtype=F64), torch.rand(8, dtype=F64)),
    lambda block: block.L.mul_(2.0), lambda block: block.load_state_dict(made(inputs=12).state_dict()),
])  # fmt: skip
def test_whatever_changes_is_noticed(change, rows):
    block, u = made(), torch.randn(rows, 12, dtype=F64)
    with torch.no_grad():
        block(u)
        change(block)
        assert_close(block(u), loop(block, u))


def test_gain_shift_and_blend_are_part_of_the_weight():
    for formulation in ("normalized", "paper"):
        block, u = made(formulation=formulation), torch.randn(30, 12, dtype=F64)
        block.set_blend(0.3)
        block.set_scale(torch.rand(8, dtype=F64), torch.rand(8, dtype=F64))
        with torch.no_grad():
            assert_close(block(u), loop(block, u))
        for mode in (True, False):
            got = torch.autograd.grad(block.train(mode)(u).square().sum(), block.weight)[0]
            assert_close(got, torch.autograd.grad(loop_live(block, u), block.weight)[0])


def test_it_costs_what_the_plain_layer_costs():
    """Beside the looks at the weights, each of which is a product with a vector."""
    block, u = made(), torch.randn(500, 12, dtype=F64)
    counts = []
    for _ in range(3):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            block(u)
        counts.append(counter.get_total_flops())
    assert counts[0] > counts[1] == counts[2] < 2 * 12 * 8 * (500 + 8)


@pytest.mark.parametrize("outputs", [8, 20])
def test_training_collapses_too(outputs):
    """One product with the input; the rest does not grow with the batch."""
    block, counts = made(outputs=outputs).train(), []
    for rows in (500, 1000):
        with FlopCounterMode(display=False) as counter:
            block(torch.randn(rows, 12, dtype=F64))
        counts.append(counter.get_total_flops())
    assert counts[1] - counts[0] == 2 * 500 * 12 * outputs


def test_gradients_in_evaluation():
    """Of a frozen weight the kept one serves; where the weight has a gradient, it gets the right one."""
    block, u = made(), torch.randn(30, 12, dtype=F64, requires_grad=True)
    given = [u, block.weight, block.bias]
    for one, other in zip(
        torch.autograd.grad(block(u).square().sum(), given),
        torch.autograd.grad(loop_live(block, u), given),
        strict=True,
    ):
        assert_close(one, other)
    assert block.collapsed.kept is None
    block.requires_grad_(False)
    expected = torch.autograd.grad(loop(block, u).square().sum(), u)[0]
    assert_close(torch.autograd.grad(block(u).square().sum(), u)[0], expected)
    assert block.collapsed.kept is not None


def loop_live(block, u):
    solver = block.solver
    block.solver = type(solver).from_options(**{**solver.config.options(), "path": "loop"})
    loss = block(u).square().sum()
    block.solver = solver
    return loss


def test_dropped_and_left_out_of_copies_and_files():
    block, u = made(), torch.randn(30, 12, dtype=F64)
    keys = list(block.state_dict())
    with torch.no_grad():
        expected = block(u)
        assert list(block.state_dict()) == keys
        twin = copy.deepcopy(block)
        assert twin.collapsed.kept is None and torch.equal(twin(u), expected)
        file = io.BytesIO()
        torch.save(block, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert loaded.collapsed.kept is None and torch.equal(loaded(u), expected)
        block.train()
        assert block.collapsed.kept is None
        block.eval()(u)
        block.float()
        assert block.collapsed.kept is None


def test_half_precision_and_inference_mode():
    block, u = made().float(), torch.randn(30, 12)
    with torch.inference_mode():
        expected = block(u)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = block(u)
    assert got.dtype == torch.bfloat16 and (got.float() - expected).norm() < 0.02 * expected.norm()
    with torch.no_grad():
        half = block.bfloat16()(u.bfloat16())
    assert half.dtype == torch.bfloat16 and (half.float() - expected).norm() < 0.03 * expected.norm()


def test_stochastic_evaluation_does_not_collapse():
    block, u = made("proxsg", eval_mode="stochastic"), torch.randn(30, 12, dtype=F64)
    with torch.no_grad():
        assert not torch.equal(block(u), block(u)) and block.collapsed.kept is None
