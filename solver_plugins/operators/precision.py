"""Casts between dtypes, and the scale per output feature."""

import contextlib

import torch
from torch import Tensor

from solver_plugins.errors import ShapeError


def autocasts(device: torch.device) -> bool:
    """Whether autocast is on for a device; some devices, such as meta, have none."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def match_dtype(x: Tensor, weight: Tensor) -> Tensor:
    """Returns ``x`` in the weight's dtype, as the layer needs it; under autocast, autocast decides."""
    if x.dtype == weight.dtype or autocasts(x.device):
        return x
    return x.to(weight.dtype)


def product_dtype(weight: Tensor) -> torch.dtype:
    """Returns the dtype of products with a weight, which is the dtype of the plain layer's output."""
    # Autocast does not change float64.
    lowered = autocasts(weight.device) and weight.dtype != torch.float64
    return torch.get_autocast_dtype(weight.device.type) if lowered else weight.dtype


def scale_rows(x: Tensor, diagonal: Tensor | None, dims: int) -> Tensor:
    """Returns ``diag(d) x`` in the dtype of ``x``, for features followed by ``dims`` dimensions of space."""
    if diagonal is None:
        return x
    # The product is rounded once, to x's dtype, even if d has more precision.
    return (x * diagonal.reshape(diagonal.shape + (1,) * dims)).to(x.dtype)


def scaled_kernel(kernel: Tensor, diagonal: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the kernel of ``diag(d) A`` in at least ``dtype``."""
    dtype = torch.promote_types(kernel.dtype, dtype)
    kernel = kernel.to(dtype)
    if diagonal is None:
        return kernel
    return kernel * diagonal.to(dtype).reshape((-1,) + (1,) * (kernel.ndim - 1))


def check_diagonal(diagonal: Tensor | None, features: int) -> None:
    """Raises a :class:`ShapeError` unless the diagonal has one number per output feature."""
    if diagonal is not None and (diagonal.ndim != 1 or diagonal.shape[0] != features):
        raise ShapeError(f"Expected a diagonal of shape ({features},); found {tuple(diagonal.shape)}.")


def autocast_off(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Returns a context without autocast."""
    if autocasts(device):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()
