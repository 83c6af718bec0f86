"""One table: every solver on every path, in both formulations, against ``path="loop"``, values and gradients."""

import importlib.util
import itertools
import pathlib

import pytest
import torch
from torch import nn

from solver_plugins.blocks import solve_layer
from solver_plugins.operators import Geometry, operator_from_kernel
from solver_plugins.prox import prox_for
from solver_plugins.registry import SOLVERS
from solver_plugins.solve.layout import is_matrix
from solver_plugins.solve.paths import path_for, solve_size
from tests.solve.cases import CASES

F64 = torch.float64
PRIORS = {"identity": nn.Identity(), "relu": nn.ReLU(), "leaky": nn.LeakyReLU(0.2), "tanh": nn.Tanh()}
GEOMETRIES = {
    "rows": (Geometry(), (4, 6), (5, 6)),
    "wide": (Geometry(), (7, 3), (2, 3, 3)),
    "conv": (Geometry.for_conv((3, 3), padding=1), (3, 4, 3, 3), (2, 4, 4, 5)),
    "pointwise": (Geometry.for_conv((1, 1)), (3, 5, 1, 1), (2, 5, 3, 4)),
    "strided": (Geometry.for_conv((1,), stride=2, groups=2), (6, 2, 1), (3, 4, 7)),
    "places": (Geometry.for_conv((1, 1)), (3, 5, 1, 1), (2, 5, 11, 10)),
    "patches": (Geometry.for_conv((2, 2), stride=3), (5, 2, 2, 2), (2, 2, 8, 7)),
    "grouped": (Geometry.for_conv((2, 2), stride=2, groups=2), (4, 3, 2, 2), (2, 6, 22, 20)),
}
ROWS = {
    **CASES,
    "fista without restart": {"restart": False},
    "proxsg lipschitz": {"p": 0.5, "sampling": "lipschitz"},
    "proxsg gradient": {"p": 0.5, "sampling": "gradient"},
    "proxsg shared": {"p": 0.5, "per_sample": False},
    "ms2gd decayed": {"p": 0.5, "inner": 2, "step": "exp"},
    "ms2gd one loop": {"p": 0.3, "inner": 9},
    "svrg bottou": {"inner": 3, "step": "bottou"},
    "rcd shared": {"p": 0.4, "per_sample": False, "step": "exp"},
    "rcd decayed": {"p": 0.4, "step": "bottou"},
}


def assert_same(got, expected):
    """To 1e-10 of the largest number: Anderson's small systems amplify the rounding of the others."""
    for one, other in zip(got, expected, strict=True):
        bound = 1e-10 * max(1.0, float(other.abs().max()))
        torch.testing.assert_close(one, other, rtol=0, atol=bound)


def solved(solver, geometry, training, seed=7, diagonal=False, skip=False, **options):
    """Returns the result and all gradients."""
    shape = GEOMETRIES[geometry]
    generator = torch.Generator().manual_seed(0)
    u, kernel, bias, d = (
        torch.randn(one, dtype=F64, generator=generator).requires_grad_()
        for one in (shape[2], shape[1], shape[1][:1], shape[1][:1])
    )
    named = {"diagonal": d} if diagonal else {}
    if skip:
        out_shape = operator_from_kernel(kernel, shape[0], shape[2]).apply(u).shape
        named["skip"] = torch.randn(out_shape, dtype=F64, generator=generator).requires_grad_()
    live = [u, kernel, bias, *named.values()]
    out = solve_layer(
        u, kernel, bias, shape[0], solver=solver, training=training, iters=5, lam=0.1, lipschitz=60.0,
        generator=torch.Generator().manual_seed(seed), **named, **options,
    )  # fmt: skip
    above = torch.randn(out.shape, dtype=F64, generator=generator)
    return [out.detach(), *torch.autograd.grad((out * above).sum(), live, materialize_grads=True)]


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("formulation", ["normalized", "paper"])
@pytest.mark.parametrize("row", ROWS)
def test_every_path_is_the_loop(row, formulation, geometry):
    solver = row.split()[0]
    paths = {"two_step", "gram", "collapsed"} if solver in ("proxgd", "fista", "anderson") else {"auto"}
    if solver == "proxsg":
        paths |= {"masked"} | ({"columns"} if "shared" in row else set())
    for prior, training, more in itertools.product(PRIORS, (True, False), ({}, {"diagonal": True, "skip": True})):
        if not training and solver in ("proxgd", "fista", "anderson"):
            continue
        options = {**ROWS[row], "activation": PRIORS[prior], "formulation": formulation, **more}
        expected = solved(solver, geometry, training, path="loop", **options)
        for path in sorted(paths):
            assert_same(solved(solver, geometry, training, path=path, **options), expected)


@pytest.mark.parametrize(("solver", "options"), [
    ("ms2gd", {"inner": 2}), ("s2gd", {"inner": 2}), ("svrg", {"inner": 2}), ("rcd", {}),
    ("proxsg", {"sampling": "gradient"}), ("proxsg", {"sampling": "lipschitz"}), ("fista", {"restart": False}),
    ("proxgd", {"path": "collapsed"}), ("fista", {"path": "collapsed", "restart": False}),
])  # fmt: skip
def test_second_derivatives(solver, options):
    """Against the loop: a step that follows the weights is a constant for every derivative, but not for numbers."""
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(one, dtype=F64, generator=generator).requires_grad_() for one in ((2, 4), (3, 4), (3,))]
    activation = "identity" if options.get("path") == "collapsed" else "tanh"
    found = []
    for more in (options, {**options, "path": "loop"}):
        out = solve_layer(
            *given, Geometry(), activation=activation, solver=solver, iters=4, lipschitz=20.0,
            generator=torch.Generator().manual_seed(3), **more,
        )  # fmt: skip
        grads = torch.autograd.grad(out.square().sum(), given, create_graph=True)
        found.append(torch.autograd.grad(sum(one.square().sum() for one in grads), given))
    assert_same(*found)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_which_convolutions_are_matrices(geometry):
    """By the dense matrix of ``A A^T``: it couples no two places exactly where the windows do not overlap."""
    shape = GEOMETRIES[geometry]
    operator = operator_from_kernel(torch.randn(shape[1], dtype=F64), shape[0], shape[2])
    out = operator.apply(torch.zeros(shape[2], dtype=F64))[0]
    basis = torch.eye(out.numel(), dtype=F64).reshape(-1, *out.shape)
    if out.dim() > len(operator.problem_dims):
        return
    gram = operator.gram(basis).reshape(out.numel(), *out.shape)
    places = out[0].numel() if out.dim() > 1 else 1
    per_place = gram.reshape(operator.out_features, places, operator.out_features, places).permute(1, 3, 0, 2)
    coupled = per_place[~torch.eye(places, dtype=torch.bool)].abs().max() > 1e-12 if places > 1 else False
    assert is_matrix(operator) != bool(coupled)


def test_affine_solvers():
    operator = operator_from_kernel(torch.zeros(768, 768), Geometry(), (2000, 768))

    def path(solver, sampling=False, activation="identity", **options):
        made = SOLVERS.get(solver).from_options(**options)
        return path_for(made, solve_size(made, operator, 2000, sampling=sampling, prior=prox_for(activation)))

    for solver in ("proxgd", "proxsg", "ms2gd", "s2gd", "svrg", "rcd"):
        assert path(solver) == "collapsed" and path(solver, activation="relu") == "gram"
        if solver != "proxgd":
            assert path(solver, sampling=True) != "collapsed"
    assert path("fista", iters=3) == path("fista", restart=False) == "collapsed"
    assert path("fista", iters=4) == path("anderson") == path("proxgd", gradient="implicit") == "gram"


def plugin_solver():
    """The solver of the plug-in page."""
    file = pathlib.Path(__file__).parents[1] / "plugin_package/heavy_ball/solver.py"
    spec = importlib.util.spec_from_file_location("heavy_ball_solver", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.HeavyBall


@pytest.mark.parametrize("prior", PRIORS)
def test_a_plug_in_that_declares_its_momentum(prior):
    heavy_ball, found = plugin_solver(), {}
    for path in ("loop", "two_step", "gram", *(["collapsed"] if prior == "identity" else [])):
        solver = heavy_ball.from_options(iters=5, lam=0.1, path=path, momentum=0.3)
        found[path] = solved_by(solver, PRIORS[prior])
        assert_same(found[path], found["loop"])


def test_a_subclass_with_steps_of_its_own_declares_nothing():
    heavy_ball = plugin_solver()

    class Lazy(heavy_ball):
        def step(self, problem, state, iteration, draws):
            return super().step(problem, state, iteration, draws) if iteration < 2 else state

    assert heavy_ball.from_options().recursion is not None and Lazy.from_options().recursion is None
    short = heavy_ball.from_options(iters=2, path="loop")
    assert_same(solved_by(Lazy.from_options(iters=6), nn.ReLU()), solved_by(short, nn.ReLU()))


def solved_by(solver, activation):
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(one, dtype=F64, generator=generator).requires_grad_() for one in ((5, 6), (4, 6), (4,))]
    out = solve_layer(*given, Geometry(), solver=solver, activation=activation, lipschitz=20.0)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), given)]
