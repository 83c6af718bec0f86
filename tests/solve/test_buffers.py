"""Iterations in one buffer against the plain loop, in float64, and where they are taken."""

from dataclasses import replace

import pytest
import torch

from solver_plugins.operators import Geometry
from solver_plugins.prox import prox_for
from solver_plugins.solve import sampled_stacked, stacked
from solver_plugins.solve.rule import Rule
from solver_plugins.solve.sampled_rule import Given
from solver_plugins.solve.sampled_rule import Rule as SampledRule
from tests.solve.test_kernels import F64, PRIORS, assert_same, value_and_gradients


@pytest.mark.parametrize("iters", [2, 3, 10, 12])
@pytest.mark.parametrize("memory", ["auto", "low"])
@pytest.mark.parametrize("path", ["two_step", "gram"])
def test_iterations_in_one_buffer(path, memory, iters, monkeypatch):
    """Small matrices take these passes; every prior that may, a batch of tokens, and more rows than a large batch."""
    taken = []
    for name in ("iterate", "backward"):
        plain = getattr(stacked, name)
        monkeypatch.setattr(stacked, name, lambda *given, plain=plain, name=name: taken.append(name) or plain(*given))
    generator = torch.Generator().manual_seed(0)
    for prior in ("identity", "relu", "relu6", "hardtanh", "leaky"):
        for shape in ((7, 3, 12), (stacked.LARGE_BATCH + 8, 12)):
            shapes = (shape, (8, 12), (8,))
            given = [torch.randn(one, dtype=F64, generator=generator) for one in shapes]
            for formulation in ("normalized", "paper"):
                options = {"activation": PRIORS[prior], "solver": "proxgd", "iters": iters, "lipschitz": 40.0}
                options["formulation"] = formulation
                assert_same(
                    value_and_gradients(path, Geometry(), given, memory=memory, **options),
                    value_and_gradients("loop", Geometry(), given, **options),
                )
    # Of twelve iterations a two-step path does not keep every image.
    few = path == "two_step" and iters == 12 and memory == "auto"
    assert taken == ([] if few else ["iterate", "backward"] * 20)


def test_buffers_only_where_they_fit():
    """No momentum, no derivative that the iterate does not tell, no large buffer of a large batch, nothing recorded."""
    numbers = {"unit": True, "iterations": 10, "momentum": False, "low": False, "images": 9}
    rule = Rule(map=None, path="gram", prior=prox_for("relu"), **numbers)
    rows = stacked.LARGE_BATCH
    assert stacked.may_stack(rule, rows - 1, 10**6) and stacked.may_stack(rule, rows, 100)
    assert not stacked.may_stack(rule, rows, stacked.LARGEST)
    assert not stacked.may_stack(replace(rule, momentum=True), 2, 2)
    assert not stacked.may_stack(replace(rule, prior=prox_for("tanh")), 2, 2)
    assert stacked.may_stack(replace(rule, path="two_step"), 2, 2)
    assert not stacked.may_stack(replace(rule, path="two_step", images=8), 2, 2)
    tensors = torch.ones(2, 2), torch.ones(2, 2), torch.ones(())
    with torch.no_grad():
        assert stacked.at_hand(*tensors) and not stacked.at_hand(tensors[0].to("meta"), *tensors[1:])
    assert not stacked.at_hand(*tensors)


@pytest.mark.parametrize("iters", [2, 3, 8])
@pytest.mark.parametrize("memory", ["full", "low"])
@pytest.mark.parametrize("per_sample", [True, False])
def test_sampled_iterations_in_one_buffer(per_sample, memory, iters, monkeypatch):
    """Small matrices take these passes; every prior that may, biases of each row or none, steps that are no numbers."""
    taken = []
    for name in ("iterate", "backward"):
        plain = getattr(sampled_stacked, name)
        monkeypatch.setattr(
            sampled_stacked, name, lambda *given, plain=plain, name=name: taken.append(name) or plain(*given)
        )
    generator = torch.Generator().manual_seed(0)
    options = {"solver": "proxsg", "iters": iters, "lipschitz": 40.0, "lam": 0.3, "p": 0.4, "per_sample": per_sample}
    for prior in ("identity", "relu", "relu6", "hardtanh", "leaky"):
        for shapes in (((7, 3, 12), (8, 12), (8,), None, (7, 3, 8)), ((200, 12), (8, 12), None)):
            given = [None if one is None else torch.randn(one, dtype=F64, generator=generator) for one in shapes]
            for formulation in ("normalized", "paper"):
                more = {**options, "activation": PRIORS[prior], "formulation": formulation}
                assert_same(
                    value_and_gradients("masked", Geometry(), given, memory=memory, **more),
                    value_and_gradients("loop", Geometry(), given, **more),
                )
    # Iterates that were not kept are computed again.
    assert taken == (["iterate", "backward"] if memory == "full" else ["iterate", "iterate", "backward"]) * 20


def test_sampled_buffers_only_where_they_fit():
    """No columns, no derivative that the iterate does not tell, no large buffer of a large batch, no step of zero."""
    rule = SampledRule(
        operator=None, dtype=F64, columns=False, prior=prox_for("relu"), lam=0.0, share=2.0, unit=True,
        steps=(1.0, 0.5), iterations=2, low=False, stacked=True,
    )  # fmt: skip
    rows = stacked.LARGE_BATCH
    assert sampled_stacked.may_stack(rule, rows - 1, 10**6) and sampled_stacked.may_stack(rule, rows, 100)
    assert not sampled_stacked.may_stack(rule, rows, stacked.LARGEST)
    assert not sampled_stacked.may_stack(replace(rule, columns=True), 2, 2)
    assert not sampled_stacked.may_stack(replace(rule, iterations=1), 2, 2)
    assert not sampled_stacked.may_stack(replace(rule, prior=prox_for("tanh")), 2, 2)
    given = Given(torch.ones(2, 2), torch.ones(2, 2), None, torch.ones(2, 2, 2), torch.ones(()), None, rule)
    stacks = sampled_stacked.stacks
    with torch.no_grad():
        assert stacks(given) and stacks(given._replace(steps=torch.ones(2)))
        assert not stacks(given._replace(rule=replace(rule, stacked=False)))
        assert not stacks(given._replace(steps=torch.tensor([1.0, 0.0])))
