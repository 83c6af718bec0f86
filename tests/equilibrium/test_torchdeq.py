"""Beside torchdeq on the same map, weights, input and tolerance: fewer evaluations, and no memory per iteration."""

import itertools

import pytest
import torch

from tests.benchmarks.costs import peak_bytes
from tests.benchmarks.opteq_torchdeq import SOLVERS, TOL, network, ours, theirs

MAPS = list(itertools.product(("linear", "conv"), (1, 3), ("initial", "gaussian")))


def inputs(kind):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*((16, 512) if kind == "linear" else (2, 64, 16, 16)), generator=generator)


def distance(gradient, exact):
    return float((gradient - exact).norm() / exact.norm())


@pytest.mark.parametrize(("kind", "layers", "weights"), MAPS)
def test_fewer_evaluations_forward_and_backward(kind, layers, weights):
    """Than each of its solvers, by the same relative tolerance of 1e-5 in float32, to a gradient at least as good."""
    model, x = network(kind, layers, weights), inputs(kind)
    found = ours(model, x)()
    gradient = found.gradient.clone()
    exact = ours(network(kind, layers, weights, tol=1e-7, iters=300, implicit_iters=300), x)().gradient.clone()
    assert found.residual <= TOL and distance(gradient, exact) < 1e-4
    for solver in SOLVERS:
        other = theirs(model, x, solver)()
        # What torchdeq returns has been reached, or nothing would follow from its number of steps.
        assert distance(other.gradient, exact) < 1e-3
        assert found.evaluations < other.evaluations, solver
        assert found.products < other.products, solver


@pytest.mark.parametrize(("kind", "layers"), list(itertools.product(("linear", "conv"), (1, 3))))
def test_fifty_iterations_take_the_memory_of_five(kind, layers):
    x, peaks = inputs(kind), []
    for iters in (5, 50):
        call = ours(network(kind, layers, "gaussian", iters=iters, tol=0.0, implicit_tol=1.0), x)
        call()
        peaks.append(peak_bytes(call))
    assert peaks[1] <= 1.2 * peaks[0]
