"""Each proximal map against its definition, by independent scalar minimisation in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, special

from solver_plugins.prox.monotone import NewtonPrior
from solver_plugins.prox.softplus import dilogarithm_exp
from tests.prox.cases import CASES, STEPS, Case, each_activation, each_case, grid
from tests.tolerances import tolerance


@each_activation
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_unit_step_is_the_activation_bit_for_bit(case: Case, dtype):
    if case.name == "prelu":
        case.parameters["module"].to(dtype)
    a = grid(dtype)
    try:
        assert torch.equal(case.make().prox(a, 1.0), case.activation(a))
        assert torch.equal(case.make().prox(a, 1), case.activation(a))
        assert torch.equal(case.make().argument(a, 1.0), a)
    finally:
        if case.name == "prelu":
            case.parameters["module"].double()


@each_activation
def test_a_unit_step_given_as_a_tensor(case: Case):
    a = grid()
    # F.softplus leaves the smooth softplus by 2e-9 where it turns linear.
    torch.testing.assert_close(
        case.make().prox(a, torch.tensor(1.0, dtype=torch.float64)), case.activation(a), rtol=1e-12, atol=3e-9
    )


QUADRATURE = {"sqrt_softplus", "tanhshrink", "monotone"}
"""Priors whose g is computed numerically: slow, so at fewer points."""


def _g(prior, x: float) -> float:
    return prior.g(torch.tensor([x], dtype=torch.float64)).item()


def _bracket(case: Case, a: float, step: float) -> tuple[float, float]:
    low, high = case.domain
    # The minimiser is no further from a than twice the distance to any point of the domain, plus what g can pull.
    reach = 10 + 2 * abs(a) + 3 * step
    return max(low, -reach), min(high, reach)


@each_case
@pytest.mark.parametrize("step", [1e-3, 0.05, 0.5, 20.0])
def test_it_minimises(case: Case, step):
    prior = case.make()
    for a in (-1.1,) if case.name in QUADRATURE else (-7.3, -0.2, 0.97):
        x = prior.prox(torch.tensor([a], dtype=torch.float64), step).item()

        def objective(y, a=a):
            return _g(prior, y) + (y - a) ** 2 / (2 * step)

        reference = optimize.minimize_scalar(
            objective, bounds=_bracket(case, a, step), method="bounded", options={"xatol": 1e-10}
        )
        at_x = objective(x)
        assert math.isfinite(at_x)
        # As good as scipy's minimum, and better where scipy stops short of an end of the domain.
        assert at_x <= reference.fun + 1e-9 * (1 + abs(reference.fun))
        # An error dx costs dx^2/(2 step) at least: what scipy can resolve in x is the root of its rounding.
        assert x == pytest.approx(reference.x, abs=2e-6 * (1 + abs(a)) * max(1, step) ** 0.5)


@each_case
@pytest.mark.parametrize("step", [0.05, 0.5, 1.7, 20.0])
def test_the_optimality_condition(case: Case, step):
    prior = case.make()
    a = torch.linspace(-6.13, 6.17, 24, dtype=torch.float64)
    x = prior.prox(a, step)
    low, high = case.domain
    h = 1e-4 * torch.minimum((x - low).clamp(max=1), (high - x).clamp(max=1))
    # Where x is at an end of the domain, or g has a kink at x, a subgradient takes the place of g'.
    # Tanhshrink's g behaves like |x|^(4/3) at 0: the differences have to stay on one side.
    h = torch.minimum(h, 1e-3 * x.abs())
    smooth = h > 1e-7
    x, a, h = x[smooth], a[smooth], h[smooth]
    difference = (prior.g(x + h) - prior.g(x - h)) / (2 * h)
    torch.testing.assert_close(difference, (a - x) / step, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("case", [case for case in CASES if isinstance(case.make(), NewtonPrior)], ids=str)
def test_the_newton_residual(case: Case):
    prior = case.make()
    a = torch.cat([grid(), 1 - torch.logspace(-9, -1, 30, dtype=torch.float64), torch.logspace(1, 4, 20).double()])
    for step in STEPS:
        v = prior.argument(a, step)
        x = prior.value_and_slope(v)[0]
        residual = step * (v - x) + (x - a)
        assert (residual.abs() <= 1e-12 * (1 + a.abs())).all(), step


@each_case
def test_the_argument_gives_the_same_point(case: Case):
    prior = case.make()
    a = grid()
    for step in STEPS:
        v = prior.argument(a, step)
        unit = prior.prox(v, 1.0) if case.activation is None else case.activation(v)
        # 3e-9: see test_a_unit_step_given_as_a_tensor.
        torch.testing.assert_close(unit, prior.prox(a, step), rtol=1e-9, atol=3e-9)


@each_case
def test_the_zero_argument(case: Case):
    prior = case.make()
    if prior.zero_argument is None:
        low, high = case.domain
        # None only where 0 is not attained: outside of the domain or its open end.
        assert low >= 0 or high <= 0
    else:
        x = prior.prox(torch.tensor([prior.zero_argument], dtype=torch.float64), 1.0)
        assert x.abs().item() <= 1e-15


@each_case
@settings(max_examples=8)
@given(
    points=st.lists(st.tuples(st.floats(-50, 50), st.floats(-50, 50)), min_size=1, max_size=30),
    step=st.floats(1e-3, 50),
)
def test_firm_nonexpansiveness(case: Case, points, step):
    prior = case.make()
    a, b = torch.tensor(points, dtype=torch.float64).T
    p, q = prior.prox(a, step).detach(), prior.prox(b, step).detach()
    slack = 1e-12 * (1 + a.abs() + b.abs()) ** 2
    assert ((p - q) ** 2 <= (p - q) * (a - b) + slack).all()
    # ... and each point lies in the domain.
    assert (p >= case.domain[0]).all()
    assert (p <= case.domain[1]).all()


@pytest.mark.parametrize("case", [case for case in CASES if case.name not in ("identity",)], ids=str)
@pytest.mark.parametrize("step", [0.3, 2.5])
def test_moreau_identity(case: Case, step):
    """prox_{t g}(a) + t prox_{g*/t}(a/t) = a, the conjugate taken as a maximum over a fine grid."""
    prior = case.make()
    low, high = _bracket(case, 6.0, step)
    xs = torch.linspace(low, high, 2001 if case.name in QUADRATURE else 8001, dtype=torch.float64)
    values = prior.g(xs).detach().numpy()
    finite = np.isfinite(values)
    points, values = xs.numpy()[finite], values[finite]

    for a in (0.4,) if case.name in QUADRATURE else (-1.3, 0.4, 2.2):
        x = prior.prox(torch.tensor([a], dtype=torch.float64), step).item()

        def dual(y, a=a):
            return np.max(y * points - values) / step + (y - a / step) ** 2 / 2

        # The dual point is a subgradient (a - x)/t with x in the bracket.
        result = optimize.minimize_scalar(
            dual, bounds=((a - high) / step - 1, (a - low) / step + 1), method="bounded", options={"xatol": 1e-9}
        )
        assert x + step * result.x == pytest.approx(a, abs=5e-3 * max(1, step))


# Without prelu, whose module holds float64; its formula is that of leaky_relu.
@pytest.mark.parametrize("case", [case for case in CASES if case.name != "prelu"], ids=str)
@pytest.mark.parametrize("step", [1e-3, 0.3, 20.0])
def test_float32_is_accurate_for_large_arguments(case: Case, step):
    prior = case.make()
    sizes = torch.logspace(-4, 4, 60)
    a = torch.cat([-sizes.flip(0), sizes])
    expected = prior.prox(a.double(), step)
    actual = prior.prox(a, step)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, rtol=2e-5, atol=1e-6)
    slopes = prior.derivative(a, step).double()
    torch.testing.assert_close(slopes, prior.derivative(a.double(), step), rtol=1e-3, atol=1e-4)


@each_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_runs(case: Case, dtype):
    prior = case.make()
    a = grid(torch.float32).to(dtype)
    for step in (0.01, torch.tensor(0.3), torch.tensor(4.0, dtype=torch.float64)):
        x = prior.prox(a, step)
        assert x.dtype == dtype
        assert x.isfinite().all()
        assert prior.derivative(a, step).dtype == dtype
        torch.testing.assert_close(x, prior.prox(a.double(), step).to(dtype), **tolerance(dtype)._asdict())


@each_case
def test_the_step_does_not_change_the_dtype(case: Case):
    prior = case.make()
    a = torch.tensor(0.7, dtype=torch.float64)
    assert prior.prox(a, torch.tensor(0.5)).dtype == torch.float64
    if case.name != "prelu":
        assert prior.prox(a.float(), torch.tensor(0.5, dtype=torch.float64)).dtype == torch.float32
    torch.testing.assert_close(prior.prox(a, torch.tensor(0.5)), prior.prox(a, 0.5))


@each_case
def test_the_penalty_is_infinite_outside_and_convex_inside(case: Case):
    prior = case.make()
    low, high = case.domain
    outside = torch.tensor([low - 0.01, high + 0.01, low - 5, high + 5], dtype=torch.float64)
    outside = outside[outside.isfinite()]
    assert (prior.g(outside) == math.inf).all()
    inside = torch.linspace(max(low, -5.0), min(high, 5.0), 202, dtype=torch.float64)[1:-1]
    values = prior.g(inside).detach()
    assert values.isfinite().all()
    assert (values[2:] - 2 * values[1:-1] + values[:-2] >= -1e-10).all()
    assert values.shape == inside.shape


@pytest.mark.parametrize(
    ("name", "ends", "limits"),
    [
        ("tanh", (-1.0, 1.0), (math.log(2) - 0.5, math.log(2) - 0.5)),
        ("sigmoid", (0.0, 1.0), (0.0, -0.5)),
        ("elu", (-1.0,), (0.5,)),
        ("celu", (-1.0,), (0.5,)),
        ("softplus", (0.0,), (math.pi**2 / 6,)),
        ("logsigmoid", (0.0,), (math.pi**2 / 6,)),
        ("softsign", (-1.0, 1.0), (math.inf, math.inf)),
        ("tanh_barrier", (-1.0, 1.0), (math.inf, math.inf)),
        ("sigmoid_barrier", (0.0, 1.0), (math.inf, math.inf)),
    ],
)
def test_the_penalty_has_its_limits_at_the_ends(name, ends, limits):
    prior = next(case for case in CASES if case.name == name).make()
    actual = prior.g(torch.tensor(ends, dtype=torch.float64))
    torch.testing.assert_close(actual, torch.tensor(limits, dtype=torch.float64))


def test_the_dilogarithm_against_scipy():
    y = torch.cat([torch.zeros(1), torch.logspace(-12, 2.5, 200)]).double()
    expected = special.spence(-np.expm1(-y.numpy()))
    # atol: scipy takes 1 - z, which rounds where z is small.
    np.testing.assert_allclose(dilogarithm_exp(y).numpy(), expected, rtol=3e-15, atol=2e-16)
