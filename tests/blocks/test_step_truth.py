"""Constants that were silently wrong: long kernels, weights that moved unseen, batch statistics."""

import copy
import math

import pytest
import torch
from torch import nn

from solver_plugins import SolverBlock, SolverLinear, convert_model, lipschitz_constant, refresh_steps
from solver_plugins.blocks import blocks_of
from tests.operators.references import dense_matrix, norm_sq

F64 = torch.float64


def true_constant(block):
    """The supremum over sizes, at most 2% too large."""
    return float(lipschitz_constant(block, tolerance=0.02))


def test_a_long_kernel_trained_towards_a_peak_between_coarse_frequencies():
    torch.manual_seed(0)
    conv = nn.Conv1d(4, 4, 31, padding=15, groups=4, bias=False)
    block = SolverBlock.from_layer(conv, "identity", "proxgd", 10)
    peak = torch.cos(math.pi / 8 * torch.arange(31)).expand(4, 1, 31)
    target = 2 * peak / peak[0].norm()
    optimizer = torch.optim.AdamW(block.parameters(), 1e-2)
    u = torch.randn(2, 4, 64)
    for step in range(150):
        optimizer.zero_grad()
        block(u)
        assert step % 15 or float(block.L) > 0.5 * true_constant(block)
        (block.weight - target).square().sum().backward()
        optimizer.step()
    with torch.no_grad():
        assert 0.5 < float(block(u).norm() / block.eval()(u).norm()) < 2


@pytest.mark.parametrize(
    ("dims", "taps", "phase"), [(1, 128, 1.0), (2, 13, 0.7), (1, 9, 2.2), (2, 3, 0.8), (3, 3, 0.8)]
)
def test_a_peak_that_moves_between_frequencies(dims, taps, phase):
    """Rows that turn with the place: the symbol has one peak, and it is narrow."""
    phases = [1.7, phase]
    block = SolverBlock.from_layer(turning(dims, taps, phases[0]), "relu", "proxgd", 2)
    with torch.no_grad():
        block.weight.copy_(turning(dims, taps, phases[1]).weight)
    block(torch.randn(1, 2, *[taps] * dims))
    assert 0.5 * true_constant(block) < float(block.L) < 1.9 * true_constant(block)


def turning(dims, taps, phase):
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](2, 2, taps, padding=taps // 2, bias=False)
    angle = phase * sum(torch.meshgrid(*[torch.arange(taps)] * dims, indexing="ij"))
    rotation = torch.stack([torch.stack([angle.cos(), -angle.sin()]), torch.stack([angle.sin(), angle.cos()])])
    with torch.no_grad():
        conv.weight.copy_(rotation)
    return conv


def test_eval_sees_weights_that_moved_where_a_scalar_does_not():
    fc = nn.Linear(64, 1024, bias=False)
    with torch.no_grad():
        fc.weight.zero_()
        fc.weight[0] = 1
    block = SolverLinear.from_linear(fc, solver="proxgd", iters=10).eval()
    with torch.no_grad():
        block.weight[5] = 2 * torch.tensor([-1.0, 1.0]).repeat(32)
    block.eval()
    assert 256 <= float(block.L) <= 257
    u = torch.randn(3, 64)
    fresh = SolverLinear.from_linear(copy.deepcopy(fc), solver="proxgd", iters=10).eval()
    with torch.no_grad():
        fresh.weight.copy_(block.weight)
        refresh_steps(fresh)
        assert torch.equal(block(u), fresh(u))


def test_training_sees_them_too():
    fc = nn.Linear(64, 1024, bias=False)
    with torch.no_grad():
        fc.weight.zero_()
        fc.weight[0] = 1
        block = SolverLinear.from_linear(fc, activation="relu", solver="proxgd", iters=3)
        block.weight[5] = 2 * torch.tensor([-1.0, 1.0]).repeat(32)
        block(torch.randn(3, 64))
    assert float(block.L) > 128


def test_an_average_of_weights_is_certified_after_every_step():
    torch.manual_seed(0)
    block, moving = SolverLinear(24, 16, activation="relu", solver="proxgd").eval(), nn.Linear(24, 16)
    for _ in range(60):
        with torch.no_grad():
            block.weight.lerp_(moving.weight, 1e-4)
        block.eval()
        expected = lipschitz_constant(block)
        assert torch.equal(block.L, expected)


@pytest.mark.parametrize("keep", ["gram", "collapsed", "neither"])
def test_one_look_serves_all_that_evaluation_keeps(keep, monkeypatch):
    """A row and its opposite change so that every norm stays, and L, the Gram matrix and the output do not."""
    torch.manual_seed(0)
    activation = None if keep == "collapsed" else "relu"
    block = SolverLinear(12, 8, activation=activation, solver="proxgd", iters=6, dtype=F64).eval()
    u = torch.randn(40, 12, dtype=F64)
    with torch.no_grad():
        if keep == "gram":
            block.cache_gram()
        block(u)
        block.weight.data[2] = block.weight.data[3] * block.weight[2].norm() / block.weight[3].norm()
        fresh = SolverLinear(12, 8, activation=activation, solver="proxgd", iters=6, dtype=F64).eval()
        fresh.load_state_dict(block.state_dict())
        torch.testing.assert_close(block(u), fresh(u), rtol=1e-12, atol=1e-12)


def bn_net(channels=8, kernel=3):
    torch.manual_seed(0)
    layers = nn.Conv2d(4, channels, kernel, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()
    return nn.Sequential(*layers).double()


@pytest.mark.parametrize("spread", [1.0, 3.0])
def test_a_folded_norm_is_followed_to_the_scales_of_the_batch(spread, monkeypatch):
    """Channels of the batch are far from their running statistics: L is that of their own diagonal, within a half."""
    net = bn_net()
    with torch.no_grad():
        net[0].weight.mul_(torch.logspace(-spread, spread, 8, dtype=F64)[:, None, None, None])
    made = convert_model(
        copy.deepcopy(net), "proxgd", 3, pattern="all", example_inputs=torch.randn(2, 4, 8, 8, dtype=F64)
    )
    block = next(iter(blocks_of(made).values()))
    seen = []
    scaled = type(block)._scaled_L
    monkeypatch.setattr(type(block), "_scaled_L", lambda *given: seen.append(scaled(*given)) or seen[-1])
    x = torch.randn(16, 4, 8, 8, dtype=F64)
    made.train()(x)
    with torch.no_grad():
        y = net[0](x)
        d = net[1].weight / (y.var((0, 2, 3), correction=0) + net[1].eps).sqrt()
        folded = copy.deepcopy(net[0])
        folded.weight.mul_(d[:, None, None, None])
        true = norm_sq(dense_matrix(folded, (4, 12, 12)))
    assert 0.7 * true < float(seen[0]) < 1.5 * true


def test_a_recomputed_forward_sees_the_same_constant_of_a_batch(monkeypatch):
    made = convert_model(
        bn_net(), "proxgd", 3, pattern="all", example_inputs=torch.randn(2, 4, 8, 8, dtype=F64)
    ).train()
    block = next(iter(blocks_of(made).values()))
    with torch.no_grad():
        block.weight.mul_(1.1)
    seen = []
    scaled = type(block)._scaled_L
    monkeypatch.setattr(type(block), "_scaled_L", lambda *given: seen.append(scaled(*given)) or seen[-1])
    batches = [torch.randn(4, 4, 8, 8, dtype=F64) for _ in range(2)]
    for x in (*batches, *batches):
        made(x)
    assert torch.equal(seen[0], seen[2]) and torch.equal(seen[1], seen[3]) and not torch.equal(seen[0], seen[1])
