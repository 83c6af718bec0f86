"""The propositions of the paper, each under its number."""

import copy
import itertools

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from solver_plugins import ProxProp
from tests.proxprop.dense import flat, matrix_of

D = {"dtype": torch.float64}


def mlp(*sizes, activation=nn.Tanh):
    layers = []
    for n1, n2 in itertools.pairwise(sizes):
        layers += [nn.Linear(n1, n2, **D), activation()]
    return nn.Sequential(*layers[:-1])


def test_proposition_1_algorithm_1_is_gradient_descent():
    """Forward pass, then one gradient step on the penalty E (3) per variable, with rho = gamma = 1/tau."""
    model, x, tau = mlp(4, 5, 3, 2), torch.randn(6, 4, **D), 0.1
    layers, rate = [model[0], model[2], model[4]], 1 / tau

    def loss_of(output):
        return output.square().sum().exp().log1p()

    thetas = [[parameter.detach().clone() for parameter in layer.parameters()] for layer in layers]
    z, a = [], [x]
    for weight, bias in thetas[:-1]:
        z.append(a[-1] @ weight.T + bias)
        a.append(torch.tanh(z[-1]))

    def energy(thetas, z, a):
        total = loss_of(a[-1] @ thetas[-1][0].T + thetas[-1][1])
        for index in range(len(z)):
            total = total + rate / 2 * (torch.tanh(z[index]) - a[index + 1]).square().sum()
            linear = a[index] @ thetas[index][0].T + thetas[index][1]
            total = total + rate / 2 * (linear - z[index]).square().sum()
        return total

    def step(variables):
        for variable in variables:
            variable.requires_grad_()
        gradients = torch.autograd.grad(energy(thetas, z, a), variables)
        moved = [(variable - tau * gradient).detach() for variable, gradient in zip(variables, gradients, strict=True)]
        for variable in variables:
            variable.requires_grad_(False)
        return moved

    *thetas[-1], a[-1] = step([*thetas[-1], a[-1]])
    for index in reversed(range(len(z))):
        (z[index],) = step([z[index]])
        new = step([a[index], *thetas[index]])
        # The input is no variable; the weights move together with it, not after it.
        thetas[index] = new[1:]
        if index:
            a[index] = new[0]

    loss_of(model(x)).backward()
    for layer, theta in zip(layers, thetas, strict=True):
        for parameter, updated in zip(layer.parameters(), theta, strict=True):
            torch.testing.assert_close(updated, (parameter - tau * parameter.grad).detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mode", ["exact", "cg1", "cg3"])
@pytest.mark.parametrize("batch", [3, 30])
def test_proposition_2_small_tau_recovers_the_gradient(mode, batch):
    model, x = mlp(7, 6, 2), torch.randn(batch, 7, **D)
    with ProxProp(model, mode, tau_theta=1e-12) as prox:
        model(x).square().mean().backward()
        g = model[0].weight.grad.clone()
        prox.precondition()
    torch.testing.assert_close(model[0].weight.grad / 1e-12, g, rtol=1e-8, atol=1e-12)


def test_proposition_3_fixed_points_are_stationary():
    """Where the direction vanishes, so does the plain gradient, and the other way round: M is bounded on both sides."""
    model, x, y, tau = mlp(3, 8, 2), torch.randn(5, 3, **D), torch.randn(5, 2, **D), 0.5

    def loss():
        return (model(x) - y).square().sum() / 40

    def both():
        model.zero_grad()
        with ProxProp(model, tau_theta=tau) as prox:
            loss().backward()
            plain = flat([model[0].weight.grad, model[0].bias.grad])
            prox.precondition()
        return plain.norm(), flat([model[0].weight.grad, model[0].bias.grad]).norm()

    largest = 1 / tau + float(torch.cat([x, torch.ones(5, 1, **D)], 1).square().sum())
    start = both()[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with ProxProp(model, tau_theta=tau) as prox:
        prox.attach(optimizer)
        for _ in range(300):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
    plain, moved = both()
    assert plain < 0.3 * start
    assert moved <= tau * plain and plain <= largest * moved
    # A stationary point, found by another method.
    solver = torch.optim.LBFGS(model.parameters(), max_iter=500, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def closure():
        solver.zero_grad()
        value = loss()
        value.backward()
        return value

    solver.step(closure)
    plain, moved = both()
    assert plain < 1e-4 and moved <= tau * plain


@given(st.integers(1, 12), st.integers(1, 6), st.sampled_from([1e-3, 1.0, 50.0]), st.integers(0, 99))
@settings(max_examples=25)
def test_proposition_4_descent_with_a_bounded_angle(batch, width, tau, seed):
    torch.manual_seed(seed)
    model, x = mlp(4, width, 2), torch.randn(batch, 4, **D)
    A = matrix_of(model[0], [x], ["weight", "bias"])
    with ProxProp(model, tau_theta=tau) as prox:
        model(x).square().sum().backward()
        g = flat([model[0].weight.grad, model[0].bias.grad])
        prox.precondition()
    v = flat([model[0].weight.grad, model[0].bias.grad])
    # (33): the smallest over the largest eigenvalue of the inverse.
    values = torch.linalg.eigvalsh(torch.eye(A.shape[1], **D) / tau + A.T @ A)
    assert v @ g / (v.norm() * g.norm()) >= values[0] / values[-1] * (1 - 1e-9)
    assert v @ g > 0


@given(
    st.sampled_from(["linear", "conv"]),
    st.integers(1, 9),
    st.integers(1, 8),
    st.sampled_from([1e-4, 1.0, 1e4]),
    st.sampled_from([1e-5, 1.0, 100.0]),
    st.integers(0, 999),
)
@settings(max_examples=60)
def test_proposition_5_cg_directions_descend(kind, batch, steps, tau, size, seed):
    torch.manual_seed(seed)
    if kind == "linear":
        model, x = mlp(6, 5, 2), size * torch.randn(batch, 6, **D)
    else:
        model = nn.Sequential(nn.Conv2d(2, 3, 3, **D), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2, **D))
        x = size * torch.randn(batch, 2, 4, 4, **D)
    with ProxProp(model, f"cg{steps}", tau_theta=tau) as prox:
        model(x).square().sum().backward()
        g = flat([model[0].weight.grad, model[0].bias.grad])
        prox.precondition()
    v = flat([model[0].weight.grad, model[0].bias.grad])
    # Activations that are saturated leave no gradient at all.
    assume(g @ g > 1e-200)
    assert v @ g > 0


def test_small_gradients_are_solved_as_well_as_large_ones():
    """No epsilon in the denominators: gradients of 1e-5 and below get the same direction."""
    model, x = mlp(7, 6, 2), torch.randn(4, 7, **D)
    directions = []
    for scale in (1.0, 1e-12):
        other = copy.deepcopy(model)
        with ProxProp(other, "cg3") as prox:
            (scale * other(x).square().sum()).backward()
            prox.precondition()
        directions.append(other[0].weight.grad / scale)
    torch.testing.assert_close(*directions, rtol=1e-10, atol=0)
