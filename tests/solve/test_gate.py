"""Gates: every path against the loop, the convex problem against dense references, and the plain layer at zero."""

import itertools

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import nn

from solver_plugins.blocks import solve_layer
from solver_plugins.errors import OptionError
from solver_plugins.operators import Geometry, operator_from_kernel
from solver_plugins.prox import prox_for
from solver_plugins.registry import SOLVERS
from solver_plugins.solve import Constants, Scale, affine_map, check_gate, pose_problem, solve_block
from tests.solve.test_table import F64, GEOMETRIES, PRIORS, ROWS, assert_same, plugin_solver

GATES = ("scalar", "channel")


def gate_of(kind, features, value=None):
    """A gate with a closed and an open channel among others."""
    if kind == "scalar":
        return torch.tensor(0.7 if value is None else value, dtype=F64)
    found = torch.linspace(0.0, 1.0, features, dtype=F64)
    return found if value is None else torch.full_like(found, value)


def solved(solver, geometry, kind, training=True, diagonal=False, skip=False, blend=None, **options):
    """Returns the result and all gradients, that of the gate among them."""
    shape = GEOMETRIES[geometry]
    generator = torch.Generator().manual_seed(0)
    u, kernel, bias, d = (
        torch.randn(one, dtype=F64, generator=generator).requires_grad_()
        for one in (shape[2], shape[1], shape[1][:1], shape[1][:1])
    )
    gate = gate_of(kind, shape[1][0]).requires_grad_()
    named = {"diagonal": d} if diagonal else {}
    if skip:
        out_shape = operator_from_kernel(kernel, shape[0], shape[2]).apply(u).shape
        named["skip"] = torch.randn(out_shape, dtype=F64, generator=generator).requires_grad_()
    live = [u, kernel, bias, gate, *named.values()]
    out = solve_layer(
        u, kernel, bias, shape[0], solver=solver, training=training, lipschitz=60.0,
        generator=torch.Generator().manual_seed(7), scale=Scale(gate=gate, blend=blend), **named,
        **{"iters": 5, "lam": 0.1, **options},
    )  # fmt: skip
    above = torch.randn(out.shape, dtype=F64, generator=generator)
    return [out.detach(), *torch.autograd.grad((out * above).sum(), live, materialize_grads=True)]


@pytest.mark.parametrize("geometry", ["rows", "wide", "conv", "places", "grouped"])
@pytest.mark.parametrize("row", ROWS)
def test_every_path_is_the_loop(row, geometry):
    solver = row.split()[0]
    paths = {"two_step", "gram", "collapsed"} if solver in ("proxgd", "fista", "anderson") else {"auto"}
    paths |= {"masked"} if solver == "proxsg" else set()
    paths |= {"columns"} if "shared" in row and solver == "proxsg" else set()
    decays = ROWS[row].get("step") in ("exp", "bottou") or solver == "proxsg"
    for prior, kind, training in itertools.product(("identity", "relu", "tanh"), GATES, (True, False)):
        if (not training and solver in ("proxgd", "fista", "anderson")) or (decays and prior == "tanh"):
            continue
        more = {"diagonal": True, "skip": True} if kind == "scalar" and training else {}
        options = {**ROWS[row], "activation": PRIORS[prior], **more}
        expected = solved(solver, geometry, kind, training, path="loop", **options)
        for path in sorted(paths):
            assert_same(solved(solver, geometry, kind, training, path=path, **options), expected)


@pytest.mark.parametrize("memory", ["auto", "full", "low"])
@pytest.mark.parametrize("iters", [2, 12])
@pytest.mark.parametrize("kind", GATES)
def test_buffers_and_lists(kind, iters, memory):
    for path, geometry in itertools.product(("two_step", "gram"), ("rows", "pointwise", "conv")):
        options = {"iters": iters, "activation": nn.ReLU(), "blend": torch.tensor(0.3, dtype=F64)}
        expected = solved("proxgd", geometry, kind, path="loop", **options)
        assert_same(solved("proxgd", geometry, kind, path=path, memory=memory, **options), expected)


@pytest.mark.parametrize(("prior", "g", "bounds"), [
    ("relu", None, (0.0, np.inf)), ("relu6", None, (0.0, 6.0)), ("identity", None, (-np.inf, np.inf)),
    ("leaky", "leaky", (-np.inf, np.inf)),
])  # fmt: skip
@pytest.mark.parametrize("kind", GATES)
def test_the_convex_problem(kind, prior, g, bounds):
    """The fixed point minimises 1/2 x^T (H + diag((1-a)/a)) x - <c/a, x> + sum g_i/a_i, by scipy's bounded solver."""
    generator = torch.Generator().manual_seed(1)
    A, u, b = (torch.randn(s, dtype=F64, generator=generator) for s in ((5, 7), (3, 7), (5,)))
    gate = torch.tensor(0.6, dtype=F64) if kind == "scalar" else torch.linspace(0.2, 1.0, 5, dtype=F64)
    activation = {"relu": nn.ReLU(), "relu6": nn.ReLU6(), "identity": nn.Identity(), "leaky": nn.LeakyReLU(0.25)}[prior]
    top, lam = float(torch.linalg.matrix_norm(A, 2)) ** 2, 0.5
    for solver in ("proxgd", "fista", "anderson"):
        x, diagnostics = solve_layer(
            u, A, b, Geometry(), solver=solver, iters=400, lam=lam, activation=activation, lipschitz=top,
            scale=Scale(gate=gate), output="value", diagnose=True,
        )  # fmt: skip
        assert float(diagnostics.residual[-1].max()) < 1e-9
        a = gate.expand(5).numpy()
        H = ((A @ A.T).numpy() + lam * np.eye(5)) / (top + lam) + np.diag((1 - a) / a)
        for row, found, value in zip((u @ A.T + b).numpy(), x.numpy(), diagnostics.objective[-1].numpy(), strict=True):

            def objective(z, row=row, H=H, a=a):
                extra = 1.5 * np.minimum(z, 0) ** 2 / a if g else 0.0
                return 0.5 * z @ H @ z - (row / a) @ z + np.sum(extra)

            best = scipy.optimize.minimize(
                objective, np.clip(found + 0.3, *bounds), bounds=[bounds] * 5, method="L-BFGS-B",
                options={"ftol": 1e-15, "gtol": 1e-10, "maxiter": 5000},
            )  # fmt: skip
            np.testing.assert_allclose(found, best.x, atol=2e-6)
            assert objective(found) <= best.fun + 1e-12
            # The diagnostics' objective is that, but for a constant, |u|^2/2 in its own scale.
            place = next(i for i in range(3) if np.allclose((u @ A.T + b).numpy()[i], row))
            constant = 0.5 * float(u[place].square().sum()) * (top + lam)
            assert abs(value - constant - objective(found)) < 1e-8


@pytest.mark.parametrize("solver", ["proxgd", "fista", "anderson"])
@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Identity(), nn.Tanh()])
def test_a_closed_gate_is_the_plain_layer_bit_for_bit(activation, solver):
    generator = torch.Generator().manual_seed(0)
    for (geometry, shape, size), kind, many in itertools.product(GEOMETRIES.values(), GATES, (1, 40)):
        u, kernel = (torch.randn(s, generator=generator) for s in ((size[0] * many, *size[1:]), shape))
        bias, gate = torch.randn(shape[0], generator=generator), gate_of(kind, shape[0], 0.0).float()
        plain = operator_from_kernel(kernel, geometry, u.shape).apply(u)
        bias_shape = (-1, *(1,) * (kernel.dim() - 2)) if kernel.dim() > 2 else (-1,)
        plain = plain + bias.reshape(bias_shape)
        for path in ("auto", "loop", "two_step", "gram"):
            options = {"solver": solver, "activation": activation, "iters": 4, "path": path, "lipschitz": 200.0}
            out = solve_layer(u, kernel, bias, geometry, scale=Scale(gate=gate), training=path != "gram", **options)
            if path == "auto" and isinstance(activation, nn.Identity) and solver != "anderson":
                # The layer's own function may add the bias within its product.
                torch.testing.assert_close(out, plain, rtol=1e-6, atol=1e-5)
            else:
                assert torch.equal(out, plain)


@pytest.mark.parametrize("solver", ["proxgd", "proxsg", "fista"])
def test_behind_a_norm_a_channel_gate_collapses_to_what_multiplies_the_output(solver):
    """That matrix is not symmetric."""
    generator = torch.Generator().manual_seed(0)
    kernel, u, gate = (torch.rand(one, dtype=F64, generator=generator) for one in ((4, 6), (5, 6), (4,)))
    operator, constants = operator_from_kernel(kernel, Geometry(), u.shape), Constants(torch.tensor(9.0, dtype=F64))
    found, options = [], {"restart": False} if solver == "fista" else {}
    for path in ("loop", "auto" if solver == "proxsg" else "collapsed"):
        made = SOLVERS.get(solver).from_options(iters=4, path=path, **options)
        problem = pose_problem(made, prox_for(None), operator, u, constants, lambda: operator.apply(u))
        problem.known = True
        found.append(solve_block(problem, made, constants, Scale(gate=gate), training=False)[0])
    assert_same(*[[one] for one in found])


def test_second_derivatives():
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(s, dtype=F64, generator=generator) for s in ((2, 4), (3, 4), (3,))]
    for kind, options in itertools.product(GATES, ({"solver": "proxgd"}, {"solver": "ms2gd", "inner": 2})):
        live = [one.clone().requires_grad_() for one in (*given, gate_of(kind, 3))]
        found = []
        for path in ("auto", "loop"):
            out = solve_layer(
                *live[:3], Geometry(), activation="tanh", iters=4, lipschitz=20.0, scale=Scale(gate=live[3]), path=path,
                generator=torch.Generator().manual_seed(3), **options,
            )  # fmt: skip
            grads = torch.autograd.grad(out.square().sum(), live, create_graph=True)
            found.append(torch.autograd.grad(sum(one.square().sum() for one in grads), live))
        assert_same(*found)


def test_implicit_gradients():
    """Through a scalar gate, against those of many unrolled iterations."""
    found = [
        solved("proxgd", "rows", "scalar", iters=600, lam=5.0, activation=nn.Tanh(), gradient=gradient,
               **({"implicit_tol": 1e-9} if gradient == "implicit" else {}))
        for gradient in ("implicit", "unrolled")
    ]  # fmt: skip
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)


def test_compiled():
    """No step looks at a gate's value."""
    solver, prior = SOLVERS.get("proxgd").from_options(iters=3), prox_for("relu")
    layer = torch.compile(
        lambda u, A, b, gate: solve_layer(
            u, A, b, Geometry(), solver=solver, activation=prior, lipschitz=torch.tensor(20.0),
            scale=Scale(gate=gate),
        ),
        fullgraph=True, backend="aot_eager",
    )  # fmt: skip
    given = [torch.randn(s).requires_grad_() for s in ((3, 4), (4, 4), (4,))]
    gate = torch.full((4,), 0.3, requires_grad=True)
    got = torch.autograd.grad(layer(*given, gate).square().sum(), (*given, gate))
    out = solve_layer(
        *given, Geometry(), solver="proxgd", activation=nn.ReLU(), iters=3, lipschitz=20.0, scale=Scale(gate=gate)
    )
    for one, other in zip(got, torch.autograd.grad(out.square().sum(), (*given, gate)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("solver", "prior", "kind", "options", "hint"), [
    ("proxgd", "relu", "scalar", {"formulation": "paper"}, "normalized"),
    ("proxgd", "relu", "channel", {"iters": 1}, "iters=2"),
    ("proxgd", "softmax", "channel", {}, "gate='scalar'"),
    ("proxgd", "relu", "channel", {"gradient": "implicit"}, "unrolled"),
    ("proxsg", "tanh", "scalar", {}, "step='constant'"),
])  # fmt: skip
def test_refused(solver, prior, kind, options, hint):
    activation = nn.Softmax(-1) if prior == "softmax" else prior
    with pytest.raises(OptionError, match=hint):
        check_gate(SOLVERS.get(solver).from_options(**options), prox_for(activation), kind)
    with pytest.raises(OptionError, match=hint):
        solve_layer(
            torch.randn(2, 3), torch.randn(4, 3), None, Geometry(), solver=solver, activation=activation,
            scale=Scale(gate=gate_of(kind, 4).float()), **options,
        )  # fmt: skip


def test_a_plug_in_is_gated_by_its_v_or_refused():
    heavy_ball = plugin_solver()
    given = [torch.randn(s, dtype=F64) for s in ((5, 6), (4, 6), (4,))]
    gate, found = gate_of("channel", 4), []
    for path in ("loop", "two_step", "gram", "collapsed"):
        made = heavy_ball.from_options(iters=5, path=path, momentum=0.3)
        found.append(solve_layer(*given, Geometry(), solver=made, scale=Scale(gate=gate), lipschitz=20.0))
    assert_same(found[1:], found[:1] * 3)

    class Own(heavy_ball):
        def value(self, problem, state):
            return state.x

    with pytest.raises(OptionError, match="override gated"):
        check_gate(Own.from_options(), prox_for("relu"), "scalar")


@pytest.mark.parametrize("geometry", ["rows", "wide", "pointwise", "strided", "patches", "grouped"])
@pytest.mark.parametrize("row", ["proxgd", "fista without restart", "proxsg", "ms2gd decayed", "svrg bottou", "rcd"])
def test_the_map_of_a_block(row, geometry):
    """Weight and bias, with everything in them, against the evaluation of the block."""
    solver = SOLVERS.get(row.split()[0]).from_options(iters=5, lam=0.1, **ROWS[row])
    generator = torch.Generator().manual_seed(0)
    form, shape, size = GEOMETRIES[geometry]
    u, kernel, bias, d, gain, shift = (
        torch.randn(s, dtype=F64, generator=generator) for s in (size, shape, *[shape[:1]] * 4)
    )
    for kind in (*GATES, None):
        gate = None if kind is None else gate_of(kind, shape[0])
        scale = Scale(gain, shift, torch.tensor(0.4, dtype=F64), gate)
        expected = solve_layer(
            u, kernel, bias, form, solver=solver, training=False, diagonal=d, lipschitz=60.0, scale=scale
        )
        operator = operator_from_kernel(kernel, form, u.shape, diagonal=d)
        constants = Constants(torch.tensor(60.0, dtype=F64))
        found = affine_map(solver, prox_for(None), operator, bias, constants, scale)
        assert found.weight.shape == kernel.shape
        out = operator_from_kernel(found.weight, form, u.shape).apply(u) + operator.per_feature(found.bias)
        assert_same([out], [expected])


@pytest.mark.parametrize(("solver", "activation", "geometry", "reason"), [
    ("proxgd", "relu", "rows", "prior 'relu'"), ("anderson", None, "rows", "depend on the input"),
    ("fista", None, "rows", "depend on the input"), ("proxgd", None, "conv", "overlap"),
])  # fmt: skip
def test_a_block_without_a_map(solver, activation, geometry, reason):
    form, shape, size = GEOMETRIES[geometry]
    operator = operator_from_kernel(torch.zeros(shape), form, size)
    made = SOLVERS.get(solver).from_options()
    with pytest.raises(OptionError, match=reason):
        affine_map(made, prox_for(activation), operator, None, Constants(torch.ones(())))
