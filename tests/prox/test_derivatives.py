import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from tests.prox.cases import CASES, STEPS, Case, away_from_kinks, each_case, grid


def _autograd_rtol(case: Case) -> float:
    # The backward of F.hardsigmoid multiplies by a float32 1/6, also in float64.
    return 1e-7 if case.name == "hardsigmoid" else 1e-9


@each_case
@pytest.mark.parametrize("step", STEPS)
def test_the_derivative_against_differences_and_autograd(case: Case, step):
    prior = case.make()
    a = away_from_kinks(prior, case, grid(), step)
    slope = prior.derivative(a, step).detach()
    assert slope.shape == a.shape
    assert (slope >= 0).all()
    assert (slope <= 1 + 1e-12).all()

    h = 1e-5
    difference = (prior.prox(a + h, step) - prior.prox(a - h, step)).detach() / (2 * h)
    torch.testing.assert_close(slope, difference, rtol=1e-5, atol=1e-6)

    a.requires_grad_()
    (gradient,) = torch.autograd.grad(prior.prox(a, step).sum(), a)
    torch.testing.assert_close(slope, gradient, rtol=_autograd_rtol(case), atol=1e-10)

    weight = torch.randn_like(slope)
    torch.testing.assert_close(prior.vjp(a, step, weight).detach(), slope * weight)


@each_case
def test_the_derivative_at_a_kink_is_that_of_autograd(case: Case):
    prior = case.make()
    a = torch.tensor([0.0, *case.kinks], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(prior.prox(a, 1.0).sum(), a)
    torch.testing.assert_close(prior.derivative(a, 1.0).detach(), gradient, rtol=_autograd_rtol(case), atol=1e-12)


@each_case
@pytest.mark.parametrize("step", [0.05, 1.0])
def test_gradcheck_and_gradgradcheck(case: Case, step):
    prior = case.make()
    a = torch.tensor([-3.3, -0.23, 0.88, 1.71], dtype=torch.float64)
    a = away_from_kinks(prior, case, a, step).requires_grad_()
    assert gradcheck(lambda z: prior.prox(z, step), a)
    if (case.name, step) != ("hardsigmoid", 1.0):  # torch has no second derivative of it
        assert gradgradcheck(lambda z: prior.prox(z, step), a)


@each_case
def test_gradients_reach_a_step_that_is_a_tensor(case: Case):
    prior = case.make()
    a = torch.tensor([-0.81, 1.77], dtype=torch.float64)
    step = torch.tensor(5.0, dtype=torch.float64, requires_grad=True)
    a = away_from_kinks(prior, case, a, 5.0).requires_grad_()
    assert gradcheck(prior.prox, (a, step))
    if not prior.scale_free:
        assert gradgradcheck(prior.prox, (a, step))


@pytest.mark.parametrize("name", ["tanh", "softplus", "elu", "atan", "tanh_barrier", "softplus_barrier", "monotone"])
def test_third_derivatives_are_right_too(name):
    prior = next(case for case in CASES if case.name == name).make()
    a = torch.tensor([-1.3, 0.4, 2.2], dtype=torch.float64)

    def second(z):
        z = z.requires_grad_()
        (first,) = torch.autograd.grad(prior.prox(z, 0.4).sum(), z, create_graph=True)
        return torch.autograd.grad(first.sum(), z, create_graph=True)[0]

    z = a.clone()
    (third,) = torch.autograd.grad(second(z).sum(), z)
    h = 1e-5
    difference = (second(a + h) - second(a - h)).detach() / (2 * h)
    torch.testing.assert_close(third, difference, rtol=1e-5, atol=1e-7)


@each_case
def test_gradients_are_finite_far_out_and_at_zero(case: Case):
    prior = case.make()
    for step in (1e-3, 0.5, 20.0):
        a = torch.tensor([-1e4, -60.0, -1.0, 0.0, 0.5, 1.0, 60.0, 1e4], dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad(prior.prox(a, step).sum(), a, create_graph=True)
        assert gradient.isfinite().all()
        if gradient.requires_grad:
            (second,) = torch.autograd.grad(gradient.sum(), a, allow_unused=True)
            assert second is None or second.isfinite().all()


# torch.func.jvp compiles its rules by torch.jit.script on first use.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:FutureWarning")
@each_case
def test_functional_transforms(case: Case):
    prior = case.make()
    a = torch.tensor([-1.37, 0.42, 2.71], dtype=torch.float64)
    expected = prior.derivative(a, 0.6).detach()
    torch.testing.assert_close(torch.func.grad(lambda z: prior.prox(z, 0.6).sum())(a), expected)
    torch.testing.assert_close(torch.func.vmap(lambda z: prior.prox(z, 0.6))(a), prior.prox(a, 0.6))
    _, tangent = torch.func.jvp(lambda z: prior.prox(z, 0.6), (a,), (torch.ones_like(a),))
    torch.testing.assert_close(tangent, expected)
