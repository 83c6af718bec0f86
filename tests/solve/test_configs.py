"""Every solver's options can be written down, read again, and are documented."""

import itertools

import pytest
import torch

from solver_plugins import list_solvers, solver_info, solver_linear
from solver_plugins.blocks import solve_layer
from solver_plugins.errors import OptionError
from solver_plugins.operators import Geometry
from solver_plugins.registry import SOLVERS
from solver_plugins.solve import ProxSG
from tests.solve.cases import CASES


@pytest.mark.parametrize("name", list_solvers())
def test_round_trip_and_descriptions(name):
    solver = solver_info(name).target.from_options(**CASES[name])
    config = solver.config
    assert type(config).from_json(config.to_json()) == config == type(config).from_yaml(config.to_yaml())
    assert all(field.description for field in type(config).model_fields.values())
    assert solver_info(name).description and name in repr(solver).lower()


def test_tags():
    assert list_solvers("deterministic") == ["anderson", "fista", "proxgd"]
    assert list_solvers("variance-reduced") == ["ms2gd", "s2gd", "svrg"]
    assert list_solvers("prox*") == ["proxgd", "proxsg"]


def test_decay_without_exp_is_refused():
    with pytest.raises(OptionError, match="decay"):
        ProxSG.from_options(step="bottou", decay=0.5)


@pytest.mark.parametrize("step", ["constant", "exp", "bottou", "expected_smoothness"])
@pytest.mark.parametrize("formulation", ["normalized", "paper"])
def test_step_rules_in_deterministic_evaluation(step, formulation):
    """The iterates by hand: t_k = t_0, t_0 decay^k, t_0/(1 + t_0 lam k), and 1/L_tau in place of 1/L."""
    torch.manual_seed(0)
    weight, u, lam, L = torch.randn(3, 6).double(), torch.randn(6).double(), 0.5, 30.0
    got = solver_linear(
        u, weight, activation="relu", solver="proxsg", iters=4, p=0.5, step=step, lam=lam, lipschitz=L,
        formulation=formulation, training=False, output="value",
    )  # fmt: skip
    total = L + lam
    if step == "expected_smoothness":
        n, tau, norms = 6, 3, weight.square().sum(0)
        mean_square = (n * (tau - 1) * L + (n - tau) * n * norms.max()) / (tau * (n - 1))
        realised = min(n / tau * L, float((norms * n / tau).topk(tau).values.sum()))
        total = float(max(mean_square, torch.tensor(0.5 * realised))) + lam
    scale, base = (1 / total, 1.0) if formulation == "normalized" else (1.0, 1 / total)
    x = torch.zeros(3, dtype=torch.float64)
    for k in range(4):
        factor = {"exp": 0.9**k, "bottou": 1 / (1 + k * lam / total)}.get(step, 1.0)
        x = torch.relu(x - base * factor * (scale * (weight @ weight.T @ x + lam * x) - weight @ u))
    torch.testing.assert_close(got, x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("solver", CASES)
def test_lam_relative_is_lam_in_units_of_the_constant(solver):
    """On every path and in both formulations, compiled or not known as a number."""
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(s, dtype=torch.float64, generator=generator) for s in ((4, 6), (5, 6), (5,))]
    for path, formulation, activation in itertools.product(("auto", "loop"), ("normalized", "paper"), ("relu", None)):
        options = {**CASES[solver], "path": path, "formulation": formulation, "activation": activation, "iters": 6}
        if "p" in options:
            options["step"] = "bottou"
        found = []
        for lam in ({"lam": 0.3 * 20}, {"lam_relative": 0.3}):
            live = [one.clone().requires_grad_() for one in given]
            out = solve_layer(
                *live, Geometry(), solver=solver, lipschitz=20.0, generator=torch.Generator().manual_seed(0),
                **options, **lam,
            )  # fmt: skip
            found.append([out, *torch.autograd.grad(out.square().sum(), live)])
        torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


def test_lam_is_given_once():
    with pytest.raises(OptionError, match="'lam' or 'lam_relative'"):
        SOLVERS.get("proxgd").from_options(lam=0.1, lam_relative=0.1)
    assert SOLVERS.get("proxgd").from_options(
        **SOLVERS.get("proxgd").from_options(lam_relative=0.1).config.model_dump()
    )
