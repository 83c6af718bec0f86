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
    power_steps,
    start_vectors,
)
from solver_plugins.operators.tracking import follow, image_of, warm_steps
from tests.operators.references import fine_supremum, random_conv


def power_step(kernel, geometry, vectors, diagonal=None):
    quotients, steps = power_steps(kernel, geometry, vectors, 1, diagonal)
    return quotients[0], steps[0]


def stepped(kernel, geometry, steps, vectors=None, **options):
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
    estimate, vectors = stepped(kernel, geometry, 300)
    certified = float(lipschitz_constant(layer, tolerance=0.02))
    assert 0.6 * certified <= float(estimate) <= certified
    assert torch.isfinite(vectors).all()
    again, _ = power_step(kernel, geometry, vectors)
    assert float(again) == pytest.approx(float(estimate), rel=1e-6)


def test_linear_converges_to_the_norm():
    weight = torch.randn(7, 5, dtype=torch.float64)
    estimate, vectors = stepped(weight, Geometry(), 500)
    assert float(estimate) == pytest.approx(np.linalg.norm(weight.numpy(), 2) ** 2, rel=1e-9)
    assert vectors.shape == (1, 1, 7, 2)
    assert not vectors[..., 1].any()


def test_converges_to_the_maximum_on_the_coarse_grid():
    layer = random_conv(2, 4, 5, 3, groups=1)
    estimate, vectors = stepped(layer.weight, geometry_of(layer), 300)
    assert vectors.shape == (24, 1, 5, 2)
    assert float(estimate) == pytest.approx(fine_supremum(layer.weight, points=6), rel=0.01)


def test_grids():
    def shape(kernel_size, stride=1, groups=1):
        layer = random_conv(1, 2, 4, kernel_size, stride=stride, groups=groups)
        return tuple(start_vectors(layer.weight, geometry_of(layer)).shape)

    assert shape(1) == (1, 1, 4, 2)
    assert shape(2) == (2, 1, 4, 2)
    assert shape(3) == shape(5, 2) == (3, 1, 4, 2)
    assert shape(5, groups=2) == (5, 2, 2, 2)
    assert shape(7) == (7, 1, 4, 2)
    assert shape(31) == (33, 1, 4, 2)


@pytest.mark.parametrize("make", LAYERS)
def test_follows_a_change_of_scale_at_once(make):
    layer = make()
    kernel, geometry = kernel_of(layer).detach(), geometry_of(layer)
    estimate, vectors = stepped(kernel, geometry, 200)
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
    scaled, _ = stepped(layer.weight * diagonal[:, None, None, None], geometry, 5)
    estimate, _ = stepped(layer.weight, geometry, 5, diagonal=diagonal)
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
    torch.testing.assert_close(torch.linalg.vector_norm(vectors, dim=(2, 3)), torch.ones(24, 2))
    flat = vectors.flatten(0, 1).flatten(1).double()
    # No two are nearly parallel, and none is nearly constant.
    products = (flat @ flat.T - torch.eye(48)).abs()
    assert float(products.amax()) < 0.5
    assert float(flat.mean(1).abs().amax()) < 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_runs_in_float32_whatever_autocast_says(dtype):
    layer = nn.Conv2d(4, 6, 3).to(dtype)
    geometry = geometry_of(layer)
    with torch.autocast("cpu", torch.bfloat16):
        estimate, vectors = stepped(layer.weight, geometry, 100)
    assert estimate.dtype == vectors.dtype == torch.float32
    assert not estimate.requires_grad
    reference, _ = stepped(layer.weight.double(), geometry, 100)
    assert float(estimate) == pytest.approx(float(reference), rel=1e-4)


@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e18])
@pytest.mark.parametrize("make", LAYERS)
def test_an_estimate_scales_with_the_weights(make, scale):
    layer = make()
    geometry, kernel = geometry_of(layer), kernel_of(layer).detach().float()
    _, vectors = stepped(kernel, geometry, 2)
    for diagonal in (None, torch.rand(len(kernel)) + 0.5):
        expected = float(follow(kernel, geometry, vectors, diagonal)[0])
        found = follow(kernel, geometry, vectors, None if diagonal is None else scale * diagonal)[0]
        if diagonal is None:
            found = follow(scale * kernel, geometry, vectors)[0]
        assert float(found) / scale / scale == pytest.approx(expected, rel=1e-5)


def test_an_image_tells_any_change():
    kernel = torch.randn(6, 3, 5, 5)
    image = image_of(kernel)
    assert image.shape == (6,) and torch.equal(image, image_of(kernel.clone()))
    for row in range(6):
        moved = kernel.clone()
        moved[row, 1, 2, 3] += 1e-4
        assert torch.equal(image != image_of(moved), torch.arange(6) == row)
    with torch.inference_mode():
        image_of(torch.randn(6, 1234))
    image_of(torch.randn(6, 1234, requires_grad=True)).sum()
    assert image_of(kernel.bfloat16()).dtype == torch.float32


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
    _, vectors = stepped(weight, geometry, 60)
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
    found = [warm_steps(weight, Geometry(), start, at_hand, one) for at_hand in (True, False) for one in (None, gram)]
    _, v = power_step(weight, Geometry(), start)
    second, v = power_step(weight, Geometry(), v)
    for steps in found:
        assert float(steps.second) == pytest.approx(float(second), rel=1e-9)
        assert float(steps.largest) == pytest.approx(float(gram.diagonal().amax()))
        mixed = steps.vectors[0, 0, :, 0]
        assert float(mixed.norm()) == pytest.approx(1)
        assert 0 < float((mixed - v[0, 0, :, 0]).norm()) < 0.04
        assert float(steps.third) == pytest.approx(float((gram @ mixed).norm()), rel=1e-9)


def test_warm_steps_of_weights_of_zero():
    weight = torch.zeros(4, 3)
    for at_hand in (True, False):
        steps = warm_steps(weight, Geometry(), start_vectors(weight, Geometry()), at_hand)
        assert [*map(float, steps[:3])] == [0, 0, 0] and torch.isfinite(steps.vectors).all()
