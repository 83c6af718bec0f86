"""What one iteration of each solver is: Propositions 1, 2 and 6 of "Deep Layers as Stochastic Solvers"."""

import itertools

import pytest
import torch
from torch import nn

from solver_plugins import lipschitz_constant, list_solvers, solver_conv2d, solver_linear
from solver_plugins.operators import ConvMap, Geometry, operator_from_kernel, tau_nice_mask
from solver_plugins.prox import prox_for
from solver_plugins.solve import BlockProblem
from tests.solve.cases import CASES

F64 = torch.float64


def problem_for(weight, bias, u, prior="relu", lam=1e-3, formulation="normalized"):
    L = torch.linalg.matrix_norm(weight, 2) ** 2 + lam
    return BlockProblem(
        operator=operator_from_kernel(weight, Geometry(), u.shape),
        input=u,
        bias=bias,
        layer=lambda: u @ weight.T + bias,
        dtype=F64,
        rounding=1e-16,
        prior=prox_for(prior),
        smoothness=L,
        lam=lam,
        formulation=formulation,
    )


def test_every_solver_has_a_row():
    assert set(CASES) == set(list_solvers())


@pytest.mark.parametrize("name", sorted(set(CASES) - {"proxsg", "rcd"}))
def test_first_iteration_is_the_plain_layer(name):
    """Eq. 3 at x = 0 and the unit step: the argument of the first prox is A u + b, bit for bit."""
    u, weight, bias = torch.randn(3, 6, dtype=F64), torch.randn(4, 6, dtype=F64), torch.randn(4, dtype=F64)
    assert torch.equal(
        solver_linear(u, weight, bias, activation="relu", solver=name, iters=1, **CASES[name]), u @ weight.T + bias
    )


@pytest.mark.parametrize("per_sample", [True, False])
@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Tanh(), nn.Softplus(), nn.ELU(), nn.Softshrink(0.2)])
def test_proxsg_is_exact_count_dropout_then_layer(activation, per_sample):
    """Prop. 1, eq. 7, with the bias unscaled, as corrected."""
    u, weight, bias = torch.randn(5, 8, dtype=F64), torch.randn(3, 8, dtype=F64), torch.randn(3, dtype=F64)
    tau = 3
    generator = torch.Generator().manual_seed(3)
    got = solver_linear(
        u, weight, bias, activation=activation, solver="proxsg", iters=1, p=1 - tau / 8, per_sample=per_sample,
        output="value", generator=generator,
    )  # fmt: skip
    batch = (5,) if per_sample else ()
    mask = tau_nice_mask(batch, 8, tau, device=u.device, dtype=F64, generator=torch.Generator().manual_seed(3))
    assert (mask.sum(-1) == tau).all()
    expected = activation((8 / tau) * (mask * u) @ weight.T + bias)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_proxsg_convolution_drops_whole_channels():
    """Prop. 1 for W, H > 1: complete input features are dropped."""
    u, weight = torch.randn(2, 4, 5, 5, dtype=F64), torch.randn(3, 4, 3, 3, dtype=F64)
    got = solver_conv2d(
        u, weight, None, padding=1, activation="relu", solver="proxsg", iters=1, p=0.5,
        generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    mask = tau_nice_mask((2,), 4, 2, device=u.device, dtype=F64, generator=torch.Generator().manual_seed(1))
    expected = nn.functional.conv2d(2 * mask[:, :, None, None] * u, weight, padding=1)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("output", ["value", "argument"])
@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Tanh(), nn.ELU(0.7), nn.LeakyReLU(0.1)])
def test_rcd_is_mask_times_activation_of_the_layer(activation, output):
    """Prop. 6 with the prox on the drawn coordinates only, not rescaled."""
    u, weight, bias = torch.randn(5, 4, dtype=F64), torch.randn(6, 4, dtype=F64), torch.randn(6, dtype=F64)
    got = solver_linear(
        u, weight, bias, activation=activation, solver="rcd", iters=1, p=0.5, output=output,
        generator=torch.Generator().manual_seed(3),
    )  # fmt: skip
    got = activation(got) if output == "argument" else got
    mask = tau_nice_mask((5,), 6, 3, device=u.device, dtype=F64, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(got, mask * activation(u @ weight.T + bias), rtol=1e-12, atol=1e-12)


def test_rcd_of_an_activation_without_a_zero_gives_its_value():
    u, weight = torch.randn(5, 4, dtype=F64), torch.randn(6, 4, dtype=F64)
    got = solver_linear(
        u, weight, activation=nn.Sigmoid(), solver="rcd", iters=1, p=0.5, output="value",
        generator=torch.Generator().manual_seed(3),
    )  # fmt: skip
    mask = tau_nice_mask((5,), 6, 3, device=u.device, dtype=F64, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(got, mask * torch.sigmoid(u @ weight.T), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("formulation", ["normalized", "paper"])
def test_first_outer_loop_of_ms2gd_obeys_eq_31(formulation):
    """x <- prox(t c + (I - t s (n1/tau A_S A_S^T + lam)) x) with one fresh S per inner step after the first."""
    n1, tau, lam = 6, 2, 1e-3
    u, weight, bias = torch.randn(n1, dtype=F64), torch.randn(4, n1, dtype=F64), torch.randn(4, dtype=F64)
    L = float(torch.linalg.matrix_norm(weight, 2)) ** 2
    got = solver_linear(
        u, weight, bias, activation="relu", solver="ms2gd", iters=4, inner=4, p=1 - tau / n1, step="constant",
        lam=lam, formulation=formulation, lipschitz=L, output="value", generator=torch.Generator().manual_seed(5),
    )  # fmt: skip
    source = torch.Generator().manual_seed(5)
    c, total = weight @ u + bias, L + lam
    scale, step = (1 / total, 1.0) if formulation == "normalized" else (1.0, 1 / total)
    x = torch.relu(step * c)
    for _ in range(3):
        mask = tau_nice_mask((), n1, tau, device=u.device, dtype=F64, generator=source)
        chosen = weight[:, mask > 0]
        sampled = scale * (n1 / tau * chosen @ chosen.T + lam * torch.eye(4, dtype=F64))
        x = torch.relu(step * c + (torch.eye(4, dtype=F64) - step * sampled) @ x)
    torch.testing.assert_close(got, x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("formulation", ["normalized", "paper"])
def test_sampled_gradients_average_to_the_full_one(formulation):
    """Lemma 3 (with <B, X> inside the sum): all tau-subsets of a small layer enumerated."""
    n1, tau = 5, 2
    problem = problem_for(
        torch.randn(4, n1, dtype=F64), torch.randn(4, dtype=F64), torch.randn(n1, dtype=F64), formulation=formulation
    )
    x = torch.randn(4, dtype=F64)
    subsets = list(itertools.combinations(range(n1), tau))
    total = torch.zeros(4, dtype=F64)
    for subset in subsets:
        weights = torch.zeros(n1, dtype=F64)
        weights[list(subset)] = n1 / tau
        total += problem.sampled_gradient(x, weights)
    torch.testing.assert_close(total / len(subsets), problem.gradient(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sampling", ["lipschitz", "gradient"])
def test_importance_sampling_is_unbiased_and_has_an_exact_count(sampling):
    from solver_plugins.solve import Draws, ProxSG

    n1, tau, repeats = 6, 3, 40_000
    weight = torch.randn(4, n1, dtype=F64) * torch.logspace(-1, 1, n1, dtype=F64)
    u = torch.randn(n1, dtype=F64).expand(repeats, n1)
    problem = problem_for(weight, torch.zeros(4, dtype=F64), u)
    solver = ProxSG.from_options(p=0.5, sampling=sampling)
    x = torch.rand(4, dtype=F64).expand(repeats, 4)
    residual = problem.scaled(problem.operator.adjoint(x)) - u
    probabilities = solver._probabilities(problem, residual, tau, problem.operator.column_norms_sq())
    weights = solver._weights(problem, probabilities, tau, Draws(torch.Generator().manual_seed(0)))
    assert ((weights > 0).sum(-1) == tau).all()
    mean, error = weights.mean(0), weights.std(0) / repeats**0.5
    assert ((mean - 1).abs() < 5 * error + 1e-12).all()


def test_paper_formulation_is_the_normalized_one_divided_by_L_for_relu():
    u, weight, bias = torch.randn(3, 8, dtype=F64), torch.randn(5, 8, dtype=F64), torch.randn(5, dtype=F64)
    fc = nn.Linear(8, 5, dtype=F64)
    fc.weight.data.copy_(weight)
    L = lipschitz_constant(fc, method="exact")
    keywords = {"activation": "relu", "solver": "proxgd", "iters": 7, "lipschitz": L, "output": "value"}
    normalized = solver_linear(u, weight, bias, formulation="normalized", **keywords)
    paper = solver_linear(u, weight, bias, formulation="paper", **keywords)
    torch.testing.assert_close(normalized, (L + 1e-3) * paper, rtol=1e-12, atol=1e-12)


def test_singular_directions_grow_as_the_design_says():
    """g = 0: a direction of singular value s is multiplied by (1 - (1 - s^2/L)^K) / (s^2/L)."""
    s = torch.tensor([1.0, 0.5, 0.1], dtype=F64)
    K = 10
    got = solver_linear(torch.eye(3, dtype=F64), torch.diag(s), solver="proxgd", iters=K, lam=0.0, lipschitz=1.0)
    expected = s * (1 - (1 - s**2) ** K) / s**2
    torch.testing.assert_close(got.diagonal(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.parametrize("formulation", ["normalized", "paper"])
@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Tanh(), nn.LeakyReLU(0.2), nn.Softshrink(0.3)])
def test_activation_of_the_argument_is_the_value(name, formulation, activation):
    u, weight, bias = torch.randn(3, 8, dtype=F64), torch.randn(5, 8, dtype=F64), torch.randn(5, dtype=F64)
    results = [
        solver_linear(
            u,
            weight,
            bias,
            activation=activation,
            solver=name,
            iters=5,
            formulation=formulation,
            output=output,
            generator=torch.Generator().manual_seed(2),
            **CASES[name],
        )
        for output in ("argument", "value")
    ]
    torch.testing.assert_close(activation(results[0]), results[1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", sorted(CASES))
def test_no_sample_depends_on_its_neighbours(name):
    """Deterministic evaluation of a batch equals that of its samples one by one; tokens count as samples."""
    u, weight, bias = torch.randn(2, 3, 8, dtype=F64), torch.randn(5, 8, dtype=F64), torch.randn(5, dtype=F64)
    u[1] *= 100
    keywords = {"activation": "relu", "solver": name, "iters": 8, "training": False, **CASES[name]}
    together = solver_linear(u, weight, bias, **keywords)
    alone = torch.stack([torch.stack([solver_linear(row, weight, bias, **keywords) for row in sample]) for sample in u])
    torch.testing.assert_close(together, alone, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("sampling", ["lipschitz", "gradient"])
def test_column_norms_are_computed_once_per_solve(sampling, monkeypatch):
    calls, compute = [], ConvMap.column_norms_sq
    monkeypatch.setattr(ConvMap, "column_norms_sq", lambda self: calls.append(1) or compute(self))
    u, weight = torch.randn(2, 4, 5, 5, dtype=F64), torch.randn(3, 4, 3, 3, dtype=F64)
    solver_conv2d(u, weight, activation="relu", solver="proxsg", iters=5, sampling=sampling, lipschitz=50.0)
    assert len(calls) == 1
