"""Iterations in one buffer against the plain loop, in float64, and where they are taken."""

from dataclasses import replace

import pytest
import torch

from solver_plugins.operators import Geometry
from solver_plugins.prox import prox_for
from solver_plugins.solve import Recursion, kernel
from solver_plugins.solve.fista import Nesterov
from solver_plugins.solve.recursion import Rule
from solver_plugins.solve.run import LARGE_BATCH, LARGEST, may_stack
from solver_plugins.solve.steps import has_values
from tests.solve.test_kernels import F64, PRIORS, assert_same, value_and_gradients

STACKED = ("identity", "relu", "relu6", "hardtanh", "leaky")


@pytest.fixture
def taken(monkeypatch):
    """The passes that wrote into buffers."""
    found, plain = [], kernel.new_buffers
    monkeypatch.setattr(kernel, "new_buffers", lambda *given: found.append(1) or plain(*given))
    return found


@pytest.mark.parametrize("iters", [2, 3, 10, 12])
@pytest.mark.parametrize("memory", ["auto", "low"])
@pytest.mark.parametrize("path", ["two_step", "gram"])
def test_iterations_in_one_buffer(path, memory, iters, taken):
    """Small matrices take these passes; every prior that may, a batch of tokens, and more rows than a large batch."""
    generator = torch.Generator().manual_seed(0)
    for prior in STACKED:
        for shape in ((7, 3, 12), (LARGE_BATCH + 8, 12)):
            shapes = (shape, (8, 12), (8,))
            given = [torch.randn(one, dtype=F64, generator=generator) for one in shapes]
            for formulation in ("normalized", "paper"):
                options = {"activation": PRIORS[prior], "solver": "proxgd", "iters": iters, "lipschitz": 40.0}
                options["formulation"] = formulation
                assert_same(
                    value_and_gradients(path, Geometry(), given, memory=memory, **options),
                    value_and_gradients("loop", Geometry(), given, **options),
                )
    # Of twelve iterations a two-step path does not keep every image. Both passes of a solve take buffers.
    few = path == "two_step" and iters == 12 and memory == "auto"
    assert len(taken) == (0 if few else 40)


@pytest.mark.parametrize("iters", [2, 3, 8])
@pytest.mark.parametrize("memory", ["full", "low"])
@pytest.mark.parametrize("per_sample", [True, False])
def test_sampled_iterations_in_one_buffer(per_sample, memory, iters, taken):
    """Small matrices take these passes; every prior that may, biases of each row or none, steps that are no numbers."""
    generator = torch.Generator().manual_seed(0)
    options = {"solver": "proxsg", "iters": iters, "lipschitz": 40.0, "lam": 0.3, "p": 0.4, "per_sample": per_sample}
    for prior in STACKED:
        for shapes in (((7, 3, 12), (8, 12), (8,), None, (7, 3, 8)), ((200, 12), (8, 12), None)):
            given = [None if one is None else torch.randn(one, dtype=F64, generator=generator) for one in shapes]
            for formulation in ("normalized", "paper"):
                more = {**options, "activation": PRIORS[prior], "formulation": formulation}
                assert_same(
                    value_and_gradients("masked", Geometry(), given, memory=memory, **more),
                    value_and_gradients("loop", Geometry(), given, **more),
                )
    assert len(taken) == 40


def test_buffers_only_where_they_fit():
    """No momentum, no derivative that the iterate does not tell, no large buffer of a large batch, nothing recorded."""
    rule = Rule(
        path="gram", recursion=Recursion(), iterations=10, prior=prox_for("relu"), dtype=F64, unit=True, lam=0.0,
        inner=torch.dot,
    )  # fmt: skip
    rows, may = LARGE_BATCH, may_stack
    assert may(rule, rows - 1, 10**6) and may(rule, rows, 100) and not may(rule, rows, LARGEST)
    assert not may(replace(rule, recursion=Recursion(momentum=Nesterov(True))), 2, 2)
    assert not may(replace(rule, recursion=Recursion(inertia=0.1)), 2, 2)
    assert not may(replace(rule, prior=prox_for("tanh")), 2, 2)
    assert may(replace(rule, path="two_step", images=9), 2, 2)
    assert not may(replace(rule, path="two_step", images=8), 2, 2)
    sampled = replace(rule, path="masked", share=2.0)
    assert may(sampled, 2, 2) and not may(replace(sampled, iterations=1), 2, 2)
    assert not may(replace(sampled, path="columns"), 2, 2)
    assert not may(replace(sampled, recursion=Recursion(reference=5)), 2, 2)
    assert not may(replace(sampled, chooser=torch.ones_like), 2, 2)
    tensors = torch.ones(2, 2), torch.ones(2, 2), torch.ones(())
    with torch.no_grad():
        assert has_values(*tensors) and not has_values(tensors[0].to("meta"), *tensors[1:])
    assert not has_values(*tensors)
