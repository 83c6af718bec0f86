import math

import hypothesis
import numpy as np
import pytest
import timm.layers
import torch
from hypothesis import strategies as st
from torch import nn
from transformers.pytorch_utils import Conv1D

from solver_plugins.errors import OptionError, ShapeError, UnsupportedLayerError, WeightError
from solver_plugins.operators import Geometry, geometry_of, lipschitz_constant, lipschitz_from_kernel, rescaled_bound
from solver_plugins.operators.krylov import largest_eigenvalue
from tests.operators.references import dense_matrix, fine_supremum, norm_sq, random_conv

MODES = ("zeros", "circular", "reflect", "replicate")
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


def kernel_1d(*taps: float) -> torch.Tensor:
    return torch.tensor(taps, dtype=torch.float64).reshape(1, 1, -1)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("stride, dilation, padding", [(1, 1, 1), (2, 1, 1), (1, 2, "same"), (2, 3, 2), (3, 1, 0)])
@pytest.mark.parametrize("mode", MODES)
def test_exact_is_the_dense_norm(stride, dilation, padding, groups, mode):
    layer = random_conv(2, 4, 2, 2, stride=stride, dilation=dilation, padding=padding, groups=groups, padding_mode=mode)
    truth = norm_sq(dense_matrix(layer, (4, 6, 7)))
    assert float(lipschitz_constant(layer, "exact", (6, 7))) == pytest.approx(truth, rel=1e-10)


@pytest.mark.parametrize("dims", [1, 3])
def test_exact_in_other_dimensions(dims):
    layer = random_conv(dims, 2, 3, 3, padding=1, stride=2)
    size = (5, 4, 3)[:dims]
    assert float(lipschitz_constant(layer, "exact", size)) == pytest.approx(norm_sq(dense_matrix(layer, (2, *size))))


def test_exact_of_large_operators_by_lanczos():
    layer = random_conv(2, 6, 5, 3, padding=1)
    truth = norm_sq(dense_matrix(layer, (6, 14, 15)))
    assert float(lipschitz_constant(layer, "exact", (14, 15))) == pytest.approx(truth, rel=1e-9)
    linear = nn.Linear(900, 800, dtype=torch.float64)
    assert float(lipschitz_constant(linear, "exact")) == pytest.approx(norm_sq(linear.weight), rel=1e-9)


def test_lanczos_on_special_spectra():
    values = torch.cat(
        [torch.linspace(0, 1, 300, dtype=torch.float64), torch.full((2,), 1 + 1e-6, dtype=torch.float64)]
    )
    start = torch.ones(302, dtype=torch.float64)
    assert float(largest_eigenvalue(lambda v: values * v, start)) == pytest.approx(1 + 1e-6, rel=1e-9)
    assert float(largest_eigenvalue(lambda v: 0 * v, start)) == 0.0
    assert float(largest_eigenvalue(lambda v: 3 * v, start)) == pytest.approx(3.0)


@st.composite
def kernels(draw):
    """A small layer, often with a kernel whose top frequency is not on any grid, and an input size for it."""
    dims = draw(st.sampled_from([1, 1, 2]))
    groups = draw(st.sampled_from([1, 2]))
    size = tuple(draw(st.integers(1, 12 if dims == 1 else 6)) for _ in range(dims))
    layer = random_conv(
        dims,
        groups * draw(st.integers(1, 2)),
        groups * draw(st.integers(1, 2)),
        tuple(draw(st.integers(1, 4)) for _ in range(dims)),
        stride=tuple(draw(st.integers(1, 3)) for _ in range(dims)),
        dilation=tuple(draw(st.integers(1, 3)) for _ in range(dims)),
        padding=tuple(draw(st.integers(0, 4)) for _ in range(dims)),
        groups=groups,
        padding_mode=draw(st.sampled_from(MODES)),
    )
    taps = draw(st.lists(st.integers(-2, 2), min_size=layer.weight.numel(), max_size=layer.weight.numel()))
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(taps, dtype=torch.float64).reshape(layer.weight.shape))
    try:
        geometry_of(layer).output_size(layer.weight.shape[2:], size)
    except ShapeError:
        hypothesis.assume(False)
    return layer, size


@hypothesis.given(kernels())
@hypothesis.settings(max_examples=300, suppress_health_check=list(hypothesis.HealthCheck))
def test_certified_is_never_too_small(case):
    layer, size = case
    truth = norm_sq(dense_matrix(layer, (layer.in_channels, *size)))
    for input_size in (None, size):
        bound = float(lipschitz_constant(layer, input_size=input_size))
        assert bound >= truth - 1e-12 * truth
        assert float(lipschitz_constant(layer, input_size=input_size, tolerance=1.0)) >= truth - 1e-12 * truth


@pytest.mark.parametrize("size", range(1, 15))
def test_certified_for_all_sizes_of_the_difference_kernel(size):
    layer = random_conv(1, 1, 1, 3, padding=1)
    with torch.no_grad():
        layer.weight.copy_(kernel_1d(1, 0, -1))
    assert norm_sq(dense_matrix(layer, (1, size))) <= float(lipschitz_constant(layer, tolerance=0.02)) <= 4 * 1.02


@pytest.mark.parametrize("size", [(7, 7), (8, 5)])
def test_certified_for_dynamic_same(size):
    layer = timm.layers.Conv2dSame(3, 4, 3, 2).double()
    assert float(lipschitz_constant(layer)) >= norm_sq(dense_matrix(layer, (3, *size)))
    exact = float(lipschitz_constant(layer, "exact", size))
    assert exact == pytest.approx(norm_sq(dense_matrix(layer, (3, *size))))


def test_wrap_around_with_a_stride():
    geometry = Geometry.for_conv(2, 2, (1,), padding_mode="circular")
    kernel = kernel_1d(1, 1)
    truth = float(lipschitz_from_kernel(kernel, geometry, "exact", (3,)))
    assert truth > 2.5
    assert float(lipschitz_from_kernel(kernel, geometry)) >= truth
    assert float(lipschitz_from_kernel(kernel, geometry, input_size=(3,))) >= truth


@pytest.mark.parametrize("tolerance", [0.1, 0.02])
@pytest.mark.parametrize("mode", ["zeros", "circular"])
@pytest.mark.parametrize("inputs, outputs", [(3, 4), (5, 2), (20, 30)])
def test_certified_is_tight(inputs, outputs, mode, tolerance):
    layer = random_conv(2, inputs, outputs, 3, padding=1, padding_mode=mode)
    points = 96 if inputs < 10 else 24
    supremum = fine_supremum(layer.weight, points=points)
    bound = float(lipschitz_constant(layer, tolerance=tolerance))
    # The reference grid is itself up to 0.1% (1.7% for the coarser one) below the supremum.
    assert supremum <= bound <= supremum * (1 + tolerance) * (1.003 if points == 96 else 1.035)


@pytest.mark.parametrize("dims, stride, dilation, kernel", [(1, 2, 1, 5), (1, 3, 2, 4), (2, 2, 1, 3), (1, 2, 4, 3)])
def test_certified_of_strides_and_dilations(dims, stride, dilation, kernel):
    layer = random_conv(dims, 4, 6, kernel, stride=stride, dilation=dilation, groups=2)
    reduced = stride // math.gcd(stride, dilation)
    supremum = fine_supremum(layer.weight, reduced, 2, points=300 if dims == 1 else 40)
    bound = float(lipschitz_constant(layer, tolerance=0.02))
    assert supremum <= bound <= 1.03 * supremum
    if dims == 1:
        # The supremum is approached by large inputs: stride and dilation are read right.
        assert float(lipschitz_constant(layer, "exact", (360,))) >= 0.97 * supremum


@pytest.mark.parametrize("shape", [(5, 7), (40, 3), (600, 300)])
def test_certified_linear(shape):
    layer = nn.Linear(*shape, dtype=torch.float64)
    truth = norm_sq(layer.weight)
    bound = float(lipschitz_constant(layer))
    assert truth <= bound <= truth * (1 + (1e-9 if min(shape) <= 256 else 1e-2))
    half = layer.float()
    assert norm_sq(half.weight.double()) <= float(lipschitz_constant(half))


def test_zero_padding_can_exceed_the_circular_norm():
    zero = Geometry.for_conv(3, 1, 1)
    circular = Geometry.for_conv(3, 1, 1, padding_mode="circular")
    kernel = kernel_1d(1, 0, -1)
    assert math.sqrt(lipschitz_from_kernel(kernel, circular, "exact", (6,))) == pytest.approx(1.732, abs=1e-3)
    assert math.sqrt(lipschitz_from_kernel(kernel, zero, "exact", (6,))) == pytest.approx(1.802, abs=1e-3)
    for geometry in (zero, circular):
        assert 2 <= math.sqrt(lipschitz_from_kernel(kernel, geometry)) <= 2 * math.sqrt(1.1)


def test_lemma_2_for_circular_padding():
    layer = random_conv(2, 3, 4, 3, padding=1, padding_mode="circular")
    symbol = np.fft.fft2(layer.weight.detach().numpy(), s=(6, 7))
    equation_6 = max(np.linalg.norm(symbol[:, :, i, j], 2) ** 2 for i in range(6) for j in range(7))
    assert float(lipschitz_constant(layer, "exact", (6, 7))) == pytest.approx(equation_6)


def test_a_reshaped_kernel_has_another_norm():
    layer = random_conv(2, 8, 8, 3, padding=1)
    with torch.no_grad():
        layer.weight.copy_(layer.weight.abs())
    reshaped = norm_sq(layer.weight.flatten(1))
    assert float(lipschitz_constant(layer, "exact", (12, 12))) > 2 * reshaped


@pytest.mark.parametrize("mode", MODES)
def test_power_is_a_lower_bound_that_converges(mode):
    layer = random_conv(2, 3, 4, 3, stride=2, padding=1, padding_mode=mode)
    state = torch.get_rng_state()
    truth = float(lipschitz_constant(layer, "exact", (9, 8)))
    estimate = float(lipschitz_constant(layer, "power", (9, 8), tolerance=1e-3))
    assert 0.999 * truth <= estimate <= truth * (1 + 1e-12)
    assert float(lipschitz_constant(layer, "power")) <= float(lipschitz_constant(layer))
    assert torch.equal(state, torch.get_rng_state())
    assert float(lipschitz_constant(layer, "power", (9, 8), tolerance=1e-3)) == estimate


@pytest.mark.parametrize("method", ["certified", "exact", "power"])
@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 5), lambda: nn.Conv2d(4, 5, 3, 2), lambda: Conv1D(5, 4)])
def test_diagonal(make, method):
    layer = make().double()
    diagonal = torch.rand(5, dtype=torch.float64) + 0.1
    scaled = make().double()
    with torch.no_grad():
        shape = (1, 5) if isinstance(layer, Conv1D) else (5, *[1] * (layer.weight.ndim - 1))
        scaled.weight.copy_(layer.weight * diagonal.reshape(shape))
    size = (6, 7) if layer.weight.ndim == 4 else None
    actual = lipschitz_constant(layer, method, size, diagonal)
    assert float(actual) == pytest.approx(float(lipschitz_constant(scaled, method, size)), rel=1e-9)


def test_rescaled_bound():
    weight = torch.randn(6, 4, dtype=torch.float64)
    reference, diagonal = torch.rand(6, dtype=torch.float64) + 0.1, torch.rand(6, dtype=torch.float64)
    bound = lipschitz_from_kernel(weight, Geometry(), diagonal=reference)
    assert float(rescaled_bound(bound, diagonal, reference)) >= norm_sq(diagonal[:, None] * weight)
    assert float(rescaled_bound(bound, 2 * reference, reference)) == pytest.approx(4 * float(bound))
    reference[0] = 0
    assert math.isinf(rescaled_bound(bound, diagonal, reference))
    diagonal[0] = 0
    assert math.isfinite(rescaled_bound(bound, diagonal, reference))


@pytest.mark.parametrize("method", ["certified", "exact", "power"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dtypes_and_zero_weights(dtype, method):
    layer = nn.Conv2d(3, 4, 3, padding=1).to(dtype)
    value = lipschitz_constant(layer, method, (5, 5))
    assert value.shape == () and not value.requires_grad
    assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    truth = norm_sq(dense_matrix(layer.double(), (3, 5, 5)))
    assert float(value) >= truth if method == "certified" else float(value) <= truth * (1 + 1e-6)
    nn.init.zeros_(layer.weight)
    assert float(lipschitz_constant(layer, method, (5, 5))) == 0.0


def test_extreme_scales():
    weight = torch.randn(4, 3, 3)
    geometry = Geometry.for_conv(3)
    base = float(lipschitz_from_kernel(weight.double(), geometry))
    assert float(lipschitz_from_kernel(weight.double() * 1e-100, geometry)) == pytest.approx(base * 1e-200, rel=1e-9)
    assert float(lipschitz_from_kernel(weight * 1e-30, geometry)) > 0
    with pytest.raises(WeightError, match=r"finite in torch\.float32"):
        lipschitz_from_kernel(weight * 1e25, geometry)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_refuses_weights(bad):
    layer = nn.Linear(3, 4)
    with torch.no_grad():
        layer.weight[0, 0] = bad
    with pytest.raises(WeightError, match="1 of 12"):
        lipschitz_constant(layer)
    with pytest.raises(WeightError, match="int8"):
        lipschitz_from_kernel(torch.ones(3, 2, dtype=torch.int8), Geometry())
    with pytest.raises(WeightError, match="meta"):
        lipschitz_constant(nn.Linear(3, 4, device="meta"))
    with pytest.raises(WeightError, match="diagonal"):
        lipschitz_constant(nn.Linear(3, 2), diagonal=torch.tensor([1.0, bad]))


def test_refuses_options():
    conv = nn.Conv2d(3, 4, 3)
    with pytest.raises(OptionError, match=r"certified, exact, power"):
        lipschitz_constant(conv, "certfied")
    with pytest.raises(OptionError, match="input_size"):
        lipschitz_constant(conv, "exact")
    with pytest.raises(OptionError, match="tolerance"):
        lipschitz_constant(conv, tolerance=0)
    with pytest.raises(ShapeError):
        lipschitz_constant(conv, "exact", (2, 2))
    with pytest.raises(UnsupportedLayerError):
        lipschitz_constant(nn.ReLU())


def test_unaffected_by_autocast():
    layer = nn.Conv2d(3, 4, 3)
    with torch.autocast("cpu", torch.bfloat16):
        inside = [lipschitz_constant(layer, method, (6, 6)) for method in ("certified", "exact", "power")]
    outside = [lipschitz_constant(layer, method, (6, 6)) for method in ("certified", "exact", "power")]
    assert [float(value) for value in inside] == [float(value) for value in outside]


@pytest.mark.parametrize("scale", [1e-17, 1e-12, 1e10, 1e18])
def test_power_whatever_the_size_of_the_weights(scale):
    torch.manual_seed(0)
    for layer in (nn.Linear(20, 30), nn.Conv2d(3, 4, 3)):
        layer.weight.data.mul_(scale)
        found = lipschitz_constant(layer, method="power", input_size=(8, 8))
        exact = lipschitz_constant(layer, method="exact", input_size=(8, 8))
        assert 0.95 < float(found / exact) < 1.001
