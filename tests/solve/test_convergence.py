"""Solvers against independent ones: scipy's NNLS and bounded least squares, linear systems, scalar minimisation."""

import numpy as np
import pytest
import scipy.optimize
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from solver_plugins import lipschitz_constant, solver_linear
from solver_plugins.blocks import solve_layer
from solver_plugins.operators import geometry_of, kernel_of
from tests.solve.cases import CASES, DETERMINISTIC
from tests.solve.dense import bias_vector, box_minimiser, dense_matrix, normalise, objective, well_conditioned_

F64 = torch.float64
BOXES = {"identity": (-np.inf, np.inf), "relu": (0.0, np.inf), "relu6": (0.0, 6.0), "hardtanh": (-1.0, 1.0)}
LAYERS = {
    "linear": (lambda: nn.Linear(9, 6, dtype=F64), (9,)),
    "wide": (lambda: nn.Linear(4, 7, dtype=F64), (4,)),
    "conv1d": (lambda: nn.Conv1d(3, 2, 3, stride=2, padding=1, dtype=F64), (3, 9)),
    "conv2d": (lambda: nn.Conv2d(4, 2, 3, padding=1, dtype=F64), (4, 5, 4)),
    "grouped": (lambda: nn.Conv2d(4, 4, 3, padding=1, groups=2, padding_mode="circular", dtype=F64), (4, 4, 4)),
}


@pytest.mark.parametrize("formulation", ["normalized", "paper"])
@pytest.mark.parametrize("prior", BOXES)
@pytest.mark.parametrize("layer_name", LAYERS)
@pytest.mark.parametrize("solver", DETERMINISTIC)
def test_converges_to_the_independent_solution(solver, layer_name, prior, formulation):
    make, shape = LAYERS[layer_name]
    layer, lam = make(), 0.3
    u = torch.randn(shape, dtype=F64)
    L = float(lipschitz_constant(layer, input_size=shape[1:]))
    got = solve_layer(
        u.unsqueeze(0), kernel_of(layer), layer.bias, geometry_of(layer), activation=prior, solver=solver,
        iters=400 if solver == "proxgd" else 200, lam=lam, formulation=formulation, lipschitz=L, output="value",
    )  # fmt: skip
    A, target = dense_matrix(layer, shape), u.numpy().reshape(-1)
    if formulation == "normalized":
        A, target, lam = normalise(A, target, lam, L)
    expected = box_minimiser(A, target, bias_vector(layer, shape), lam, *BOXES[prior])
    np.testing.assert_allclose(got.detach().numpy().reshape(-1), expected, atol=1e-8)


@pytest.mark.parametrize("solver", DETERMINISTIC)
@pytest.mark.parametrize("step_free", [True, False])
def test_smooth_prior_against_a_general_minimiser(solver, step_free):
    """tanh: its exact prior, x atanh x + log(1 - x^2)/2 - x^2/2, in both formulations."""
    fc = nn.Linear(5, 4, dtype=F64)
    u, lam = torch.randn(5, dtype=F64), 0.2
    L = float(lipschitz_constant(fc))
    formulation = "normalized" if step_free else "paper"
    got = solver_linear(
        u, fc.weight, fc.bias, activation=nn.Tanh(), solver=solver, iters=300, lam=lam, lipschitz=L, output="value",
        formulation=formulation,
    )  # fmt: skip
    A, target = fc.weight.detach().numpy(), u.numpy()
    if step_free:
        A, target, lam = normalise(A, target, lam, L)
    bias = fc.bias.detach().numpy()

    def total(x):
        return objective(A, target, bias, lam, x) + np.sum(x * np.arctanh(x) + 0.5 * np.log1p(-(x**2)) - 0.5 * x**2)

    found = scipy.optimize.minimize(
        total,
        np.zeros(4),
        bounds=[(-1 + 1e-9, 1 - 1e-9)] * 4,
        method="L-BFGS-B",
        options={"ftol": 1e-16, "gtol": 1e-12},
    )
    np.testing.assert_allclose(got.detach().numpy(), found.x, atol=1e-5)
    assert total(got.detach().numpy()) <= found.fun + 1e-12


def test_softshrink_against_its_closed_form():
    """Orthogonal rows: the lasso separates."""
    weight = torch.linalg.qr(torch.randn(6, 4, dtype=F64))[0].T.contiguous()
    u, lam, level = torch.randn(6, dtype=F64), 0.1, 0.25
    got = solver_linear(
        u, weight, activation=nn.Softshrink(level), solver="fista", iters=200, lam=lam, lipschitz=1.0,
        formulation="paper", output="value",
    )  # fmt: skip
    expected = nn.functional.softshrink(weight @ u, level) / (1 + lam)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@given(seed=st.integers(0, 10_000), scale=st.sampled_from([1e-3, 1.0, 30.0]), prior=st.sampled_from(sorted(BOXES)))
def test_objective_never_increases_under_proxgd(seed, scale, prior):
    generator = torch.Generator().manual_seed(seed)
    n1, n2 = (int(n) for n in torch.randint(1, 8, (2,), generator=generator))
    weight = scale * torch.randn(n2, n1, dtype=F64, generator=generator)
    u = torch.randn(3, n1, dtype=F64, generator=generator)
    _, info = solver_linear(u, weight, activation=prior, solver="proxgd", iters=15, diagnose=True)
    increase = (info.objective[1:] - info.objective[:-1]) / (1 + info.objective[:-1].abs())
    assert increase.max() <= 1e-12


@given(
    seed=st.integers(0, 10_000),
    prior=st.sampled_from(["relu", "softplus", "tanh", "elu", "leaky_relu", "softshrink"]),
    formulation=st.sampled_from(["normalized", "paper"]),
    stride=st.integers(1, 2),
)
def test_objective_never_increases_on_convolutions_and_smooth_priors(seed, prior, formulation, stride):
    torch.manual_seed(seed)
    conv = nn.Conv2d(3, 4, 3, stride=stride, padding=1, dtype=F64)
    u = torch.randn(2, 3, 5, 6, dtype=F64)
    _, info = solve_layer(
        u, kernel_of(conv).detach(), conv.bias.detach(), geometry_of(conv), activation=prior, solver="proxgd", iters=8,
        formulation=formulation, diagnose=True,
    )  # fmt: skip
    increase = (info.objective[1:] - info.objective[:-1]) / (1 + info.objective[:-1].abs())
    assert increase.max() <= 1e-10


@pytest.mark.parametrize("name", sorted(CASES))
def test_every_solver_approaches_the_minimum(name):
    """Sampling solvers too, within their noise: the last objective is far closer to the minimum than the first."""
    fc = nn.Linear(40, 10, dtype=F64)
    well_conditioned_(fc.weight)
    u = torch.randn(20, 40, dtype=F64)
    options = {**CASES[name], **({"inner": 20} if "inner" in CASES[name] else {})}
    if name == "proxsg":
        options |= {"p": 0.5, "decay": 0.97}
    _, info = solver_linear(
        u, fc.weight, fc.bias, activation="relu", solver=name, iters=120, lam=0.1, diagnose=True, **options
    )
    _, best = solver_linear(u, fc.weight, fc.bias, activation="relu", solver="fista", iters=300, lam=0.1, diagnose=True)
    if name in ("proxsg", "ms2gd", "s2gd", "svrg"):
        # The guarded expected smoothness normalises these problems differently: compare with their own minimum.
        assert info.residual[-1].mean() < 0.25 * info.residual[0].mean()
    else:
        gap = (info.objective - best.objective[-1]).clamp_min(0)
        assert (gap[-1] < 1e-2 * gap[0]).all()


@pytest.mark.parametrize("sampling", ["uniform", "lipschitz", "gradient"])
@pytest.mark.parametrize("skewed", [False, True])
def test_expected_smoothness_does_not_diverge_at_p_095(sampling, skewed):
    """With a constant 1/L the error grows hundreds of times on a 512x512 layer."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(512, 512, dtype=F64, generator=generator) / 512**0.5
    if skewed:
        weight = weight * torch.logspace(-1, 1, 512, dtype=F64)
    u = torch.randn(8, 512, dtype=F64, generator=generator)
    keywords = {
        "activation": "relu", "solver": "proxsg", "sampling": sampling, "p": 0.95, "iters": 40, "diagnose": True,
        "generator": generator, "output": "value",
    }  # fmt: skip
    x, info = solver_linear(u, weight, step="expected_smoothness", **keywords)
    first, _ = solver_linear(u, weight, step="expected_smoothness", **{**keywords, "iters": 1})
    assert torch.isfinite(info.objective).all()
    # Every sampled step is nonexpansive, so the iterates can grow at most linearly, by one first step each.
    assert (x.norm(dim=-1) < 40 * first.norm(dim=-1)).all()
    assert (info.residual[-1] < info.residual[0]).all()
    if sampling == "uniform" and not skewed:
        _wild, wild_info = solver_linear(u, weight, step="constant", **keywords)
        assert wild_info.residual[-1].mean() > 10 * info.residual[-1].mean()


def test_zero_weights_give_a_finite_step():
    for lam in (0.0, 1e-3):
        got = solver_linear(
            torch.randn(2, 3), torch.zeros(3, 3), torch.ones(3), activation="relu", solver="proxgd", iters=5, lam=lam
        )
        assert torch.isfinite(got).all()
