import copy
import math
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional

from solver_plugins.errors import NotProximalError
from solver_plugins.prox import Monotone, SigmoidPrior, SoftplusPrior, TanhPrior, check_monotone, make_prior
from solver_plugins.prox.conjugate import conjugate_penalty, inverse
from tests.prox.cases import CASES, each_activation, grid, rational


@pytest.mark.parametrize("step", [0.05, 0.6, 8.0])
@pytest.mark.parametrize(
    ("function", "prior"), [(torch.tanh, TanhPrior()), (torch.sigmoid, SigmoidPrior())], ids=["tanh", "sigmoid"]
)
def test_a_function_given_by_the_user_is_as_good_as_a_built_in_one(function, prior, step):
    mine = Monotone(function)
    a = grid()
    torch.testing.assert_close(mine.prox(a, step), prior.prox(a, step))
    torch.testing.assert_close(mine.derivative(a, step), prior.derivative(a, step))
    x = prior.prox(a, step)
    # By quadrature, up to a constant.
    offset = mine.g(x) - prior.g(x)
    torch.testing.assert_close(offset, offset[:1].expand_as(offset), rtol=0, atol=1e-8)


def test_a_given_slope_and_penalty_are_used():
    mine = Monotone(torch.tanh, slope=lambda v: torch.cosh(v) ** -2, penalty=TanhPrior().g, bounded=True)
    a = torch.linspace(-3, 3, 21, dtype=torch.float64)
    torch.testing.assert_close(mine.prox(a, 0.4), TanhPrior().prox(a, 0.4))
    assert torch.equal(mine.g(a), TanhPrior().g(a))
    assert mine.bounded


def test_the_quadrature_against_closed_forms():
    x = torch.linspace(0.01, 6, 40, dtype=torch.float64)
    offset = conjugate_penalty(functional.softplus, x) - SoftplusPrior().g(x)
    torch.testing.assert_close(offset, offset[:1].expand_as(offset), rtol=0, atol=1e-8)
    assert (conjugate_penalty(torch.sigmoid, torch.tensor([-0.1, 1.1])) == math.inf).all()
    torch.testing.assert_close(inverse(torch.tanh, torch.tensor([0.5], dtype=torch.float64)).item(), math.atanh(0.5))


def test_an_awkward_function_still_converges():
    """Two steep flights with a landing between them: plain Newton jumps to and fro."""

    def stairs(v):
        return (torch.tanh(4 * (v - 3)) + torch.tanh(4 * (v + 3))) / 4

    check_monotone(stairs)
    prior = Monotone(stairs)
    a = torch.linspace(-30, 30, 2001, dtype=torch.float64)
    for step in (1e-3, 0.02, 0.4, 3.0, 40.0):
        v = prior.argument(a, step)
        residual = step * (v - stairs(v)) + stairs(v) - a
        assert (residual.abs() <= 1e-11 * (1 + a.abs())).all()


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (functional.gelu, "decreases near -"),
        (functional.selu, "steeper than 1"),
        (lambda v: 2 * v, "steeper than 1 near -30"),
        (torch.log, "NaN"),
    ],
)
def test_check_monotone_refuses(function, reason):
    with pytest.raises(NotProximalError, match=reason):
        check_monotone(function)


@each_activation
def test_every_activation_in_the_table_passes_the_check(case):
    check_monotone(case.activation, points=6001)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda prior: pickle.loads(pickle.dumps(prior))], ids=["copy", "pickle"]
)
def test_priors_can_be_copied_and_pickled(case, clone):
    prior = case.make()
    copied = clone(prior)
    assert type(copied) is type(prior)
    a = grid()
    assert torch.equal(copied.prox(a, 0.3), prior.prox(a, 0.3))


def test_the_input_is_never_changed():
    for case in CASES:
        a = grid()
        kept = a.clone()
        prior = case.make()
        for step in (1.0, 0.5):
            prior.prox(a, step)
            prior.derivative(a, step)
            prior.g(a)
        assert torch.equal(a, kept), case.name


class Block(nn.Module):
    """A step on the device and a prior, as a solver block has them."""

    def __init__(self, prior):
        super().__init__()
        self.prior = prior
        self.register_buffer("step", torch.tensor(0.4))

    def forward(self, a):
        return self.prior.prox(a, self.step)


@pytest.mark.parametrize("name", ["tanh", "softshrink", "softsign", "hardsigmoid"])
def test_a_step_on_the_device_compiles_without_a_graph_break(name):
    torch.compiler.reset()
    block = Block(make_prior(name))
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    a = torch.randn(32, requires_grad=True)
    actual = compiled(a)
    torch.testing.assert_close(actual, block(a))
    (gradient,) = torch.autograd.grad(actual.sum(), a)
    torch.testing.assert_close(gradient, block.prior.derivative(a, block.step).detach())
    # A new step in the same buffer takes effect without a new graph.
    with torch.no_grad():
        block.step.fill_(3.0)
    with torch.compiler.set_stance("fail_on_recompile"):
        torch.testing.assert_close(compiled(a), block(a))


def test_a_function_given_by_the_user_compiles_too():
    torch.compiler.reset()
    block = Block(Monotone(rational, newton_steps=4))
    a = torch.randn(8)
    torch.testing.assert_close(torch.compile(block, fullgraph=True, backend="eager")(a), block(a))


def test_inference_mode():
    with torch.inference_mode():
        a = torch.randn(5)
        assert TanhPrior().prox(a, 0.5).is_inference()
