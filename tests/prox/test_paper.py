"""The formulas of "Deep Layers as Stochastic Solvers", Table 1 and appendices A to C, as identities in float64."""

import math

import pytest
import torch

from solver_plugins.prox import LeakyReluPrior, SigmoidBarrier, SoftplusBarrier, SquaredHinge, TanhBarrier
from tests.prox.cases import grid

GAMMAS = (0.1, 1.0, 3.0)
STEPS = (0.02, 1.0, 7.0)


def assert_close(actual, expected, rtol=1e-11, atol=1e-12):
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("step", STEPS)
def test_proposition_3(gamma, step):
    a, shift, c = grid(), 0.4, step * gamma
    expected = torch.where(a >= -shift, a, (a - c * shift) / (1 + c))
    assert_close(SquaredHinge(gamma, shift).prox(a, step), expected)
    # lambda = 0 and gamma = (1 - s)/s is the Leaky ReLU of slope s, at every step.
    slope = 1 / (1 + gamma)
    assert_close(SquaredHinge(gamma).prox(a, step), LeakyReluPrior(slope).prox(a, step))
    assert_close(SquaredHinge(gamma).g(a), LeakyReluPrior(slope).g(a))


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("step", STEPS)
def test_equation_10(gamma, step):
    a = grid()
    assert_close(SoftplusBarrier(gamma).prox(a, step), a / 2 + torch.sqrt(a**2 / 4 + step * gamma), atol=1e-11)


def test_the_softplus_barrier_resembles_softplus():
    a = torch.linspace(-5, 5, 101, dtype=torch.float64)
    assert (SoftplusBarrier(1.0).prox(a) - torch.nn.functional.softplus(a)).abs().max() < 0.35


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("step", STEPS)
def test_equation_12_with_the_general_weight(gamma, step):
    a = grid()
    x = TanhBarrier(gamma).prox(a, step)
    c = step * gamma
    residual = x**3 - a * x**2 - (1 + 2 * c) * x + a
    assert (residual.abs() <= 1e-13 * (1 + c + a.abs())).all()
    assert (x.abs() < 1).all()


def test_equation_14_has_three_roots_and_the_last_one_is_the_prox():
    a = torch.linspace(-6, 6, 61, dtype=torch.float64)
    p = a**2 / 9 + 1
    y = torch.acos(a**3 / (27 * p**1.5))
    roots = [2 * p.sqrt() * torch.cos(y / 3 + 2 * math.pi * k / 3) + a / 3 for k in range(3)]
    for root in roots:
        assert (root**3 - a * root**2 - 3 * root + a).abs().max() < 1e-11
    assert_close(TanhBarrier(1.0).prox(a), roots[2])


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("step", STEPS)
def test_equation_18_with_the_errata(gamma, step):
    a, c = grid(), step * gamma
    p = a**2 / 9 + (1 + 2 * c) / 3
    q = a**3 / 27 + a * (c - 1) / 3
    expected = a / 3 - 2 * p.sqrt() * torch.sin(torch.asin(q / p**1.5) / 3)
    # The closed form itself loses some digits: the very reason not to compute with it.
    assert_close(TanhBarrier(gamma).prox(a, step), expected, rtol=1e-8, atol=1e-8)


def test_equation_18_as_printed_is_the_unit_weight():
    a = torch.linspace(-6, 6, 61, dtype=torch.float64)
    p = a**2 / 9 + 1
    assert_close(TanhBarrier(1.0).prox(a), a / 3 - 2 * p.sqrt() * torch.sin(torch.asin(a**3 / (27 * p**1.5)) / 3))


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("step", STEPS)
def test_the_sigmoid_barrier_solves_its_cubic(gamma, step):
    a, c = grid(), step * gamma
    x = SigmoidBarrier(gamma).prox(a, step)
    # x - a - c/x + c/(1 - x) = 0, times x (1 - x)
    residual = (x - a) * x * (1 - x) - c * (1 - x) + c * x
    assert (residual.abs() <= 1e-13 * (1 + c + a.abs())).all()
    assert ((x > 0) & (x < 1)).all()
    assert SigmoidBarrier(gamma).prox(torch.tensor([0.5], dtype=torch.float64), step).item() == pytest.approx(0.5)


def test_barriers_keep_relative_accuracy_near_their_walls_in_float32():
    a = -torch.logspace(0, 4, 50)
    for prior in (SoftplusBarrier(0.1), SigmoidBarrier(0.1)):
        x = prior.prox(a, 1e-2)
        torch.testing.assert_close(x.double(), prior.prox(a.double(), 1e-2), rtol=3e-6, atol=0)
