"""Promise 1: ``proxgd`` at one iteration is the same function, in values, gradients and norm statistics."""

import pytest
import torch

from solver_plugins.blocks import blocks_of
from tests.promises.cases import DETERMINISTIC, MODELS, SMALL, converted, rows, run, singles, twins
from tests.promises.small import still
from tests.tolerances import tolerance

ROWS = rows((model, solver) for model in MODELS for solver in DETERMINISTIC if solver == "proxgd" or model in SMALL)


@pytest.mark.parametrize(("model", "solver"), ROWS)
def test_one_iteration_is_the_same_function(model, solver):
    """Promise 1, in training (dropout at rate zero) and evaluation, float64."""
    plain, made = twins(model, solver, torch.float64, iters=1)
    assert blocks_of(made)
    for training in (True, False):
        outputs = [run(still(one).train(training), model, torch.float64) for one in (made, plain)]
        torch.testing.assert_close(*outputs, **tolerance(torch.float64)._asdict())
        for output in outputs:
            output.square().sum().backward()
    for (name, one), (other_name, other) in zip(made.named_parameters(), plain.named_parameters(), strict=True):
        assert name == other_name and (one.grad is None) == (other.grad is None)
        if other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, **tolerance(torch.float64)._asdict())
    torch.testing.assert_close(made.state_dict(), plain.state_dict(), **tolerance(torch.float64)._asdict())


@pytest.mark.parametrize("model", MODELS)
def test_dropout_stays_live_under_a_deterministic_solver(model):
    """Promise 1: with dropout on, the same random numbers give the same output."""
    outputs = []
    for made in twins(model, "proxgd", torch.float64, iters=1):
        torch.manual_seed(3)
        outputs.append(run(made.train(), model, torch.float64))
    torch.testing.assert_close(*outputs, **tolerance(torch.float64)._asdict())


@pytest.mark.parametrize("model", singles())
def test_more_iterations_are_another_function(model):
    """The counterpart of promise 1: a test that compares blocks which never run would pass it, too."""
    plain, made = twins(model, "proxgd", torch.float64)
    a, b = run(plain.eval(), model, torch.float64), run(made.eval(), model, torch.float64)
    assert torch.isfinite(b).all() and (a - b).abs().max() > 1e-6 * a.abs().max()


@pytest.mark.parametrize("model", SMALL)
def test_sampling_at_rate_zero_is_the_same_function(model):
    """Promise 1 for a sampling solver that keeps every feature."""
    plain, made = twins(model, "proxsg", torch.float64, iters=1, p=0.0)
    outputs = [run(still(one).train(), model, torch.float64) for one in (made, plain)]
    torch.testing.assert_close(*outputs, **tolerance(torch.float64)._asdict())
    assert blocks_of(converted(model, "proxsg", torch.float64, iters=1, p=0.0)).keys() == blocks_of(made).keys()
