import numpy as np
import pytest
import torch
from torch import nn

from solver_plugins.operators import (
    Geometry,
    geometry_of,
    kernel_of,
    lipschitz_constant,
    lipschitz_from_kernel,
    power_quotient,
    power_step,
    start_vectors,
    warm_steps,
)
from solver_plugins.operators.tracking import _matrix_steps, _matrix_steps_at_once
from tests.operators.references import fine_supremum, random_conv


def follow(kernel, geometry, steps, vectors=None, **options):
    vectors = start_vectors(kernel, geometry) if vectors is None else vectors
    for _ in range(steps):
        estimate, vectors = power_step(kernel, geometry, vectors, **options)
    return estimate, vectors


LAYERS = [
    lambda: nn.Linear(6, 5, dtype=torch.float64),
    lambda: random_conv(1, 3, 4, 5),
    lambda: random_conv(2, 3, 4, 3),
    lambda: random_conv(2, 4, 6, 3, stride=2, groups=2),
    lambda: random_conv(2, 3, 4, 1, stride=2),
    lambda: random_conv(2, 3, 4, 5, stride=2, dilation=2),
    lambda: random_conv(3, 2, 3, 2),
    lambda: random_conv(2, 3, 7, 4, stride=4),
]


@pytest.mark.parametrize("make", LAYERS)
def test_converges_to_a_lower_bound_close_to_the_supremum(make):
    layer = make()
    kernel, geometry = kernel_of(layer).detach(), geometry_of(layer)
    estimate, vectors = follow(kernel, geometry, 300)
    certified = float(lipschitz_constant(layer, tolerance=0.02))
    assert 0.6 * certified <= float(estimate) <= certified
    assert torch.isfinite(vectors).all()
    again, _ = power_step(kernel, geometry, vectors)
    assert float(again) == pytest.approx(float(estimate), rel=1e-6)


def test_linear_converges_to_the_norm():
    weight = torch.randn(7, 5, dtype=torch.float64)
    estimate, vectors = follow(weight, Geometry(), 500)
    assert float(estimate) == pytest.approx(np.linalg.norm(weight.numpy(), 2) ** 2, rel=1e-9)
    assert vectors.shape == (1, 1, 7, 2)
    assert not vectors[..., 1].any()


def test_converges_to_the_maximum_on_the_coarse_grid():
    layer = random_conv(2, 4, 5, 3, groups=1)
    estimate, vectors = follow(layer.weight, geometry_of(layer), 300)
    assert vectors.shape == (12, 1, 5, 2)
    assert float(estimate) == pytest.approx(fine_supremum(layer.weight, points=4), rel=0.01)


def test_grids():
    def shape(kernel_size, stride=1, groups=1):
        layer = random_conv(1, 2, 4, kernel_size, stride=stride, groups=groups)
        return tuple(start_vectors(layer.weight, geometry_of(layer)).shape)

    assert shape(1) == (1, 1, 4, 2)
    assert shape(2) == shape(3) == shape(5, 2) == (3, 1, 4, 2)
    assert shape(5, groups=2) == (5, 2, 2, 2)
    assert shape(7) == shape(31) == (5, 1, 4, 2)


@pytest.mark.parametrize("make", LAYERS)
def test_follows_a_change_of_scale_at_once(make):
    layer = make()
    kernel, geometry = kernel_of(layer).detach(), geometry_of(layer)
    estimate, vectors = follow(kernel, geometry, 200)
    doubled, _ = power_step(2 * kernel, geometry, vectors)
    assert float(doubled) == pytest.approx(4 * float(estimate), rel=1e-5)


@pytest.mark.parametrize("make", LAYERS)
def test_each_step_is_a_lower_bound_that_grows(make):
    layer = make()
    kernel, geometry = kernel_of(layer).detach(), geometry_of(layer)
    bound = float(lipschitz_constant(layer))
    vectors, last = start_vectors(kernel, geometry), 0.0
    for _ in range(20):
        estimate, vectors = power_step(kernel, geometry, vectors)
        assert last * (1 - 1e-9) <= float(estimate) <= bound
        last = float(estimate)


def test_diagonal():
    layer = random_conv(2, 3, 4, 3, stride=2)
    diagonal = torch.rand(4, dtype=torch.float64)
    geometry = geometry_of(layer)
    scaled, _ = follow(layer.weight * diagonal[:, None, None, None], geometry, 5)
    estimate, _ = follow(layer.weight, geometry, 5, diagonal=diagonal)
    assert float(scaled) == pytest.approx(float(estimate))


def test_zero_weights_change_nothing():
    geometry = Geometry.for_conv((3, 3))
    kernel = torch.zeros(4, 2, 3, 3)
    vectors = start_vectors(kernel, geometry)
    estimate, new = power_step(kernel, geometry, vectors)
    assert float(estimate) == 0.0
    assert torch.equal(new, vectors)


def test_start_is_deterministic_and_generic():
    kernel, geometry = torch.randn(64, 8, 3, 3), Geometry.for_conv((3, 3), groups=2)
    state = torch.get_rng_state()
    vectors = start_vectors(kernel, geometry)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(vectors, start_vectors(kernel, geometry))
    torch.testing.assert_close(torch.linalg.vector_norm(vectors, dim=(2, 3)), torch.ones(12, 2))
    flat = vectors.flatten(0, 1).flatten(1).double()
    # No two are nearly parallel, and none is nearly constant.
    products = (flat @ flat.T - torch.eye(24)).abs()
    assert float(products.amax()) < 0.5
    assert float(flat.mean(1).abs().amax()) < 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_runs_in_float32_whatever_autocast_says(dtype):
    layer = nn.Conv2d(4, 6, 3).to(dtype)
    geometry = geometry_of(layer)
    with torch.autocast("cpu", torch.bfloat16):
        estimate, vectors = follow(layer.weight, geometry, 100)
    assert estimate.dtype == vectors.dtype == torch.float32
    assert not estimate.requires_grad
    reference, _ = follow(layer.weight.double(), geometry, 100)
    assert float(estimate) == pytest.approx(float(reference), rel=1e-4)


@pytest.mark.parametrize("scale", [0.0, 1e-20, 1.0, 1e18])
@pytest.mark.parametrize("make", LAYERS)
def test_a_quotient_alone(make, scale):
    """The same as with a whole step, however large the weights are, with a diagonal and without one."""
    layer = make()
    geometry, kernel = geometry_of(layer), scale * kernel_of(layer).detach().float()
    _, vectors = follow(kernel, geometry, 2)
    for diagonal in (None, torch.rand(len(kernel)) + 0.5):
        expected = power_step(kernel, geometry, vectors, diagonal)[0]
        torch.testing.assert_close(power_quotient(kernel, geometry, vectors, diagonal), expected, rtol=1e-6, atol=0)


def test_compiles_without_graph_breaks():
    layer = nn.Conv2d(4, 6, 3, 2, 1, groups=2)
    geometry = geometry_of(layer)
    diagonal = torch.rand(6)

    def step(weight, vectors):
        return power_step(weight, geometry, vectors, diagonal)

    vectors = start_vectors(layer.weight, geometry)
    compiled = torch.compile(step, fullgraph=True)
    for actual, expected in zip(compiled(layer.weight, vectors), step(layer.weight, vectors), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_stays_below_the_certified_bound_while_weights_drift():
    layer = random_conv(2, 6, 6, 3)
    geometry, weight = geometry_of(layer), layer.weight.detach()
    _, vectors = follow(weight, geometry, 60)
    for _ in range(30):
        weight = weight + 0.01 * torch.randn_like(weight)
        estimate, vectors = power_step(weight, geometry, vectors)
    supremum = float(lipschitz_from_kernel(weight, geometry, tolerance=0.02))
    assert 0.7 * supremum <= float(estimate) <= supremum


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_warm_steps_of_a_matrix(scale):
    """Two clean steps and one from a mixed vector, with numbers or without, with the Gram matrix or without."""
    weight = scale * torch.randn(7, 5, dtype=torch.float64)
    gram = weight @ weight.T
    start = start_vectors(weight, Geometry())
    # The start is of length one in float32 only.
    start = start / start.norm()
    found = [
        take(weight, start, 0.02, matrix) for take in (_matrix_steps, _matrix_steps_at_once) for matrix in (None, gram)
    ]
    first, v = power_step(weight, Geometry(), start)
    second, v = power_step(weight, Geometry(), v)
    for steps in found:
        quotients = [float(one) for one in steps.quotients]
        assert quotients[:2] == pytest.approx([float(first), float(second)], rel=1e-9)
        assert float(steps.largest) == pytest.approx(float(gram.diagonal().amax()))
        mixed = steps.vectors[0, 0, :, 0]
        assert float(mixed.norm()) == pytest.approx(1)
        assert 0 < float((mixed - v[0, 0, :, 0]).norm()) < 0.04
        assert quotients[2] == pytest.approx(float((gram @ mixed).norm()), rel=1e-9)


def test_warm_steps_of_weights_of_zero():
    weight = torch.zeros(4, 3)
    steps = warm_steps(weight, Geometry(), start_vectors(weight, Geometry()), 0.02)
    assert [*map(float, steps.quotients), float(steps.largest)] == [0, 0, 0, 0] and torch.isfinite(steps.vectors).all()
