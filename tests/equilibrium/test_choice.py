"""Feature regularisers: SAM chooses among several fixed points (Theorem 4), others change the map (section 4.1)."""

from dataclasses import dataclass

import pytest
import torch

from solver_plugins.equilibrium import (
    FEATURE_REGULARIZERS,
    DeepOptEq,
    FeatureRegularizer,
    OptEqLayer,
    list_regularizers,
    make_regularizer,
    register_regularizer,
)
from solver_plugins.equilibrium.problem import EquilibriumProblem, Regularization
from solver_plugins.equilibrium.solvers import FixedPoint, Sam, unroll
from solver_plugins.errors import OptionError, RegistrationError, UnknownNameError
from tests.equilibrium.small import DOUBLE, conv_network, inputs, network


@dataclass(frozen=True)
class Toward(FeatureRegularizer):
    """A user's own: half the squared distance to a point."""

    at: float = 2.0
    name = "toward_for_tests"

    def value(self, z, dims):
        return (z - self.at).square().sum(dims) / 2

    def gradient(self, z, dims):
        return z - self.at


@pytest.fixture
def own_regularizer():
    register_regularizer(Toward)
    yield
    del FEATURE_REGULARIZERS._entries[Toward.name]


def segment():
    """|W| = 1 and a box: z = W^T hardtanh(W z + c) is at rest on the segment {(t, 0.5): -1 <= t <= 1}.

    The first row is the identity on [-1, 1], the second one halves: z_2 = (z_2/sqrt(2) + c)/sqrt(2), c = 0.5/sqrt(2).
    """
    model = network(state=2, inputs=1, hidden=2, activation="hardtanh", norm=1.0, alpha=0.8)
    with torch.no_grad():
        model.layers[0].W.weight.copy_(torch.diag(torch.tensor([1.0, 0.5**0.5], dtype=DOUBLE)))
        model.layers[0].U.weight.zero_()
        model.layers[0].U.bias.copy_(torch.tensor([0.0, 0.5 * 0.5**0.5], dtype=DOUBLE))
    return model.problem(torch.zeros(1, 1, dtype=DOUBLE))


@torch.no_grad()
def run(solver, problem, start):
    """Runs from another point than zero."""
    state = solver.init()
    z = start
    for iteration in range(solver.config.iters):
        state = solver.step(problem, type(state)(z), problem.image(z), iteration)
        z = state.z
    return z


@pytest.mark.parametrize(
    ("regularizer", "expected"), [("half_squared", 0.0), ("l1", 0.0), (Toward(0.3), 0.3), (Toward(5.0), 1.0)]
)
def test_theorem_4_sam_finds_the_least_regularised_fixed_point(regularizer, expected):
    problem = EquilibriumProblem(segment().units, 0.8, chosen=Regularization(make_regularizer(regularizer), 1.0))
    begin = torch.tensor([[-0.9, 0.0], [0.8, 0.0]], dtype=DOUBLE)
    wanted = torch.tensor([expected, 0.5], dtype=DOUBLE)
    # The rate is slow: lambda_k = 0.5/k^0.2 pulls to zero, and beta_k = 0.5/k^0.5 away from the fixed points.
    early, late = ((run(Sam.from_options(iters=k), problem, begin) - wanted).norm(dim=1) for k in (100, 3000))
    assert (late < 0.1).all()
    assert (late < early).all()
    # The plain iteration stays where it began along the segment.
    plain = run(FixedPoint.from_options(iters=300), problem, begin)
    torch.testing.assert_close(plain, torch.tensor([[-0.9, 0.5], [0.8, 0.5]], dtype=DOUBLE), rtol=0, atol=1e-9)


def test_sam_without_a_regulariser_is_the_plain_iteration():
    x = inputs(3, 5)
    sam, plain = network(2, solver="sam", iters=7), network(2, solver="fixed_point", gradient="unrolled", iters=7)
    assert torch.equal(sam(x), plain(x))


def test_rates_outside_of_theorem_4_are_refused():
    with pytest.raises(OptionError, match=r"rho \+ 2 c < 1"):
        network(solver="sam", iters=3, rho=0.8, c=0.2)
    with pytest.raises(OptionError, match="gradient"):
        network(solver="sam", gradient="implicit")


@pytest.mark.parametrize("name", list_regularizers())
@pytest.mark.parametrize("shape", [(4, 6), (4, 3, 2, 2)])
def test_gradients_are_those_of_the_values(name, shape):
    regularizer = make_regularizer({"name": name, "eps": 1e-9} if name == "l1" else name)
    dims = tuple(range(1 - len(shape), 0))
    z = inputs(*shape).requires_grad_()
    (expected,) = torch.autograd.grad(regularizer.value(z, dims).sum(), z, create_graph=True)
    torch.testing.assert_close(regularizer.gradient(z, dims), expected)
    torch.testing.assert_close(FeatureRegularizer.gradient(regularizer, z, dims), expected)


@pytest.mark.parametrize("name", ["half_squared", "l1"])
def test_proximal_maps_minimise(name):
    regularizer, z = make_regularizer(name), inputs(5, 6)
    least = regularizer.prox(z, 0.3, (-1,))

    def value(u):
        return 0.3 * regularizer.value(u, (-1,)) + (u - z).square().sum(1) / 2

    for seed in range(10):
        assert (value(least + inputs(5, 6, seed=seed) * 10.0 ** (-seed % 4)) >= value(least) - 1e-12).all()


def test_appended_l1_makes_features_sparse_and_is_at_rest():
    x = inputs(4, 5)
    plain, sparse = network(2), network(2, regularizer="l1", lam=0.3)
    z = sparse(x)
    assert (z == 0).sum() > (plain(x) == 0).sum()
    units = sparse.problem(x).units
    moved = units[1].step(units[0].step(z, 0.8), 0.8)
    torch.testing.assert_close(torch.nn.functional.softshrink(moved, 0.3), z)


def test_appended_half_square_with_one_layer_minimises_the_sum():
    """z = prox_R(z - a grad h(z)) is the minimiser of h + R/a."""
    model, x = network(regularizer="half_squared", lam=0.5, alpha=0.8), inputs(2, 5)
    z = model(x).detach()
    unit = model.problem(x).units[0]
    torch.testing.assert_close(z - unit.value(z) + 0.5 / 0.8 * z, torch.zeros_like(z), rtol=0, atol=1e-10)


@pytest.mark.parametrize("solver", ["anderson", "sam"])
def test_decorrelation_acts_in_training_only(solver):
    options = {"solver": solver, "iters": 30} if solver == "sam" else {"solver": solver}
    model, x = network(2, regularizer="decorrelation", lam=0.05, **options), inputs(6, 5)
    plain = network(2, **options)
    assert not torch.allclose(model(x), plain(x), atol=1e-4)
    model.eval()
    assert torch.equal(model(x), plain.eval()(x))
    torch.testing.assert_close(model(x)[:2], model(x[:2]))


def test_decorrelation_lowers_correlation():
    regularizer, z = make_regularizer("decorrelation"), inputs(20, 6) + 1.0
    before = regularizer.value(z, (-1,))
    for _ in range(50):
        z = z - 0.5 * regularizer.gradient(z, (-1,))
    assert regularizer.value(z, (-1,)) < 0.2 * before


def test_regularisers_work_on_maps():
    x = inputs(2, 2, 4, 4)
    for name in list_regularizers():
        assert conv_network(2, regularizer=name, lam=0.02, tol=1e-8)(x).shape == (2, 3, 4, 4)


def test_a_users_own_regulariser(own_regularizer):
    x = inputs(3, 5)
    model = network(2, regularizer={"name": "toward_for_tests", "at": 1.5}, lam=0.2)
    assert (model(x) - 1.5).norm() < (network(2)(x) - 1.5).norm()


def test_bad_regularisers_are_refused():
    with pytest.raises(UnknownNameError, match="half_squared"):
        network(regularizer="half_square")
    with pytest.raises(OptionError, match="eps"):
        make_regularizer({"name": "l1", "epsilon": 1})
    with pytest.raises(OptionError, match="name"):
        make_regularizer({"eps": 1})
    with pytest.raises(OptionError, match="lam"):
        network(regularizer="l1", lam=-1.0)
    with pytest.raises(RegistrationError):
        register_regularizer(DeepOptEq)


def test_unrolled_runs_report_their_residual():
    problem = segment()
    found = unroll(FixedPoint.from_options(iters=30), problem)
    assert found.residual < 1e-6 and found.evaluations == 30
    assert OptEqLayer.linear(2, 1).kernel().shape == (2, 2)
