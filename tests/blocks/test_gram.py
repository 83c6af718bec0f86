"""The Gram matrix that is kept for evaluation: the same results, and never a stale one."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from solver_plugins import SolverConv2d, SolverLinear, cache_gram, refresh_steps
from solver_plugins.errors import OptionError
from tests.solve.cases import CASES

F64 = torch.float64


def made(solver="proxgd", **options):
    torch.manual_seed(0)
    return SolverLinear(12, 8, activation="relu", solver=solver, iters=6, dtype=F64, **options).eval()


@pytest.mark.parametrize("solver", sorted(CASES))
def test_same_result(solver):
    block, u = made(solver, **CASES[solver]), torch.randn(5, 12, dtype=F64)
    expected = block(u)
    assert cache_gram(block) == [""]
    with torch.no_grad():
        torch.testing.assert_close(block(u), expected, rtol=1e-10, atol=1e-10)


def test_products_are_those_of_the_small_matrix():
    """12 x 8 for the layer and 8 x 8 for each further step, beside the look at the weights, which is the same."""
    block, u = made(path="auto"), torch.randn(1, 12, dtype=F64)
    counts = []
    for _ in range(2):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            block(u)
        counts.append(counter.get_total_flops())
        cache_gram(block)
    # One sample: without the matrix at hand, two steps are cheaper than making it.
    assert counts[0] - counts[1] == 2 * 5 * (2 * 12 * 8 - 8 * 8)


def test_dropped_where_the_weights_may_move():
    def drops(change):
        block = made()
        cache_gram(block)
        assert block.gram is not None
        change(block)
        return block.gram is None

    assert drops(lambda block: block.train())
    assert drops(lambda block: block.load_state_dict(block.state_dict()))
    assert drops(refresh_steps)
    assert drops(lambda block: block.float())
    assert drops(lambda block: block.reset_parameters())
    assert not drops(lambda block: block.eval())


def test_weights_that_were_written_to_are_noticed():
    block, u = made(), torch.randn(5, 12, dtype=F64)
    cache_gram(block)
    with torch.no_grad():
        block.weight.mul_(1.7)
        got = block(u)
    assert block.gram is None
    refresh_steps(block)
    torch.testing.assert_close(got, block(u), rtol=1e-10, atol=1e-10)


def test_gradients_of_the_weight_do_not_use_it():
    block, u = made(), torch.randn(5, 12, dtype=F64)
    (expected,) = torch.autograd.grad(block(u).square().sum(), block.weight)
    cache_gram(block)
    (got,) = torch.autograd.grad(block(u).square().sum(), block.weight)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    # A frozen weight leaves it in use, with the right gradient of the input.
    x = u.clone().requires_grad_()
    (expected,) = torch.autograd.grad(block(x).square().sum(), x)
    block.requires_grad_(False)
    (got,) = torch.autograd.grad(block(x).square().sum(), x)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def test_copies_and_files():
    block, u = made(), torch.randn(5, 12, dtype=F64)
    keys = list(block.state_dict())
    cache_gram(block)
    assert list(block.state_dict()) == keys, "not part of a checkpoint"
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(block)(u), block(u))
    file = io.BytesIO()
    torch.save(block, file)
    file.seek(0)
    with torch.no_grad():
        assert torch.equal(torch.load(file, weights_only=False)(u), block(u))


def test_only_where_it_is_of_use():
    model = nn.Sequential(
        SolverLinear(6, 5, solver="proxgd"),
        SolverLinear(5, 10, solver="proxgd"),
        SolverLinear(10, 4, solver="proxgd", iters=1),
        SolverLinear(4, 4, solver="proxgd", path="two_step"),
        SolverLinear(4, 4, solver="proxsg", eval_mode="stochastic"),
        SolverLinear(4, 4, solver="proxsg"),
        SolverConv2d(2, 2, 3, solver="proxgd"),
    )
    with pytest.raises(OptionError, match="eval"):
        cache_gram(model)
    assert cache_gram(model.eval()) == ["0", "5"]
    with pytest.raises(OptionError, match="without a solver block"):
        cache_gram(nn.Linear(2, 2))


def test_half_precision():
    block, u = made().float(), torch.randn(5, 12)
    expected = block(u)
    cache_gram(block)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        got = block(u)
    assert got.dtype == torch.bfloat16 and (got.float() - expected).norm() < 0.03 * expected.norm()
