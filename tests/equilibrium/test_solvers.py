"""Solvers of equilibria: one equilibrium for all of them, every sample for itself, honest reports."""

import copy
import pickle

import pytest
import torch

from solver_plugins.equilibrium import (
    EQUILIBRIUM_SOLVERS,
    DeepOptEq,
    EquilibriumSolver,
    EquilibriumState,
    OptEqLayer,
    list_equilibrium_solvers,
    register_equilibrium_solver,
)
from solver_plugins.equilibrium.problem import rows_of, states_of
from solver_plugins.equilibrium.solvers.anderson import MixingState, _relaxation
from solver_plugins.errors import InputError, OptionError, RegistrationError, ShapeError, UnknownNameError
from tests.equilibrium.small import DOUBLE, conv_network, inputs, network


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("make", [network, conv_network])
def test_all_solvers_find_one_equilibrium(make, layers):
    x = inputs(3, 5) if make is network else inputs(3, 2, 5, 4)
    expected = make(layers, solver="fixed_point", iters=1000)(x)
    for name in list_equilibrium_solvers():
        if EQUILIBRIUM_SOLVERS.get(name).one_layer_only and layers > 1:
            with pytest.raises(OptionError, match="single layer"):
                make(layers, solver=name)
        else:
            torch.testing.assert_close(make(layers, solver=name, iters=1000)(x), expected, rtol=1e-9, atol=1e-10)


def test_anderson_needs_fewer_evaluations():
    x = inputs(4, 5)
    counts = {
        name: network(solver=name, tol=1e-10).solve(x).evaluations for name in ("anderson", "fista", "fixed_point")
    }
    assert counts["anderson"] < counts["fista"] < counts["fixed_point"]


@pytest.mark.parametrize("solver", ["anderson", "fixed_point", "fista"])
@pytest.mark.parametrize("make", [network, conv_network])
def test_no_sample_depends_on_its_batch(make, solver):
    """Stopped early, and with samples of very different sizes, so that a shared stopping rule would show."""
    x = inputs(6, 5) if make is network else inputs(6, 2, 4, 4)
    x = x * 10.0 ** torch.arange(-3, 3).reshape(-1, *(1,) * (x.ndim - 1))
    model = make(solver=solver, tol=1e-3)
    together = model.solve(x)
    alone = [model.solve(x[index : index + 1]) for index in range(6)]
    torch.testing.assert_close(together.value, torch.cat([one.value for one in alone]), rtol=1e-9, atol=1e-10)
    assert together.iterations.tolist() == [int(one.iterations) for one in alone]
    if make is network:
        assert len(set(together.iterations.tolist())) > 1
    torch.testing.assert_close(together.residual, torch.cat([one.residual for one in alone]), rtol=1e-6, atol=1e-12)
    assert (together.residual <= 1e-3).all()


def test_diagnostics_tell_the_truth():
    model, x = network(solver="fixed_point", tol=1e-9, iters=500, alpha=0.5), inputs(3, 5)
    found = model.solve(x)
    problem = model.problem(x)
    moved = (problem.image(found.value) - found.value).norm(dim=1) / found.value.norm(dim=1)
    assert (moved <= found.residual).all() and (found.residual <= 1e-9).all()
    assert found.evaluations == int(found.iterations.max())
    # At most 1 - a (1 - |W|^2), and by then that of the slowest direction.
    assert (found.contraction < 1 - 0.5 * (1 - 0.81) + 1e-9).all() and (found.contraction > 0.5).all()
    assert float(model.residual) == pytest.approx(float(found.residual.max()))


def test_several_layers_begin_at_the_last_one():
    """That contracts the distance between zero and the state before this layer, by 1 - a (1 - |W|^2)."""
    model, x = network(3), inputs(4, 5)
    problem, z = model.problem(x), model(x)
    start = problem.start()
    torch.testing.assert_close(start, problem.units[2].step(torch.zeros_like(z), model.alpha))
    before = problem.units[1].step(problem.units[0].step(z, model.alpha), model.alpha)
    assert ((start - z).norm(dim=1) <= (1 - 0.8 * 0.19) * before.norm(dim=1) + 1e-12).all()
    assert network(1).problem(x).start() is None


def test_relaxation_follows_the_spectrum():
    """One direction is left after the mixture, with eigenvalue 0.2: ``b = 1 / (1 - 0.2)`` removes it at once."""
    rest = inputs(3, 6)
    after_plain = 0.2 * rest
    found = _relaxation(MixingState(None, rest=rest), after_plain)
    torch.testing.assert_close(found, torch.full((3, 1), 1.25, dtype=DOUBLE))
    relaxed = (1 - found) * rest + found * 0.2 * rest
    assert (relaxed.abs() <= 1e-15).all()
    for eigenvalue, expected in ((0.4, 1 / 0.6), (0.9, 2.0), (-0.3, 1.0)):
        f = (1 - found) * rest + found * eigenvalue * rest
        again = _relaxation(MixingState(None, rest=rest, relaxation=found), f)
        torch.testing.assert_close(again, torch.full((3, 1), expected, dtype=DOUBLE))
    nothing = torch.zeros_like(rest)
    torch.testing.assert_close(_relaxation(MixingState(None, rest=nothing), rest), torch.ones(3, 1, dtype=DOUBLE))


def test_feature_maps_keep_their_order_in_memory():
    """Inside of a solve channels are last; outside nobody notices."""
    model, x = conv_network(2), inputs(3, 2, 4, 5)
    last = x.contiguous(memory_format=torch.channels_last)
    for given in (x, last):
        found = model(given)
        assert found.is_contiguous() == (given is x) and found[0, 0].stride() == ((5, 1) if given is x else (15, 3))
        with torch.no_grad():
            assert model(given).stride() == found.stride()
        torch.testing.assert_close(found, conv_network(2, gradient="unrolled", solver="fixed_point", iters=300)(given))
    problem = model.problem(x).prepared()
    rows = rows_of(problem, last)
    assert rows.data_ptr() == last.data_ptr() and rows.shape == (3, 40)
    states = states_of(problem, rows, last.shape)
    assert states.data_ptr() == last.data_ptr() and torch.equal(states, x)


def test_batch_shapes():
    model = network(2)
    x = inputs(2, 3, 5)
    torch.testing.assert_close(model(x), model(x.reshape(6, 5)).reshape(2, 3, 6))
    torch.testing.assert_close(model(x[0, 0]), model(x)[0, 0])
    assert model.solve(x).residual.shape == (2, 3) and model.solve(x[0, 0]).residual.shape == ()
    assert model(x[:0]).shape == (0, 3, 6)
    assert conv_network()(inputs(2, 4, 5)).shape == (3, 4, 5)
    with pytest.raises(ShapeError, match="channels, height, width"):
        conv_network()(inputs(4, 5))
    with pytest.raises(InputError, match="float64"):
        model(x.float())


def test_hidden_features_of_other_resolutions():
    """Layers of one network may see the state at several resolutions."""
    layers = [OptEqLayer.conv2d(3, 2, 4, stride=stride, dtype=DOUBLE) for stride in (1, 2)]
    model = DeepOptEq(layers, tol=1e-12, iters=100)
    for size in ((6, 6), (7, 5)):
        found = model.solve(inputs(2, 2, *size))
        assert found.value.shape == (2, 3, *size) and (found.residual <= 1e-12).all()


def test_copies_and_pickles():
    model, x = network(2, regularizer="l1", lam=0.1, activation=torch.nn.PReLU(dtype=DOUBLE)), inputs(3, 5)
    model(x).sum().backward()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), model(x))
        with torch.no_grad():
            other.layers[0].activation.weight.fill_(0.7)
        assert not torch.equal(other(x), model(x))


def test_a_users_own_solver():
    @register_equilibrium_solver
    class Lazy(EquilibriumSolver):
        """Half a step at a time."""

        name = "lazy_for_tests"

        def step(self, problem, state, image, iteration):
            return EquilibriumState(image / 2 if state.z is None else (state.z + image) / 2)

    try:
        x = inputs(3, 5)
        found = network(2, solver="lazy_for_tests", tol=1e-12).solve(x)
        torch.testing.assert_close(found.value, network(2)(x), rtol=1e-8, atol=1e-9)
    finally:
        del EQUILIBRIUM_SOLVERS._entries["lazy_for_tests"]


def test_bad_options_are_refused():
    with pytest.raises(UnknownNameError, match="anderson"):
        network(solver="andersen")
    with pytest.raises(OptionError, match="window"):
        network(windows=3)
    with pytest.raises(OptionError, match="implicit"):
        network(gradient="explicit")
    with pytest.raises(OptionError, match=r"no option 'grad'\. It is called 'gradient' since 0\.2\.0"):
        network(grad="unrolled")
    with pytest.raises(RegistrationError, match="EquilibriumSolver"):
        register_equilibrium_solver(DeepOptEq)


def test_it_prints_itself():
    text = repr(network(2, regularizer="l1"))
    assert "alpha=0.8" in text and "Anderson(" in text and "constraint='none'" in text and "L1(" in text
