"""Unrolled gradients of every solver with every kind of operator, against finite differences."""

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

from solver_plugins.blocks import solve_layer
from solver_plugins.operators import Geometry
from tests.solve.cases import CASES, SAMPLING

F64 = torch.float64
OPERATORS = {
    "linear": (Geometry(), (4, 5), (2, 5)),
    "tokens": (Geometry(), (3, 4), (2, 2, 4)),
    "conv1d": (Geometry.for_conv((3,), stride=2, padding=1), (2, 3, 3), (2, 3, 6)),
    "conv2d": (Geometry.for_conv((2, 3), padding="same"), (3, 2, 2, 3), (1, 2, 3, 4)),
    "conv2d_groups_circular": (
        Geometry.for_conv((3, 3), padding=1, groups=2, padding_mode="circular"), (2, 1, 3, 3), (1, 2, 3, 3),
    ),
    "conv2d_reflect_dilated": (
        Geometry.for_conv((2, 2), padding=1, dilation=2, padding_mode="reflect"), (2, 2, 2, 2), (1, 2, 3, 3),
    ),
    "conv3d": (Geometry.for_conv((2, 2, 2), stride=2, padding=1), (2, 2, 2, 2, 2), (1, 2, 2, 3, 2)),
}  # fmt: skip


# The step's constant is a constant for the backward pass, also where it is made from the columns' norms; finite
# differences would see it move, so these checks fix it.
OPTIONS = {
    name: options | ({"step": "constant"} if name in SAMPLING and name != "proxsg" else {})
    for name, options in CASES.items()
}


def solved(solver, geometry, activation="softplus", output="argument", **options):
    def function(u, kernel, bias):
        return solve_layer(
            u, kernel, bias, geometry, activation=activation, solver=solver, iters=3, lipschitz=20.0, output=output,
            generator=torch.Generator().manual_seed(7), **options,
        )  # fmt: skip

    return function


def inputs(operator):
    _, kernel_shape, input_shape = OPERATORS[operator]
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(shape, dtype=F64, generator=generator).requires_grad_()
        for shape in (input_shape, kernel_shape, kernel_shape[:1])
    )


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("name", sorted(CASES))
def test_gradcheck(name, operator):
    activation = "tanh" if name == "rcd" else "softplus"
    assert gradcheck(solved(name, OPERATORS[operator][0], activation, **OPTIONS[name]), inputs(operator))


@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.parametrize("activation", [nn.Tanh(), nn.LeakyReLU(0.3), nn.Softshrink(0.1), nn.ELU(0.5)])
def test_gradcheck_with_small_steps(name, activation):
    """The paper's formulation takes steps 1/L, so every prox is away from its unit step."""
    function = solved(name, Geometry(), activation, "value", formulation="paper", **OPTIONS[name])
    assert gradcheck(function, inputs("linear"))


@pytest.mark.parametrize("name", sorted(CASES))
def test_double_backward_is_right(name):
    options = {"formulation": "paper"} if name != "anderson" else {}
    assert gradgradcheck(solved(name, Geometry(), "tanh", **options, **OPTIONS[name]), inputs("linear"))


def test_diagonal_and_skip_get_gradients():
    u, kernel, bias = inputs("conv2d")
    diagonal = torch.rand(3, dtype=F64).add_(0.5).requires_grad_()
    skip = torch.randn(1, 3, 3, 4, dtype=F64, requires_grad=True)

    def function(u, kernel, bias, diagonal, skip):
        return solve_layer(
            u, kernel, bias, OPERATORS["conv2d"][0], activation="softplus", solver="proxgd", iters=3, lipschitz=20.0,
            diagonal=diagonal, skip=skip,
        )  # fmt: skip

    assert gradcheck(function, (u, kernel, bias, diagonal, skip))


def test_prelu_slope_gets_gradients_from_every_iteration():
    fc, act = nn.Linear(5, 4, dtype=F64), nn.PReLU(4, dtype=F64)
    u = torch.randn(3, 5, dtype=F64)

    def function(slope):
        act.weight.data.copy_(slope.detach())
        return act.weight, solve_layer(
            u, fc.weight, fc.bias, Geometry(), activation=act, solver="proxgd", iters=4, lipschitz=3.0
        )

    slope = torch.full((4,), 0.3, dtype=F64)
    parameter, out = function(slope)
    (grad,) = torch.autograd.grad(out.sum(), parameter)
    step = 1e-6
    for i in range(4):
        delta = torch.zeros(4, dtype=F64)
        delta[i] = step
        numeric = (function(slope + delta)[1].sum() - function(slope - delta)[1].sum()) / (2 * step)
        assert abs(float(numeric.detach()) - float(grad[i])) < 1e-6
