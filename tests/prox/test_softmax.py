import numpy as np
import pytest
import torch
from scipy import optimize

from solver_plugins.errors import OptionError
from solver_plugins.prox import SoftmaxPrior, make_prior


@pytest.mark.parametrize("dim", [-1, 1, 0])
def test_the_unit_step_is_softmax_bit_for_bit(dim):
    a = torch.randn(3, 4, 5)
    prior = make_prior("softmax", dim=dim)
    assert torch.equal(prior.prox(a), torch.softmax(a, dim))
    assert torch.equal(prior.argument(a), a)


def test_it_minimises_over_the_simplex():
    prior = SoftmaxPrior()
    a = torch.tensor([0.3, -1.2, 2.0], dtype=torch.float64)

    def objective(z):
        x = torch.softmax(torch.from_numpy(np.append(z, 0.0)), -1)  # every point of the open simplex, once
        return (prior.g(x).sum() + (x - a).square().sum() / 2).item()

    best = optimize.minimize(objective, np.zeros(2), method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-14})
    x = prior.prox(a)
    assert prior.g(x).sum() + (x - a).square().sum() / 2 <= best.fun + 1e-12
    torch.testing.assert_close(x, torch.softmax(torch.from_numpy(np.append(best.x, 0.0)), -1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dim", [-1, 0])
def test_the_vjp_is_that_of_autograd(dim):
    prior = SoftmaxPrior(dim)
    a = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 3, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((prior.prox(a) * weight).sum(), a)
    torch.testing.assert_close(prior.vjp(a, 1.0, weight), gradient)


def test_firm_nonexpansiveness():
    a, b = torch.randn(2, 200, 6, dtype=torch.float64) * 4
    p, q = SoftmaxPrior().prox(a), SoftmaxPrior().prox(b)
    assert ((p - q).square().sum(-1) <= ((p - q) * (a - b)).sum(-1) + 1e-14).all()


@pytest.mark.parametrize("step", [0.5, 2, torch.tensor(1.0)])
def test_other_steps_are_refused(step):
    prior = SoftmaxPrior()
    a = torch.randn(3)
    for call in (lambda: prior.prox(a, step), lambda: prior.argument(a, step), lambda: prior.vjp(a, step, a)):
        with pytest.raises(OptionError, match="step 1 only"):
            call()


def test_flags_and_the_derivative():
    prior = SoftmaxPrior()
    assert prior.unit_step_only
    assert prior.bounded
    assert not prior.separable
    assert prior.zero_argument is None
    with pytest.raises(OptionError, match="use vjp"):
        prior.derivative(torch.randn(3))


def test_the_penalty_outside_of_the_simplex():
    prior = SoftmaxPrior()
    assert prior.g(torch.tensor([0.5, 0.6])).sum() == torch.inf
    assert prior.g(torch.tensor([-0.5, 1.5])).sum() == torch.inf
    assert prior.g(torch.tensor([0.0, 1.0])).sum() == -0.5
