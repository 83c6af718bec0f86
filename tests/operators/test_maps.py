import hypothesis
import pytest
import timm.layers
import torch
from hypothesis import strategies as st
from torch import nn
from transformers.pytorch_utils import Conv1D

from solver_plugins.errors import ShapeError
from solver_plugins.operators import ConvMap, Geometry, LinearMap, geometry_of, operator_for, operator_from_kernel
from tests.operators.references import dense_matrix, random_conv
from tests.tolerances import tolerance

MODES = ("zeros", "circular", "reflect", "replicate")

# torch warns once of its own slow path for even kernels.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


def check(layer: nn.Module, u: torch.Tensor) -> None:
    """``A u`` is the layer without its bias, and ``<A u, x> = <u, A^T x>``."""
    operator = operator_for(layer, u.shape)
    out = operator.apply(u)
    bias = operator.per_feature(layer.bias)
    torch.testing.assert_close(out + bias, layer(u), rtol=1e-12, atol=1e-12)
    x = torch.randn_like(out)
    back = operator.adjoint(x)
    assert back.shape == u.shape
    assert operator.input_shape == u.shape[u.ndim - len(operator.problem_dims) :]
    assert operator.output_shape == out.shape[out.ndim - len(operator.problem_dims) :]
    torch.testing.assert_close((out * x).sum(), (u * back).sum(), rtol=1e-11, atol=1e-11)


@st.composite
def convolutions(draw, dims=None):
    dims = draw(st.integers(1, 3)) if dims is None else dims
    groups, mode = draw(st.sampled_from([1, 2])), draw(st.sampled_from(MODES))
    kernel = tuple(draw(st.integers(1, 4)) for _ in range(dims))
    stride = tuple(draw(st.integers(1, 3)) for _ in range(dims))
    dilation = tuple(draw(st.integers(1, 2)) for _ in range(dims))
    padding = (
        "same" if draw(st.booleans()) and set(stride) == {1} else tuple(draw(st.integers(0, 3)) for _ in range(dims))
    )
    layer = random_conv(
        dims,
        2 * groups,
        groups * draw(st.integers(1, 3)),
        kernel,
        stride=stride,
        dilation=dilation,
        padding=padding,
        groups=groups,
        padding_mode=mode,
    )
    size = tuple(draw(st.integers(1, 9 if dims < 3 else 6)) for _ in range(dims))
    try:
        geometry_of(layer).output_size(kernel, size)
    except ShapeError:
        hypothesis.assume(False)
    return layer, size


@hypothesis.given(convolutions(), st.sampled_from([(), (2,), (2, 3)]))
@hypothesis.settings(max_examples=150, suppress_health_check=[hypothesis.HealthCheck.filter_too_much])
def test_convolution_and_its_adjoint(case, batch):
    layer, size = case
    u = torch.randn(*batch, layer.in_channels, *size, dtype=torch.float64)
    if len(batch) < 2:
        check(layer, u)
    else:
        flat = operator_for(layer, u.shape).apply(u).flatten(0, 1)
        torch.testing.assert_close(flat, operator_for(layer, u.shape).apply(u.flatten(0, 1)))


@pytest.mark.parametrize("size", [(7, 8), (1, 1), (5, 12), (4, 3)])
@pytest.mark.parametrize("stride, dilation, groups, kernel", [(1, 1, 1, 3), (2, 1, 2, 3), (3, 2, 1, 2), (2, 2, 4, 5)])
def test_dynamic_same(size, stride, dilation, groups, kernel):
    layer = timm.layers.Conv2dSame(4, 8, kernel, stride, dilation=dilation, groups=groups).double()
    check(layer, torch.randn(2, 4, *size, dtype=torch.float64))


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
@pytest.mark.parametrize("kind", ["torch", "transformers"])
def test_linear(kind, batch):
    layer = (nn.Linear(4, 6) if kind == "torch" else Conv1D(6, 4)).double()
    u = torch.randn(*batch, 4, dtype=torch.float64)
    check(layer, u)
    operator = operator_for(layer, u.shape)
    assert isinstance(operator, LinearMap)
    if kind == "transformers":
        assert operator.weight.data_ptr() == layer.weight.data_ptr()


@pytest.mark.parametrize("mode", MODES)
def test_bit_for_bit(mode):
    layer = nn.Conv2d(3, 5, 3, 2, 1, bias=False, padding_mode=mode)
    u = torch.randn(2, 3, 9, 10)
    assert torch.equal(operator_for(layer, u.shape).apply(u), layer(u))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dims, padding, stride", [(1, 2, 2), (2, 1, 1), (2, "same", 1), (3, 1, 2)])
def test_dense_matrix(dims, padding, stride, mode):
    kernel = 2 if padding == "same" else 3
    layer = random_conv(dims, 2, 3, kernel, stride=stride, padding=padding, padding_mode=mode)
    size = (5, 4, 3)[:dims]
    matrix = dense_matrix(layer, (2, *size))
    operator = operator_for(layer, (2, *size))
    x = torch.randn(operator.output_shape, dtype=torch.float64)
    expected = (matrix.T @ x.flatten()).reshape(2, *size)
    torch.testing.assert_close(operator.adjoint(x), expected, **tolerance(torch.float64)._asdict())
    torch.testing.assert_close(
        operator.gram(x).flatten(), matrix @ matrix.T @ x.flatten(), **tolerance(torch.float64)._asdict()
    )


@pytest.mark.parametrize("make", [lambda: nn.Linear(3, 4), lambda: nn.Conv2d(3, 4, 3, 2, 1)])
def test_diagonal_scales_rows(make):
    layer = make().double()
    u = torch.randn(2, 3, *(6, 5)[: layer.weight.ndim - 2], dtype=torch.float64)
    diagonal = torch.randn(4, dtype=torch.float64)
    plain, scaled = operator_for(layer, u.shape), operator_for(layer, u.shape, diagonal=diagonal)
    out = scaled.apply(u)
    torch.testing.assert_close(out, plain.apply(u) * plain.per_feature(diagonal))
    x = torch.randn_like(out)
    torch.testing.assert_close((out * x).sum(), (u * scaled.adjoint(x)).sum())


@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_first_and_second_order(mode):
    geometry = Geometry.for_conv((3, 2), (2, 1), (1, 2), (1, 2), 1, mode)
    weight = torch.randn(2, 2, 3, 2, dtype=torch.float64, requires_grad=True)
    diagonal = torch.rand(2, dtype=torch.float64, requires_grad=True)
    u = torch.randn(1, 2, 4, 5, dtype=torch.float64, requires_grad=True)

    def gram(weight, diagonal, u):
        operator = operator_from_kernel(weight, geometry, u.shape, diagonal)
        return operator.adjoint(operator.apply(u))

    assert torch.autograd.gradcheck(gram, (weight, diagonal, u))
    assert torch.autograd.gradgradcheck(gram, (weight, diagonal, u))


def test_gradients_of_linear():
    def gram(weight, diagonal, u):
        operator = LinearMap(weight, diagonal)
        return operator.adjoint(operator.apply(u))

    arguments = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 2), (3,), (4, 2))]
    assert torch.autograd.gradcheck(gram, arguments)
    assert torch.autograd.gradgradcheck(gram, arguments)


@pytest.mark.parametrize("make", [lambda: nn.Linear(3, 4), lambda: nn.Conv2d(3, 4, 3, 1, 1)])
def test_dtypes(make):
    layer = make().bfloat16()
    u = torch.randn(2, 3, *(6, 5)[: layer.weight.ndim - 2])
    operator = operator_for(layer, u.shape, diagonal=torch.ones(4))
    out = operator.apply(u)
    assert out.dtype == torch.bfloat16
    assert operator.adjoint(out.float()).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        layer = layer.float()
        operator = operator_for(layer, u.shape)
        assert operator.apply(u).dtype == torch.bfloat16
        assert operator.adjoint(out.float()).dtype == torch.bfloat16


def test_interface():
    linear = operator_for(nn.Linear(3, 4), (2, 3))
    assert (linear.in_features, linear.out_features, linear.problem_dims, linear.feature_dim) == (3, 4, (-1,), -1)
    conv = operator_for(nn.Conv2d(6, 4, 3, groups=2), (6, 5, 5))
    assert (conv.in_features, conv.out_features, conv.problem_dims, conv.feature_dim) == (6, 4, (-3, -2, -1), -3)
    assert conv.inner(torch.ones(2, 4, 3, 3), torch.ones(2, 4, 3, 3)).tolist() == [[[[36.0]]], [[[36.0]]]]


@pytest.mark.parametrize(
    "call, expected",
    [
        (lambda: operator_for(nn.Linear(3, 4), (2, 5)), "3 features"),
        (lambda: operator_for(nn.Conv2d(3, 4, 3), (4, 5, 5)), "3 features"),
        (lambda: operator_for(nn.Conv2d(3, 4, 3), (5, 5)), "channels"),
        (lambda: operator_for(nn.Conv2d(3, 4, 3), (3, 2, 5)), "at least 3"),
        (lambda: operator_for(nn.Linear(3, 4), (3,)).apply(torch.ones(2)), r"\(\.\.\., 3\); found \(2,\)"),
        (lambda: operator_for(nn.Linear(3, 4), (3,)).adjoint(torch.ones(3)), r"\(\.\.\., 4\); found \(3,\)"),
        (lambda: operator_for(nn.Conv2d(3, 4, 3), (3, 5, 5)).apply(torch.ones(3, 5, 6)), "5, 5"),
        (lambda: operator_for(nn.Conv2d(3, 4, 3), (3, 5, 5)).adjoint(torch.ones(4, 5, 5)), "3, 3"),
        (lambda: operator_for(nn.Linear(3, 4), (3,), diagonal=torch.ones(3)), r"diagonal of shape \(4,\)"),
        (lambda: LinearMap(torch.ones(3)), r"\(n2, n1\)"),
        (lambda: ConvMap(torch.ones(3, 2), None, Geometry.for_conv(3), (4,)), "dimensions of space"),
        (lambda: ConvMap(torch.ones(3, 2, 3), None, Geometry.for_conv(3, groups=2), (4,)), "2 groups"),
    ],
)
def test_wrong_shapes(call, expected):
    with pytest.raises(ShapeError, match=expected):
        call()


@pytest.mark.parametrize(
    "stride, groups, mode", [(1, 1, "zeros"), (2, 1, "zeros"), (2, 2, "replicate"), (1, 2, "circular")]
)
def test_column_norms(stride, groups, mode):
    layer = random_conv(2, 4, 6, 3, stride=stride, padding=1, groups=groups, padding_mode=mode)
    diagonal = torch.rand(6, dtype=torch.float64) + 0.5
    size = (12, 12)
    bounds = operator_for(layer, (4, *size), diagonal=diagonal).column_norms_sq()
    assert bounds.shape == (4,)
    rows = diagonal.repeat_interleave(dense_matrix(layer, (4, *size)).shape[0] // 6)
    matrix = (rows[:, None] * dense_matrix(layer, (4, *size))).reshape(-1, 4, *size)
    for i in range(4):
        true = torch.linalg.matrix_norm(matrix[:, i].flatten(1), 2) ** 2
        assert true <= bounds[i]
        if mode != "replicate":
            assert bounds[i] <= 1.25 * true


def test_column_norms_of_linear_are_exact():
    layer = nn.Linear(3, 4, dtype=torch.float64)
    diagonal = torch.rand(4, dtype=torch.float64)
    norms = operator_for(layer, (3,), diagonal=diagonal).column_norms_sq()
    torch.testing.assert_close(norms, (diagonal[:, None] * layer.weight.detach()).square().sum(0))
    assert operator_for(nn.Conv2d(2, 3, 3).bfloat16(), (2, 4, 4)).column_norms_sq().dtype == torch.float32
    assert operator_for(nn.Conv2d(2, 3, 3, 2), (2, 4, 4), diagonal=torch.zeros(3)).column_norms_sq().tolist() == [
        0.0,
        0.0,
    ]


@pytest.mark.parametrize("mode", MODES)
def test_compiles_without_graph_breaks_for_all_sizes(mode):
    geometry = Geometry.for_conv(3, 2, 1, padding_mode=mode)
    weight = torch.randn(3, 2, 3, requires_grad=True)

    def gram(weight, u):
        operator = operator_from_kernel(weight, geometry, u.shape, torch.ones(3))
        return operator.adjoint(operator.apply(u))

    compiled = torch.compile(gram, fullgraph=True, backend="aot_eager")
    for size in (6, 9):
        u = torch.randn(2, 2, size)
        torch._dynamo.mark_dynamic(u, 2)
        torch.testing.assert_close(compiled(weight, u), gram(weight, u))
    (grad,) = torch.autograd.grad(compiled(weight, u).square().sum(), weight)
    (expected,) = torch.autograd.grad(gram(weight, u).square().sum(), weight)
    torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stride, mode", [(1, "zeros"), (2, "circular")])
def test_column_norms_compile(stride, mode):
    geometry = Geometry.for_conv((3, 3), stride, 1, padding_mode=mode)

    def norms(weight):
        return operator_from_kernel(weight, geometry, (2, 6, 7)).column_norms_sq()

    weight = torch.randn(3, 2, 3, 3)
    torch.testing.assert_close(torch.compile(norms, fullgraph=True, backend="eager")(weight), norms(weight))


def test_compiles_from_the_layer():
    layer = nn.Linear(3, 4)

    def gram(u):
        operator = operator_for(layer, u.shape)
        return operator.adjoint(operator.apply(u))

    u = torch.randn(2, 3)
    torch.testing.assert_close(torch.compile(gram, fullgraph=True, backend="aot_eager")(u), gram(u))
