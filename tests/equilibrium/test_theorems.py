"""The paper's statements about the equilibrium, checked in float64 against dense references."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from solver_plugins.equilibrium import OptEqLayer, deep_opteq_of, objective, universal_weights
from solver_plugins.equilibrium.activations import allowed_activation, antiderivative
from solver_plugins.equilibrium.problem import potential
from solver_plugins.errors import NotProximalError, OptionError
from solver_plugins.prox import PRIORS
from tests.equilibrium.envelopes import block_objective, envelope, preimage
from tests.equilibrium.small import ACTIVATIONS, DOUBLE, inputs, integral, minimiser, network
from tests.tolerances import tolerance

CLOSE = tolerance(DOUBLE)._asdict()


def test_every_allowed_activation_has_a_case():
    allowed = {name for name in PRIORS.names("activation") if PRIORS.get(name).separable}
    assert allowed == {case.name for case in ACTIVATIONS}


@pytest.mark.parametrize("case", ACTIVATIONS, ids=str)
def test_antiderivative_is_the_integral(case):
    v = inputs(200) * 3
    expected = torch.from_numpy(integral(case, v.numpy()))
    torch.testing.assert_close(antiderivative(case.make(), v).detach(), expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("case", ACTIVATIONS, ids=str)
def test_theorem_1_equilibrium_minimises_h(case):
    model, x = network(activation=case.make()), inputs(2, 5)
    z = model(x).detach()
    unit = model.problem(x).units[0]
    for row in range(2):
        W, c = unit.operator.weight.detach().numpy(), unit.offset[row].detach().numpy()
        expected = minimiser(case, W, c)
        np.testing.assert_allclose(z[row].numpy(), expected, atol=1e-8, rtol=0)
    # And the package's own h agrees with it: flat at z, convex around it.
    z.requires_grad_()
    (slope,) = torch.autograd.grad(objective(unit, z).sum(), z)
    assert slope.abs().max() < 1e-8
    for seed in range(3):
        assert (objective(unit, z + inputs(2, 6, seed=seed)) >= objective(unit, z)).all()


def test_theorem_1_unit_is_the_gradient_of_its_potential_and_firmly_nonexpansive():
    unit = network(activation="tanh").problem(inputs(4, 5)).units[0]
    a, b = inputs(4, 6).requires_grad_(), inputs(4, 6, seed=2)
    (gradient,) = torch.autograd.grad(potential(unit, a).sum(), a)
    torch.testing.assert_close(gradient, unit.value(a), **CLOSE)
    moved = unit.value(a) - unit.value(b)
    # A proximal map: <P a - P b, a - b> >= |P a - P b|^2.
    assert ((moved * (a - b)).sum(1) >= moved.square().sum(1) - 1e-12).all()


def test_theorem_1_closed_form_for_relu_and_invertible_w():
    """phi(z) = 1^T relu*(W^-T z) - <c, W^-T z> - |z|^2/2, and the unit is its proximal map."""
    unit = network(state=6, hidden=6).problem(inputs(1, 5)).units[0]
    W, c = unit.operator.weight.detach(), unit.offset[0].detach()
    at = inputs(6)
    z = unit.value(at[None])[0].detach()

    def prox_objective(u):
        t = torch.linalg.solve(W.T, u)
        return (t.clamp_min(0).square() / 2).sum() - c @ t - u @ u / 2 + (u - at).square().sum() / 2

    t = torch.linalg.solve(W.T, z)
    assert t.min() > -1e-12  # In the domain of relu*.
    for seed in range(20):
        other = W.T @ (t + inputs(6, seed=seed).abs() * 10.0 ** (-seed % 5))
        assert prox_objective(other) >= prox_objective(z) - 1e-12


@pytest.mark.parametrize("solver", ["anderson", "fixed_point", "fista"])
def test_one_layer_does_not_depend_on_alpha(solver):
    x = inputs(3, 5)
    found = [network(alpha=alpha, solver=solver, iters=4000)(x) for alpha in (0.2, 0.6, 1.0)]
    torch.testing.assert_close(found[0], found[1], **CLOSE)
    torch.testing.assert_close(found[0], found[2], **CLOSE)


@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_lemma_3_deep_equilibrium_is_one_of_blocks(alpha):
    """z~ = a W~^T s(W~ P z~ + U~ x + b~) + (1 - a) P z~, written out with dense block matrices."""
    model, x = network(3, alpha=alpha), inputs(1, 5)
    z = model(x)[0].detach()
    units = model.problem(x).units
    blocks = [z]
    for unit in units[:-1]:
        blocks.append(unit.step(blocks[-1][None], alpha)[0].detach())
    stacked = torch.cat([*blocks[1:], blocks[0]])
    W = torch.block_diag(*(unit.operator.weight.detach() for unit in units))
    P = torch.kron(torch.eye(3, dtype=DOUBLE).roll(1, 0), torch.eye(6, dtype=DOUBLE))
    offset = torch.cat([unit.offset[0].detach() for unit in units])
    found = alpha * W.T @ torch.relu(W @ P @ stacked + offset) + (1 - alpha) * P @ stacked
    torch.testing.assert_close(found, stacked, **CLOSE)


def test_theorem_2_inclusion():
    """0 = grad Phi(z~) + (I - P) z~ with Phi the sum of the envelopes, for three layers."""
    alpha = 0.6
    model, x = network(3, alpha=alpha), inputs(2, 5)
    z = model(x).detach()
    units = model.problem(x).units
    points = [z]
    for unit in units:
        points.append(unit.step(points[-1], alpha).detach())
    for before, unit, after in zip(points[:-1], units, points[1:], strict=True):
        after = after.requires_grad_()
        (slope,) = torch.autograd.grad(envelope(unit, after, alpha).sum(), after)
        torch.testing.assert_close(slope + (after - before), torch.zeros_like(z), **CLOSE)


def test_envelope_is_the_moreau_envelope():
    """M(z) = min_y phi(y) + |y - z|^2/(2(1 - a)), attained at y = prox_phi(u) where f(u) = z."""
    alpha = 0.7
    unit = network(state=6, hidden=6).problem(inputs(1, 5)).units[0]
    W, c = unit.operator.weight.detach(), unit.offset[0].detach()
    z = inputs(6, seed=4)

    def phi(y):
        t = torch.linalg.solve(W.T, y)
        return (t.clamp_min(0).square() / 2).sum() - c @ t - y @ y / 2

    def inner(y):
        return phi(y) + (y - z).square().sum() / (2 * (1 - alpha))

    u = preimage(unit, z[None], alpha)
    y = unit.value(u)[0].detach()
    # Up to psi's constant: S(0) = 0 and relu* is the conjugate of S itself, so there is none.
    torch.testing.assert_close(envelope(unit, z[None], alpha)[0].detach(), alpha * inner(y), **CLOSE)
    t = torch.linalg.solve(W.T, y)
    for seed in range(20):
        other = W.T @ (t + inputs(6, seed=seed) * 10.0 ** (-seed % 5)).clamp_min(0)
        assert inner(other) >= inner(y) - 1e-12


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_corollary_1_two_layers_minimise_the_block_objective(activation):
    alpha = 0.7
    model, x = network(2, alpha=alpha, activation=activation), inputs(2, 5)
    z0 = model(x).detach().requires_grad_()
    first, second = model.problem(x).units
    z1 = first.step(z0, alpha).detach().requires_grad_()
    least = block_objective(first, second, alpha, z1, z0)
    for slope in torch.autograd.grad(least.sum(), [z1, z0]):
        assert slope.abs().max() < 1e-8
    for seed in range(5):
        moved = [z + inputs(2, 6, seed=seed + 10 * n) * 10.0 ** (-seed) for n, z in enumerate((z1, z0))]
        assert (block_objective(first, second, alpha, *moved) > least).all()
    with pytest.raises(OptionError, match=r"alpha in \(0, 1\)"):
        block_objective(first, second, 1.0, z1, z0)


def test_theorem_3_limit_of_small_steps_is_the_wide_equilibrium():
    """As a -> 0, z tends to the solution of L z = sum_l W_l^T s(W_l z + U_l x + b_l), linearly in a."""
    x = inputs(1, 5)
    units = network(3).problem(x).units
    wide = torch.zeros(1, 6, dtype=DOUBLE)
    for _ in range(2000):
        wide = sum(unit.value(wide) for unit in units).detach() / 3
    errors = [
        float((network(3, alpha=alpha, iters=20000, solver="anderson")(x) - wide).detach().norm())
        for alpha in (0.08, 0.04, 0.02, 0.01)
    ]
    ratios = [b / a for a, b in itertools.pairwise(errors)]
    assert all(0.4 < ratio < 0.6 for ratio in ratios), (errors, ratios)
    assert errors[-1] < 0.05 * float(wide.norm())


def mlp(widths, seed=0):
    torch.manual_seed(seed)
    return [nn.Linear(a, b, dtype=DOUBLE) for a, b in itertools.pairwise(widths)]


def forward(linears, x, activation=torch.relu):
    for linear in linears[:-1]:
        x = activation(linear(x))
    return linears[-1](x)


def test_lemma_1_universal_hidden_units():
    """The network z = W^T s(W z + U x + b) of equation (2) computes what the one of equation (1) does."""
    linears = mlp([4, 7, 3, 5, 2])
    injected = [nn.Linear(4, linear.out_features, dtype=DOUBLE) for linear in linears[:-1]]
    x = inputs(6, 4)
    plain = torch.zeros(6, 4, dtype=DOUBLE)
    for linear, inject in zip(linears[:-1], injected, strict=True):
        plain = torch.tanh(linear(plain) + inject(x))
    factors = universal_weights([linear.weight for linear in linears[1:]])
    z = torch.zeros(6, factors[0].shape[1], dtype=DOUBLE)
    for W, linear, inject in zip(factors[:-1], linears[:-1], injected, strict=True):
        z = torch.tanh(z @ W.T + linear.bias + inject(x)) @ W
    torch.testing.assert_close(z @ factors[-1].T, plain @ linears[-1].weight.T, **CLOSE)


@pytest.mark.parametrize(
    ("widths", "activation"),
    [
        ([4, 3], None),
        ([4, 7, 3], "relu"),
        ([4, 5, 6, 3], "relu"),
        ([4, 5, 6, 3, 2], "tanh"),
        ([4, 6, 2, 5, 3, 2], "relu"),
    ],
)
def test_lemma_2_deep_opteq_contains_feedforward_networks(widths, activation):
    linears, x = mlp(widths), inputs(6, 4)
    if activation is None:
        with pytest.raises(OptionError, match="hidden layer"):
            deep_opteq_of(linears)
        return
    model = deep_opteq_of(linears, activation)
    torch.testing.assert_close(model(x), forward(linears, x, getattr(torch, activation)), **CLOSE)
    assert float(model[0].solve(x).residual.max()) < 1e-12


def test_lemma_2_needs_three_hidden_layers_or_an_idempotent_activation():
    with pytest.raises(OptionError, match="three hidden layers or more"):
        deep_opteq_of(mlp([4, 5, 3]), "tanh")


@pytest.mark.parametrize("activation", ["gelu", nn.SiLU(), nn.SELU(), nn.Softmax(-1)])
def test_other_activations_are_refused(activation):
    with pytest.raises(NotProximalError):
        allowed_activation(activation)
    with pytest.raises(NotProximalError):
        OptEqLayer.linear(3, 3, activation=activation)
