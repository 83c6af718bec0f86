"""Minimal residuals of the implicit backward: against dense solves; what few products left adds up to the gradients."""

import itertools

import pytest
import torch

from solver_plugins.equilibrium.problem import Jacobian
from solver_plugins.equilibrium.residuals import minimal_residuals
from tests.equilibrium.small import DOUBLE, conv_network, inputs, network


def system(make, layers=3, batch=4, **options):
    """The Jacobian at an equilibrium, and right-hand sides of very different sizes."""
    model = make(layers, **options)
    x = inputs(batch, 5) if make is network else inputs(batch, 2, 4, 3)
    with torch.no_grad():
        z = model(x)
        problem = model.problem(x)
        _, jacobian = (problem.prepared() if make is conv_network else problem).image_and_jacobian(z)
    w = inputs(*z.shape, seed=3) * (10.0 ** torch.arange(batch)).reshape(-1, *(1,) * (z.ndim - 1))
    return model, jacobian, w


def solve(jacobian, w, tolerance, products=200, pulls=True):
    assert jacobian.dims == tuple(range(1 - w.ndim, 0))
    return minimal_residuals(jacobian, w, tolerance, products, pulls=pulls)


def dense(jacobian, w):
    """Solves (I - J^T) y = w sample by sample, with J^T from its products with unit vectors."""
    found = torch.zeros_like(w)
    size = w[0].numel()
    for sample in range(len(w)):
        columns = []
        for unit in torch.eye(size, dtype=DOUBLE):
            at = torch.zeros_like(w)
            at[sample] = unit.reshape(w[0].shape)
            columns.append(jacobian.transposed(at)[sample].reshape(-1))
        matrix = torch.eye(size, dtype=DOUBLE) - torch.stack(columns, 1)
        found[sample] = torch.linalg.solve(matrix, w[sample].reshape(-1)).reshape(w[0].shape)
    return found


@pytest.mark.parametrize("make", [network, conv_network])
@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_dense_solution(make, activation):
    options = {"activation": activation} if make is network else {}
    _, jacobian, w = system(make, **options)
    found = solve(jacobian, w, 1e-13)
    assert (found.residual <= 1e-13).all()
    expected = dense(jacobian, w)
    assert ((found.y - expected).flatten(1).norm(dim=1) <= 1e-11 * expected.flatten(1).norm(dim=1)).all()


@pytest.mark.parametrize("make", [network, conv_network])
@pytest.mark.parametrize("tolerance", [1e-1, 1e-2, 1e-4, 1e-9])
def test_pulls_and_residuals_are_those_of_the_solution(make, tolerance):
    """Summed after few products, from a last product after more: either way what one product at ``y`` would leave."""
    _, jacobian, w = system(make)
    found = solve(jacobian, w, tolerance)
    expected = jacobian.pull(found.y)
    assert found.pull is not None
    for part, other in ((found.pull.outer, expected.outer), (found.pull.inner, expected.inner)):
        for a, b in zip(part, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12 * float(b.abs().max()))
    image = w + jacobian.transposed(found.y)
    true = (image - found.y).flatten(1).norm(dim=1) / image.flatten(1).norm(dim=1)
    assert (true <= tolerance).all()
    torch.testing.assert_close(found.residual, true, rtol=1e-6, atol=1e-14)


def test_few_products_need_no_further_one(monkeypatch):
    calls = []
    pull = Jacobian.pull
    monkeypatch.setattr(Jacobian, "pull", lambda self, y: calls.append(y) or pull(self, y))
    counts = {}
    for tolerance in (1e-1, 1e-2, 1e-12):
        _, jacobian, w = system(network)
        calls.clear()
        found = solve(jacobian, w, tolerance)
        assert len(calls) == found.products
        counts[tolerance] = found.products
    assert counts[1e-1] < counts[1e-2] <= 4 < counts[1e-12]


def test_residuals_are_least_on_the_span_of_the_products():
    """With k products no other combination of w, J^T w, ... has a smaller residual: GMRES."""
    _, jacobian, w = system(network)
    powers = [w]
    for products in (1, 2, 3, 4):
        found = solve(jacobian, w, 1e-30, products=products)
        powers.append(jacobian.transposed(powers[-1]))
        for sample in range(len(w)):
            # (I - J^T) of the first powers, whose span the solution lies in.
            span = torch.stack([(a - b)[sample] for a, b in itertools.pairwise(powers)], 1)
            least = torch.linalg.lstsq(span, w[sample, :, None], driver="gelsd").solution
            expected = (w[sample, :, None] - span @ least).norm()
            y = found.y[sample]
            left = (w + jacobian.transposed(found.y))[sample] - y
            assert float(left.norm()) == pytest.approx(float(expected), rel=1e-6)


def test_no_problem_depends_on_its_neighbours():
    """Also where the others take so many products more that pulls are no longer summed."""
    model = network(3)
    x = inputs(4, 5)
    with torch.no_grad():
        z = model(x)
        _, jacobian = model.problem(x).image_and_jacobian(z)
    w = inputs(*z.shape, seed=3)
    # Where the last layer is flat, one product is all it takes.
    w[0] = 0
    together = solve(jacobian, w, 1e-3)
    for row in range(4):
        with torch.no_grad():
            _, one = model.problem(x[row : row + 1]).image_and_jacobian(z[row : row + 1])
        alone = solve(one, w[row : row + 1], 1e-3)
        torch.testing.assert_close(together.y[row], alone.y[0], rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(together.residual[row], alone.residual[0], rtol=1e-6, atol=1e-14)
    assert (together.y[0] == 0).all() and together.residual[0] == 0


def test_a_limit_of_products_is_kept_and_the_residual_told():
    _, jacobian, w = system(network)
    for products in (1, 3, 5):
        found = solve(jacobian, w, 1e-14, products=products)
        assert found.products == products and found.pull is None
        image = w + jacobian.transposed(found.y)
        torch.testing.assert_close(found.residual, (image - found.y).norm(dim=1) / image.norm(dim=1))
