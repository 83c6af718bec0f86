"""The dropout rate that a sampling block's noise is worth, against closed forms, enumeration and measured values."""

import itertools

import pytest
import torch
from torch import nn

from solver_plugins import convert_model, solver_report
from solver_plugins.blocks import SolverBlock, effective_rate
from solver_plugins.errors import OptionError


def block_of(layer, activation=None, solver="proxsg", iters=10, **options):
    return SolverBlock.from_layer(layer, activation, solver, iters, **options)


def relu_batch(size, features, seed=0):
    return torch.randn(size, features, generator=torch.Generator().manual_seed(seed)).relu()


@pytest.mark.parametrize(("iters", "p", "expected"), [(10, 0.5, 0.065), (3, 0.5, 0.247), (10, 0.95, 0.5)])
def test_measured_values(iters, p, expected):
    """Layers of 512 features and a ReLU, which is where the figures of the documentation are from."""
    torch.manual_seed(0)
    found = effective_rate(block_of(nn.Linear(512, 512), nn.ReLU(), iters=iters, p=p), relu_batch(64, 512), 32)
    assert found == pytest.approx(expected, rel=0.08)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("layer", [nn.Linear(60, 20), nn.Conv2d(60, 8, 3, padding=1, groups=2)])
def test_one_iteration_is_dropout_at_its_own_rate(layer, p):
    torch.manual_seed(0)
    x = torch.randn(20, 60) if isinstance(layer, nn.Linear) else torch.randn(4, 60, 4, 4)
    block = block_of(layer, iters=1, p=p)
    features = 60
    # A fixed number is drawn, which has (n - tau)/(tau (n - 1)) in the place of p/(1 - p).
    tau = block.solver.tau(features)
    odds = (features - tau) / tau * features / (features - 1)
    assert effective_rate(block, x, 200) == pytest.approx(odds / (1 + odds), rel=0.06)


def test_two_iterations_by_enumeration():
    """Every pair of samples of an affine block, in float64, by the iteration written out."""
    torch.manual_seed(1)
    layer = nn.Linear(4, 3).double()
    A, b, u = layer.weight.detach(), layer.bias.detach(), torch.randn(4, dtype=torch.float64)
    lam, L = 0.1, float(torch.linalg.matrix_norm(layer.weight.detach(), 2)) ** 2
    block = block_of(layer, iters=2, p=0.5, lam=lam, step="constant")
    reached = []
    for pair in itertools.product(itertools.combinations(range(4), 2), repeat=2):
        v = torch.zeros(3, dtype=torch.float64)
        for kept in pair:
            w = torch.zeros(4, dtype=torch.float64)
            w[list(kept)] = 2.0
            # The normalized formulation: the quadratic term is divided by L + lam, and the first step is the layer.
            v = v - ((A @ (w * (A.T @ v)) + lam * v) / (L + lam) - A @ (w * u) - b)
        reached.append(v)
    reached = torch.stack(reached)
    relative = reached.var(0, correction=0).sum() / reached.mean(0).square().sum()
    odds = relative * (A @ u + b).square().sum() / (u.square() * A.square().sum(0)).sum()
    assert effective_rate(block, u[None], 1500) == pytest.approx(float(odds / (1 + odds)), rel=0.08)


def test_nothing_of_the_block_changes():
    torch.manual_seed(0)
    block = block_of(nn.Linear(30, 10), nn.ReLU(), iters=3, p=0.5, output="value").train()
    before, state, x = (
        {key: value.clone() for key, value in block.named_buffers()},
        torch.get_rng_state(),
        relu_batch(8, 30),
    )
    first = effective_rate(block, x)
    assert torch.equal(torch.get_rng_state(), state) and block.training and block.output == "value"
    assert all(torch.equal(value, before[key]) for key, value in block.named_buffers())
    assert not block.solver.samples_in_evaluation and effective_rate(block.eval(), x) == first


def test_in_the_report():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(200, 100), nn.ReLU(), nn.Linear(100, 10))
    x = relu_batch(16, 200)
    model = convert_model(model, "proxsg", iters=3, p=0.5, targets=["1"], example_inputs=x)
    assert solver_report(model).blocks[0].effective_rate is None
    (row,) = solver_report(model, x).blocks
    assert row.effective_rate == pytest.approx(effective_rate(model[1], x, 32), rel=0.15)
    assert "like p" in str(solver_report(model, x))


def test_what_has_no_rate_is_refused():
    x = torch.randn(2, 6)
    with pytest.raises(OptionError, match="'proxgd'"):
        effective_rate(block_of(nn.Linear(6, 3), solver="proxgd"), x)
    with pytest.raises(OptionError, match="at least two draws"):
        effective_rate(block_of(nn.Linear(6, 3), p=0.5), x, 1)
