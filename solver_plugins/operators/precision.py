"""Whether values may be read, and in which dtype products are computed.

Reading a value stalls an accelerator, and under a transform there are no values.
"""

import contextlib

import torch
from torch import Tensor

from solver_plugins.errors import ShapeError


def is_eager(device: torch.device) -> bool:
    """Whether reading a value costs nothing: on the CPU, and not compiled, traced or transformed."""
    return (
        device.type == "cpu"
        and not torch.compiler.is_compiling()
        and torch._C._get_tracing_state() is None
        and not torch._C._are_functorch_transforms_active()
        and not is_faked()
    )


def is_faked() -> bool:
    """Whether a FakeTensorMode is active, in which every result is a shape without values."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


_AUTOCAST = frozenset(
    kind for kind in ("cpu", "cuda", "mps", "xpu", "hpu", "mtia", "maia") if torch.amp.is_autocast_available(kind)
)
"""Kinds of devices with autocast; asked once, since the compiler of torch 2.10 cannot follow the question."""


def autocasts(device: torch.device) -> bool:
    """Whether autocast is on for a device; some devices, such as meta, have none."""
    return device.type in _AUTOCAST and torch.is_autocast_enabled(device.type)


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
