"""Reads layers of other libraries that override ``forward`` but still convolve with some kernel.

Weight standardisation shifts the rows of the weight to mean zero, scales them to variance one, and convolves with the
result. The readers here return that kernel, differentiable in the weight and the gain, so ``A``, its adjoint and its
Lipschitz constant describe what the layer applies. The layer itself still computes ``A u + b``.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from solver_plugins.errors import UnsupportedLayerError
from solver_plugins.operators.geometry import Geometry
from solver_plugins.operators.layers import register_layer


def standardized(weight: Tensor, eps: float, gain: Tensor | None = None) -> Tensor:
    """Returns ``gain_o (w_o - mean w_o) / sqrt(var w_o + eps)`` for every output feature ``o``, as timm computes it.

    The variance is the biased one; ``gain`` has one number per output feature, in any shape.
    """
    rows = weight.reshape(1, weight.shape[0], -1)
    scale = None if gain is None else gain.reshape(-1)
    return functional.batch_norm(rows, None, None, scale, None, True, 0.0, eps).reshape(weight.shape)


def _geometry(conv: Any, dynamic: bool) -> Geometry:
    """Returns the geometry of a convolution that pads with zeros: its own amounts, or TensorFlow's SAME."""
    if dynamic:
        if any(_sides(conv)):
            raise UnsupportedLayerError(
                f"{type(conv).__qualname__} pads twice: dynamically, and by padding={conv.padding}. "
                "Expected one of the two."
            )
        return Geometry(tuple(conv.stride), "same_dynamic", tuple(conv.dilation), conv.groups)
    return Geometry.for_conv(conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups)


def _sides(conv: Any) -> tuple[int, ...]:
    """Returns the amount per dimension by which a convolution itself pads both sides."""
    if isinstance(conv.padding, str):
        raise UnsupportedLayerError(
            f"{type(conv).__qualname__} pads its input, and again by padding={conv.padding!r}. Expected numbers."
        )
    return tuple(conv.padding)


def _read_standardized(layer: nn.Module) -> tuple[Tensor, Geometry]:
    """Reads timm's ``StdConv2d`` and ``StdConv2dSame``."""
    conv: Any = layer
    return standardized(conv.weight, conv.eps), _geometry(conv, getattr(conv, "same_pad", False))


def _read_scaled(layer: nn.Module) -> tuple[Tensor, Geometry]:
    """Reads timm's ``ScaledStdConv2d`` and ``ScaledStdConv2dSame``: a gain per output channel on top."""
    conv: Any = layer
    kernel = standardized(conv.weight, conv.eps, conv.gain * conv.scale)
    return kernel, _geometry(conv, getattr(conv, "same_pad", False))


def _read_bit(layer: nn.Module) -> tuple[Tensor, Geometry]:
    """Reads transformers' ``WeightStandardizedConv2d``, whose dynamic padding is a module."""
    conv: Any = layer
    return standardized(conv.weight, conv.eps), _geometry(conv, conv.pad is not None)


def _read_zero_padded(layer: nn.Module) -> tuple[Tensor, Geometry]:
    """Reads Perceiver's ``Conv2dSamePadding``: a module pads with zeros, then torch convolves."""
    conv: Any = layer
    if conv.padding_mode != "zeros":
        raise UnsupportedLayerError(f"{type(conv).__qualname__} pads with zeros and with {conv.padding_mode!r}.")
    left, right, top, bottom = conv.zero_pad_2d.padding
    high, wide = _sides(conv)
    pairs = ((top + high, bottom + high), (left + wide, right + wide))
    return conv.weight, Geometry(tuple(conv.stride), pairs, tuple(conv.dilation), conv.groups)


for _name in ("StdConv2d", "StdConv2dSame"):
    register_layer(f"timm.layers.std_conv.{_name}", _read_standardized)
    register_layer(f"timm.layers.std_conv.Scaled{_name}", _read_scaled)
register_layer("transformers.models.bit.modeling_bit.WeightStandardizedConv2d", _read_bit)
register_layer("transformers.models.perceiver.modeling_perceiver.Conv2dSamePadding", _read_zero_padded)
