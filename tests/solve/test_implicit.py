"""Implicit gradients: equal to unrolled ones at convergence, refused or replaced elsewhere."""

import gc
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck

from solver_plugins import SolverLinear
from solver_plugins.blocks import solve_layer
from solver_plugins.errors import DoubleBackwardError, NoMinimizerError, NotConvergedWarning
from solver_plugins.operators import Geometry
from solver_plugins.solve import DeterministicConfig, ProxGD, Solver, State
from tests.solve.cases import DETERMINISTIC
from tests.solve.test_unrolled import OPERATORS, inputs

F64 = torch.float64
ACTIVATIONS = ["relu", "identity", nn.Tanh(), nn.LeakyReLU(0.2), nn.Softplus(), nn.Hardtanh(), nn.ELU(0.5)]


def grads(gradient, tensors, geometry, activation, solver="fista", formulation="normalized", **options):
    u, kernel, bias = tensors
    out = solve_layer(
        u, kernel, bias, geometry, activation=activation, solver=solver, iters=500, lam=10.0,
        gradient=gradient, formulation=formulation, **options,
    )  # fmt: skip
    probe = torch.randn(out.shape, dtype=F64, generator=torch.Generator().manual_seed(9))
    return out, torch.autograd.grad((out * probe).sum(), tensors)


@pytest.mark.parametrize("formulation", ["normalized", "paper"])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_equal_unrolled_ones_at_convergence(activation, formulation):
    tensors = inputs("linear")
    value, implicit = grads("implicit", tensors, Geometry(), activation, formulation=formulation, implicit_tol=1e-8)
    plain, unrolled = grads("unrolled", tensors, Geometry(), activation, formulation=formulation)
    assert torch.equal(value, plain)
    for a, b in zip(implicit, unrolled, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("solver", DETERMINISTIC)
@pytest.mark.parametrize("operator", OPERATORS)
def test_equal_unrolled_ones_for_every_operator(operator, solver):
    tensors, geometry = inputs(operator), OPERATORS[operator][0]
    options = {"implicit_tol": 1e-7}
    _, implicit = grads("implicit", tensors, geometry, "relu", solver, **options)
    _, unrolled = grads("unrolled", tensors, geometry, "relu", "proxgd" if solver == "anderson" else solver)
    for a, b in zip(implicit, unrolled, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_softmax_which_is_not_separable():
    tensors = inputs("linear")
    _, implicit = grads("implicit", tensors, Geometry(), nn.Softmax(-1), "proxgd", implicit_tol=1e-9)
    _, unrolled = grads("unrolled", tensors, Geometry(), nn.Softmax(-1), "proxgd")
    for a, b in zip(implicit, unrolled, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-8)


def test_gradcheck_against_finite_differences():
    def function(u, kernel, bias):
        return solve_layer(
            u, kernel, bias, Geometry(), activation="tanh", solver="fista", iters=300, lam=0.5, lipschitz=20.0,
            gradient="implicit", implicit_tol=1e-8,
        )  # fmt: skip

    assert gradcheck(function, inputs("linear"))


def test_prelu_slope_gets_its_gradient():
    fc, act = nn.Linear(5, 4, dtype=F64), nn.PReLU(4, dtype=F64)
    u = torch.randn(3, 5, dtype=F64)
    found = []
    for gradient in ("implicit", "unrolled"):
        block = SolverLinear.from_linear(fc, act, solver="fista", iters=400, lam=0.3, gradient=gradient).eval()
        found.append(torch.autograd.grad(act(block(u)).square().sum(), act.weight)[0])
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-7)


def test_memory_does_not_grow_with_iterations():
    u, kernel, bias = (t.detach().requires_grad_() for t in inputs("linear"))
    sizes = []
    for iters in (50, 400):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t.numel()) or t, lambda t: t):
            solve_layer(
                u, kernel, bias, Geometry(), activation="relu", solver="fista", iters=iters, lam=0.5, lipschitz=20.0,
                gradient="implicit", implicit_tol=1e-2,
            )  # fmt: skip
        sizes.append(sum(saved))
    assert sizes[0] == sizes[1]


def test_falls_back_to_unrolling_and_says_so():
    tensors = inputs("linear")
    u, kernel, bias = tensors
    keywords = {"activation": "relu", "solver": "proxgd", "iters": 3, "lipschitz": 20.0}
    with pytest.warns(NotConvergedWarning, match="after 3 iterations the residual is .* unrolled instead"):
        out = solve_layer(u, kernel, bias, Geometry(), gradient="implicit", **keywords)
    got = torch.autograd.grad(out.sum(), tensors)
    expected = torch.autograd.grad(
        solve_layer(u, kernel, bias, Geometry(), gradient="unrolled", **keywords).sum(), tensors
    )
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_a_backward_solve_that_fails_falls_back_too():
    tensors = inputs("linear")
    with pytest.warns(NotConvergedWarning, match="implicit backward solve reached a relative residual"):
        _, got = grads("implicit", tensors, Geometry(), "identity", "fista", implicit_iters=1, implicit_tol=1e-6)
    _, expected = grads("unrolled", tensors, Geometry(), "identity", "fista")
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_double_backward_is_refused():
    u, kernel, bias = inputs("linear")
    out = solve_layer(
        u, kernel, bias, Geometry(), activation="tanh", solver="fista", iters=300, lam=0.5, lipschitz=20.0,
        gradient="implicit",
    )  # fmt: skip
    for loss in (out.sum(), out.square().sum()):
        with pytest.raises(DoubleBackwardError, match="gradient='unrolled'"):
            torch.autograd.grad(loss, u, create_graph=True)


def test_no_grad_needs_no_check():
    u, kernel, bias = inputs("linear")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        solve_layer(u, kernel, bias, Geometry(), activation="relu", solver="proxgd", iters=1, gradient="implicit")


def test_problems_without_a_minimiser_are_refused():
    with pytest.raises(NoMinimizerError, match="lam > 0"):
        SolverLinear(3, 5, activation="relu", solver="proxgd", gradient="implicit", lam=0.0)
    with pytest.raises(NoMinimizerError, match="full row rank"):
        fc = nn.Linear(5, 3)
        fc.weight.data[2] = fc.weight.data[1]
        SolverLinear.from_linear(fc, "relu", solver="proxgd", gradient="implicit", lam=0.0)
    with pytest.raises(NoMinimizerError, match="full row rank"):
        solve_layer(torch.randn(2, 5), fc.weight, None, Geometry(), solver="proxgd", gradient="implicit", lam=0.0)
    SolverLinear(5, 3, activation="relu", solver="proxgd", gradient="implicit", lam=0.0)


@pytest.mark.parametrize(("formulation", "weights", "inputs"), [("normalized", 0.2, 1e-5), ("paper", 15.0, 1e-2)])
def test_the_residual_is_relative_to_the_problem(formulation, weights, inputs):
    """Neither small inputs nor the paper's small iterates may pass for converged."""
    fc = nn.Linear(32, 32, bias=False)
    nn.init.normal_(fc.weight, std=weights)
    block = SolverLinear.from_linear(fc, "relu", solver="proxgd", iters=3, gradient="implicit", formulation=formulation)
    with pytest.warns(NotConvergedWarning):
        block(inputs * torch.randn(4, 32))
    assert float(block.residual) > 1e-3


def test_tiny_incoming_gradients():
    u, kernel, bias = tensors = inputs("linear")
    found = []
    for gradient in ("implicit", "unrolled"):
        out = solve_layer(
            u, kernel, bias, Geometry(), activation="relu", solver="fista", iters=500, lam=10.0, gradient=gradient
        )
        found.append(torch.autograd.grad(1e-200 * out.sum(), tensors))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a * 1e200, b * 1e200, rtol=1e-6, atol=1e-8)


def test_a_slope_that_changes_before_the_backward():
    """The system is set up in the forward: functional_call puts other parameters back before backward runs."""
    act = nn.PReLU(dtype=F64)
    model = nn.Sequential(nn.Linear(5, 4, dtype=F64), act)
    model[0] = SolverLinear.from_linear(model[0], act, solver="fista", iters=400, lam=0.3, gradient="implicit").eval()
    u = torch.randn(3, 5, dtype=F64)
    other = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}
    other["1.weight"].data.fill_(0.9)
    out = torch.func.functional_call(model, other, (u,))
    got = torch.autograd.grad(out.sum(), list(other.values()))
    act.weight.data.fill_(0.9)
    expected = torch.autograd.grad(model(u).sum(), list(model.parameters()))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_the_input_is_not_kept_after_the_backward():
    block = SolverLinear(5, 4, activation="relu", solver="fista", iters=300, lam=1.0, gradient="implicit")
    u = torch.randn(3, 5)
    alive = weakref.ref(u)
    out = block(u)
    out.sum().backward()
    del u
    gc.collect()
    assert alive() is None


class Damped(Solver):
    """Half of the step: its states do not belong to the problem's step."""

    name, tags, Config, samples = "damped", ("deterministic",), DeterministicConfig, "nothing"

    def init(self, problem):
        return None

    def step(self, problem, state, iteration, draws):
        x = None if state is None else self.value(problem, state)
        step = 0.5 * problem.step
        return State(problem.descend(x, problem.gradient(x), step), step)


@pytest.mark.parametrize("formulation", ["normalized", "paper"])
@pytest.mark.parametrize("activation", ["relu", nn.Tanh(), nn.Softplus(), nn.ELU(0.5)], ids=str)
def test_a_solver_with_a_step_of_its_own(activation, formulation):
    u, kernel, bias = tensors = inputs("linear")
    found = []
    for solver in (Damped, ProxGD):
        made = solver.from_options(
            iters=400, lam=10.0, formulation=formulation, implicit_tol=1e-8,
            gradient="implicit" if solver is Damped else "unrolled",
        )  # fmt: skip
        out = solve_layer(u, kernel, bias, Geometry(), activation=activation, solver=made)
        found.append((out, *torch.autograd.grad(out.square().sum(), tensors)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
