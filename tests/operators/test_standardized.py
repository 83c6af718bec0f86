"""Layers that override forward: the kernel that is read is the one that the real layer applies."""

import pickle
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from timm.layers.std_conv import ScaledStdConv2d, ScaledStdConv2dSame, StdConv2d, StdConv2dSame
from torch import Tensor, nn
from transformers.models.bit.modeling_bit import WeightStandardizedConv2d
from transformers.models.perceiver.modeling_perceiver import Conv2dSamePadding

from solver_plugins import SolverBlock, lipschitz_constant
from solver_plugins.errors import UnsupportedLayerError
from solver_plugins.operators import geometry_of, kernel_of, operator_for
from tests.operators.references import dense_matrix, norm_sq
from tests.tolerances import tolerance

SIZES = [(6, 6), (5, 7)]
MAKERS: dict[str, Callable[[], nn.Module]] = {
    "std": lambda: StdConv2d(4, 6, 3, bias=True),
    "std-strided": lambda: StdConv2d(4, 6, 3, stride=2, groups=2),
    "std-same": lambda: StdConv2dSame(4, 6, 3, stride=2, bias=True),
    "std-same-static": lambda: StdConv2dSame(4, 6, 3, stride=1),
    "std-same-dilated": lambda: StdConv2dSame(4, 6, 2, stride=3, dilation=2),
    "scaled": lambda: ScaledStdConv2d(4, 6, 3, gamma=1.7),
    "scaled-grouped": lambda: ScaledStdConv2d(4, 6, (3, 1), stride=2, groups=2, padding=1, bias=False),
    "scaled-same": lambda: ScaledStdConv2dSame(4, 6, 3, stride=2, gamma=1.7, eps=1e-3),
    "scaled-same-static": lambda: ScaledStdConv2dSame(4, 6, 5),
    "bit": lambda: WeightStandardizedConv2d(4, 6, 3, stride=2, bias=True, eps=1e-3),
    "bit-static": lambda: WeightStandardizedConv2d(4, 6, 3),
    "bit-padded": lambda: WeightStandardizedConv2d(4, 6, 3, padding=2, stride=2),
    "perceiver": lambda: Conv2dSamePadding(4, 6, (4, 3), stride=2),
    "perceiver-padded": lambda: Conv2dSamePadding(4, 6, 3, padding=(1, 0), dilation=2),
}


def made(name: str) -> nn.Module:
    layer = MAKERS[name]().double()
    with torch.no_grad():
        layer.weight.add_(0.3)  # so that the mean matters
        for extra in (layer.bias, getattr(layer, "gain", None)):
            if extra is not None:
                extra.copy_(torch.randn_like(extra))
    return layer


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", MAKERS)
def test_the_operator_is_the_matrix_that_the_layer_applies(name: str, size: tuple[int, int]) -> None:
    layer = made(name)
    matrix = dense_matrix(layer, (4, *size))
    operator = operator_for(layer, (4, *size))
    eye = torch.eye(matrix.shape[1], dtype=torch.float64)
    applied = operator.apply(eye.reshape(-1, 4, *size)).flatten(1).T
    torch.testing.assert_close(applied, matrix, **tolerance(torch.float64)._asdict())
    x = torch.randn(matrix.shape[0], dtype=torch.float64)
    shape = (6, *geometry_of(layer).output_size(layer.kernel_size, size))
    torch.testing.assert_close(operator.adjoint(x.reshape(shape)).flatten(), matrix.T @ x)
    assert norm_sq(matrix) <= float(lipschitz_constant(layer)) * (1 + 1e-9)


@pytest.mark.parametrize("name", [name for name in MAKERS if not name.startswith("perceiver")])
def test_gradients_reach_weight_and_gain(name: str) -> None:
    layer = made(name)
    parts = {key: value.detach().clone().requires_grad_() for key, value in layer.named_parameters() if key != "bias"}

    def kernel(*values: Tensor) -> Tensor:
        for key, value in zip(parts, values, strict=True):
            del layer._parameters[key]
            layer._parameters[key] = value  # type: ignore[assignment]
        return kernel_of(layer)

    assert list(parts) == (["weight", "gain"] if "scaled" in name else ["weight"])
    assert torch.autograd.gradcheck(kernel, tuple(parts.values()))


@pytest.mark.parametrize("name", MAKERS)
def test_one_iteration_is_the_layer_bit_for_bit(name: str) -> None:
    layer = made(name).float()
    u = torch.randn(2, 4, 6, 7)
    expected = layer(u)
    block = SolverBlock.from_layer(layer, "relu", "proxgd", 1)
    assert isinstance(block, type(layer)) and block.state_dict().keys() == layer.state_dict().keys()
    for mode in (True, False):
        assert torch.equal(block.train(mode)(u), expected)
    got = torch.autograd.grad(block(u).square().sum(), list(block.parameters()))
    for one, other in zip(got, torch.autograd.grad(layer(u).square().sum(), list(layer.parameters())), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["std-same", "scaled", "bit", "perceiver"])
def test_three_iterations_are_those_of_the_dense_matrix(name: str) -> None:
    layer, size = made(name), (5, 6)
    matrix = dense_matrix(layer, (4, *size))
    u = torch.randn(3, 4, *size, dtype=torch.float64)
    block = SolverBlock.from_layer(layer, "relu", "proxgd", 3)
    lam = block.solver.config.lam
    v = c = layer(u).flatten(1)
    for _ in range(2):
        x = v.relu()
        v = x - ((x @ matrix) @ matrix.T + lam * x) / (float(block.L) + lam) + c
    torch.testing.assert_close(block(u).flatten(1), v, **tolerance(torch.float64)._asdict())


@pytest.mark.parametrize("name", ["std", "scaled", "bit-static"])
def test_the_constant_follows_weights_that_are_not_the_kernel(name: str) -> None:
    layer = made(name)
    block = SolverBlock.from_layer(layer, "relu", "proxgd", 3)
    certified = float(block.L)
    # Standardisation forgets the scale of the weight, and keeps the gain's.
    block.load_state_dict({key: 7 * value for key, value in block.state_dict().items()})
    factor = 49 if "gain" in block._parameters else 1
    assert float(block.L) == pytest.approx(factor * certified, rel=1e-3)
    assert float(lipschitz_constant(layer)) == pytest.approx(float(block.L), rel=1e-6)  # the Parameters are shared
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn_like(parameter))
    u = torch.randn(2, 4, 6, 6, dtype=torch.float64)
    block.train()(u)
    truth = norm_sq(dense_matrix(layer, (4, 6, 6)))
    assert 0.9 * truth <= float(block.L)
    block.eval()
    assert truth <= float(block.L) <= 1.1 * 1.4 * truth  # 6x6 may be well below the supremum over sizes


@pytest.mark.parametrize("name", ["std-same", "scaled", "bit"])
def test_such_blocks_move_copy_and_initialise(name: str) -> None:
    block = SolverBlock.from_layer(made(name).float(), "relu", "proxgd", 3).eval()
    u = torch.randn(2, 4, 6, 6)
    expected = block(u)
    assert torch.equal(deepcopy(block)(u), expected)
    if name != "bit":  # whose padding holds a local function, so that the plain layer has no pickle
        assert torch.equal(pickle.loads(pickle.dumps(block))(u), expected)
    torch.testing.assert_close(block.to(torch.float64)(u.double()).float(), expected, rtol=1e-4, atol=1e-4)
    block.to(torch.bfloat16)
    assert block.L.dtype.itemsize >= 4
    difference = block(u.bfloat16()).float() - expected
    assert float(difference.detach().norm()) < 0.02 * float(expected.detach().norm())
    block.float().reset_parameters()
    assert float(block.L) == pytest.approx(float(lipschitz_constant(block)), rel=1e-6)


def test_layers_that_pad_twice_are_refused() -> None:
    layer = StdConv2dSame(4, 6, 3, stride=2)
    layer.padding = (1, 1)
    with pytest.raises(UnsupportedLayerError, match="pads twice"):
        kernel_of(layer)
    with pytest.raises(UnsupportedLayerError, match="Expected numbers"):
        kernel_of(Conv2dSamePadding(4, 6, 3, padding="same"))
    with pytest.raises(UnsupportedLayerError, match="reflect"):
        kernel_of(Conv2dSamePadding(4, 6, 3, padding_mode="reflect"))
