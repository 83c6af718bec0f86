import pytest
import timm.layers
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from solver_plugins.errors import DuplicateNameError, OptionError, ShapeError, UnsupportedLayerError
from solver_plugins.operators import Geometry, geometry_of, kernel_of, operator_for, register_layer

# torch warns once of its own slow path for even kernels.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


def test_normalises_torch_arguments():
    geometry = Geometry.for_conv((3, 4), 2, (1, 0), 2, 4, "circular")
    assert geometry == Geometry((2, 2), ((1, 1), (0, 0)), (2, 2), 4, "circular")
    assert Geometry.for_conv((3, 4), padding="same").padding == ((1, 1), (1, 2))
    assert Geometry.for_conv((3, 4), padding="valid").padding == ((0, 0), (0, 0))
    assert Geometry.for_conv(3, dims=3).stride == (1, 1, 1)
    assert Geometry().dims == 0


@pytest.mark.parametrize(
    "arguments",
    [
        {"kernel_size": 3, "stride": 0},
        {"kernel_size": 0},
        {"kernel_size": 3, "dilation": 0},
        {"kernel_size": 3, "groups": 0},
        {"kernel_size": 3, "padding": -1},
        {"kernel_size": 3, "padding": "sam"},
        {"kernel_size": 3, "padding": "same", "stride": 2},
        {"kernel_size": 3, "padding_mode": "mirror"},
        {"kernel_size": (3, 3), "stride": (1, 2, 3)},
        {"kernel_size": 3, "stride": 1.5},
    ],
)
def test_refuses_arguments(arguments):
    with pytest.raises(OptionError):
        Geometry.for_conv(**arguments)


def test_refuses_inconsistent_fields():
    with pytest.raises(OptionError):
        Geometry((1,), ((0, 0), (0, 0)), (1,))
    with pytest.raises(OptionError):
        Geometry((1,), "same_dynamic", (1,), padding_mode="circular")
    with pytest.raises(OptionError, match="input_size"):
        Geometry((1,), "same_dynamic", (1,)).padding_for((3,))


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("padding", [0, 2, "same"])
def test_output_size_is_that_of_torch(dims, padding):
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](2, 2, 4, 1 if padding == "same" else 3, padding, 1)
    size = (10, 9, 8)[:dims]
    geometry = geometry_of(conv)
    assert geometry.output_size(kernel_of(conv).shape[2:], size) == tuple(conv(torch.zeros(1, 2, *size)).shape[2:])


def test_too_small_inputs():
    with pytest.raises(ShapeError, match="at least 5"):
        Geometry.for_conv(5).output_size((5,), (4,))
    with pytest.raises(ShapeError, match="reflect"):
        Geometry.for_conv(3, padding=3, padding_mode="reflect").output_size((3,), (3,))
    with pytest.raises(ShapeError, match="circular"):
        Geometry.for_conv(3, padding=3, padding_mode="circular").output_size((3,), (2,))


def test_reads_every_supported_layer():
    assert geometry_of(nn.Linear(2, 3)) == Geometry()
    conv1d = Conv1D(5, 3)
    assert geometry_of(conv1d) == Geometry()
    assert torch.equal(kernel_of(conv1d), conv1d.weight.T)
    same = timm.layers.Conv2dSame(2, 3, 3, 2)
    assert geometry_of(same) == Geometry((2, 2), "same_dynamic", (1, 1))
    assert kernel_of(same) is same.weight
    assert geometry_of(nn.Conv3d(2, 4, 3, 2, 1, groups=2)).groups == 2


def test_reads_subclasses_that_keep_their_forward():
    class Named(nn.Linear):
        pass

    assert kernel_of(Named(2, 3)).shape == (3, 2)
    assert kernel_of(timm.layers.linear.Linear(2, 3)).shape == (3, 2)
    layer = nn.Conv2d(2, 3, 3, dtype=torch.float64)
    torch.nn.utils.parametrizations.spectral_norm(layer.eval())
    u = torch.randn(1, 2, 6, 6, dtype=torch.float64)
    expected = layer(u) - layer.bias[:, None, None]
    assert torch.allclose(operator_for(layer, u.shape).apply(u), expected)


def test_refuses_subclasses_with_a_forward_of_their_own():
    class Hidden(nn.Conv2d):
        def _conv_forward(self, input, weight, bias):
            return super()._conv_forward(input, 2 * weight, bias)

    with pytest.raises(UnsupportedLayerError, match="with its own forward"):
        kernel_of(Hidden(2, 3, 3))


def test_refuses_other_layers():
    with pytest.raises(UnsupportedLayerError, match=r"Transposed convolutions are not supported.*torch\.nn\.Linear"):
        kernel_of(nn.ConvTranspose2d(2, 3, 3))
    with pytest.raises(UnsupportedLayerError, match="Conv2dSame"):
        geometry_of(nn.LayerNorm(3))
    with pytest.raises(UnsupportedLayerError, match="forward pass first"):
        kernel_of(nn.LazyLinear(3))


def test_registered_layers_are_read():
    class Doubled(nn.Linear):
        def forward(self, u):
            return nn.functional.linear(u, 2 * self.weight, self.bias)

    def reader(layer):
        return 2 * layer.weight, Geometry()

    register_layer(Doubled, reader)
    register_layer(Doubled, reader)
    layer = Doubled(3, 4, bias=False)
    u = torch.randn(5, 3)
    assert torch.allclose(operator_for(layer, u.shape).apply(u), layer(u))
    with pytest.raises(DuplicateNameError):
        register_layer(Doubled, lambda layer: (layer.weight, Geometry()))
    with pytest.raises(DuplicateNameError):
        register_layer("torch.nn.modules.linear.Linear", reader)
