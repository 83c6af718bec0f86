"""The Lipschitz constant of a layer: ``L = lambda_max(A A^T)`` (Lemma 2 of the paper; add ``lam`` to it).

| method | what it is | cost |
|---|---|---|
| ``certified`` | an upper bound for every input size, within ``tolerance`` of the worst | a Gram matrix per frequency |
| ``exact`` | the norm of the real, padded operator at one input size | a dense decomposition or Lanczos |
| ``power`` | a lower bound, by power iteration on the real operator | some tens of applications |

Lemma 2 on the input's own grid is exact for circular padding only. For zero padding it can be too small (kernel
[1, 0, -1], n = 6: a norm of 1.732 instead of 1.802), and a step of ``1/L`` too long. So ``certified`` is the default.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from solver_plugins.errors import OptionError, WeightError, did_you_mean
from solver_plugins.operators.certified import certified_bound
from solver_plugins.operators.geometry import Geometry
from solver_plugins.operators.krylov import generic_vector, largest_eigenvalue
from solver_plugins.operators.layers import read_layer
from solver_plugins.operators.operator import LinearOperator, operator_from_kernel
from solver_plugins.operators.precision import autocast_off, check_diagonal, scaled_kernel

Method = Literal["certified", "exact", "power"]

_DENSE_SIDE = 768
_POWER_STEPS = 200


def lipschitz_constant(
    module: nn.Module,
    method: str = "certified",
    input_size: Sequence[int] | None = None,
    diagonal: Tensor | None = None,
    tolerance: float = 0.1,
) -> Tensor:
    """Returns ``lambda_max(A A^T)`` of a layer as a 0-d tensor on the weight's device, in float32 at least.

    Args:
        module: Any layer that :func:`~solver_plugins.operators.kernel_of` can read.
        method: "certified" (never too small, for any input size), "exact" (for ``input_size``) or "power" (from below).
        input_size: The spatial size of the input. "exact" needs it for convolutions. "certified" uses it for a tighter
            bound if the padding repeats entries. "power" uses ``max(16, 2 d (k - 1) + 2)`` per dimension by default,
            and more if the padding needs it.
        diagonal: A scale per output feature (a folded norm): bounds ``diag(d) A`` instead.
        tolerance: How far "certified" may be above the supremum over input sizes, relative. "power" stops when a step
            changes the estimate by less than a thousandth of this. "exact" does not use it.

    Raises:
        UnsupportedLayerError: If the layer cannot be read.
        OptionError: For an unknown method, a missing input size, or a tolerance that is not positive.
        WeightError: If the weights are not finite floating point numbers in memory.
    """
    kernel, geometry = read_layer(module)
    return lipschitz_from_kernel(kernel, geometry, method, input_size, diagonal, tolerance)


@torch.no_grad()
def lipschitz_from_kernel(
    kernel: Tensor,
    geometry: Geometry,
    method: str = "certified",
    input_size: Sequence[int] | None = None,
    diagonal: Tensor | None = None,
    tolerance: float = 0.1,
) -> Tensor:
    """Returns ``lambda_max(A A^T)`` of a kernel ``[n2, n1/groups, *k]``; see :func:`lipschitz_constant`."""
    if method not in get_args(Method):
        raise OptionError(f"Unknown method {method!r}.{did_you_mean(str(method), get_args(Method))}")
    if not tolerance > 0:
        raise OptionError(f"Expected a tolerance above 0; found {tolerance}.")
    if isinstance(input_size, int):
        input_size = (input_size,) * geometry.dims
    if method == "exact" and geometry.dims and input_size is None:
        raise OptionError("The exact norm of a convolution depends on its input; pass input_size, or use 'certified'.")
    _check_weights(kernel, diagonal)
    if input_size is not None and geometry.dims:
        geometry.output_size(kernel.shape[2:], input_size)

    with autocast_off(kernel.device):
        if method == "power":
            # Scaled to entries of at most one, so that squares neither underflow nor overflow.
            scale = _double(kernel, diagonal).abs().amax().clamp_min(torch.finfo(torch.float32).tiny)
            unit = (_double(kernel, diagonal) / scale).to(torch.promote_types(kernel.dtype, torch.float32))
            value = _power(_real_operator(unit, geometry, input_size, None, torch.float32), tolerance) * scale * scale
        elif method == "exact":
            value = _exact(_real_operator(kernel, geometry, input_size, diagonal, torch.float64))
        else:
            value = certified_bound(_double(kernel, diagonal), geometry, input_size, tolerance)
    result = value.to(device=kernel.device, dtype=torch.promote_types(kernel.dtype, torch.float32))
    if method == "certified" and result.to(value) < value:
        # Rounding to a smaller dtype must not lower the bound.
        result = torch.nextafter(result, torch.full_like(result, math.inf))
    if not torch.isfinite(result):
        raise WeightError(
            f"Expected weights whose Lipschitz constant is finite in {result.dtype}; found {float(value):.3g}."
        )
    return result


def _check_weights(kernel: Tensor, diagonal: Tensor | None) -> None:
    check_diagonal(diagonal, kernel.shape[0])
    for name, tensor in (("weights", kernel), ("diagonal", diagonal)):
        if tensor is None:
            continue
        if not tensor.is_floating_point():
            raise WeightError(f"Expected {name} in floating point; found {tensor.dtype}.")
        if tensor.is_meta:
            raise WeightError(f"Expected {name} in memory; found the meta device. Load or initialise the model first.")
        if not torch.isfinite(tensor).all():
            count = int((~torch.isfinite(tensor)).sum())
            raise WeightError(f"Expected finite {name}; found {count} of {tensor.numel()} that are NaN or infinite.")


def _double(kernel: Tensor, diagonal: Tensor | None) -> Tensor:
    # MPS has no float64; its few small matrices are computed on the CPU.
    if kernel.device.type == "mps":
        kernel, diagonal = kernel.cpu(), None if diagonal is None else diagonal.cpu()
    return scaled_kernel(kernel, diagonal, torch.float64)


def _real_operator(
    kernel: Tensor, geometry: Geometry, input_size: Sequence[int] | None, diagonal: Tensor | None, dtype: torch.dtype
) -> LinearOperator:
    kernel = _double(kernel, diagonal) if dtype == torch.float64 else scaled_kernel(kernel, diagonal, dtype)
    if input_size is None:
        pads = ((0, 0),) * geometry.dims if geometry.padding == "same_dynamic" else geometry.padding
        input_size = [
            max(16, 2 * d * (k - 1) + 2, max(sides) + 1)
            for d, k, sides in zip(geometry.dilation, kernel.shape[2:], pads, strict=True)
        ]
    return operator_from_kernel(kernel, geometry, (kernel.shape[1] * geometry.groups, *input_size[: geometry.dims]))


def _exact(operator: LinearOperator) -> Tensor:
    """Returns the largest eigenvalue of the smaller of ``A A^T`` and ``A^T A``, in float64."""
    device, dtype = operator.weight.device, operator.weight.dtype
    shape = min(operator.output_shape, operator.input_shape, key=math.prod)
    maps: tuple[Callable[[Tensor], Tensor], ...] = (operator.adjoint, operator.apply)
    first, second = maps if shape == operator.output_shape else maps[::-1]
    side = math.prod(shape)
    if side <= _DENSE_SIDE:
        factor = first(torch.eye(side, device=device, dtype=dtype).reshape(-1, *shape)).flatten(1)
        return torch.linalg.eigvalsh(factor @ factor.T)[-1].clamp_min(0)
    return largest_eigenvalue(lambda v: second(first(v)), generic_vector(side, device, dtype).reshape(shape))


def _power(operator: LinearOperator, tolerance: float) -> Tensor:
    """Returns the Rayleigh quotient of a power iteration: a lower bound."""
    shape = operator.output_shape
    vector = generic_vector(math.prod(shape), operator.weight.device, operator.weight.dtype).reshape(shape)
    estimate = operator.weight.new_zeros(())
    for _ in range(_POWER_STEPS):
        back = operator.adjoint(vector)
        new = back.square().sum()
        if new == 0:
            break
        done = new - estimate <= 1e-3 * tolerance * new
        estimate = torch.maximum(estimate, new)
        if done:
            break
        vector = operator.apply(back)
        vector = vector / vector.norm()
    return estimate
