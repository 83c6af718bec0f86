"""A convolution as a linear operator, with its exact adjoint for every input size."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.grad
from torch import Tensor
from torch.nn import functional

from solver_plugins.errors import ShapeError
from solver_plugins.operators.geometry import Geometry, Padding
from solver_plugins.operators.operator import LinearOperator
from solver_plugins.operators.padding import pad, pad_adjoint
from solver_plugins.operators.precision import check_diagonal, match_dtype, scale_rows
from solver_plugins.operators.symbol import column_suprema

_CONV: tuple[Callable[..., Tensor], ...] = (functional.conv1d, functional.conv2d, functional.conv3d)
_CONV_WEIGHT: tuple[Callable[..., Tensor], ...] = (
    torch.nn.grad.conv1d_weight,
    torch.nn.grad.conv2d_weight,
    torch.nn.grad.conv3d_weight,
)
_CONV_TRANSPOSE: tuple[Callable[..., Tensor], ...] = (
    functional.conv_transpose1d,
    functional.conv_transpose2d,
    functional.conv_transpose3d,
)


@dataclass(frozen=True, eq=False)
class ConvMap(LinearOperator):
    """``A u = diag(d) (W * u)`` for inputs ``[..., n1, *input_size]``; leading dimensions are batch dimensions.

    ``W`` has the shape ``(n2, n1 / groups, *kernel_size)``. The adjoint needs the spatial size of ``u`` because a
    stride rounds the output size.
    """

    geometry: Geometry
    input_size: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 1 <= self.geometry.dims <= 3 or self.weight.ndim != self.geometry.dims + 2:
            raise ShapeError(
                f"Expected a kernel [n2, n1/groups, *k] with as many dimensions of space as its geometry, "
                f"{self.geometry.dims} (1 to 3); found shape {tuple(self.weight.shape)}."
            )
        if self.weight.shape[0] % self.geometry.groups:
            raise ShapeError(
                f"Expected {self.geometry.groups} groups to divide the outputs; found {self.weight.shape[0]}."
            )
        check_diagonal(self.diagonal, self.out_features)
        # Raises if the input is too small.
        self.geometry.output_size(self.kernel_size, self.input_size)

    @property
    def in_features(self) -> int:
        return self.weight.shape[1] * self.geometry.groups

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def kernel_size(self) -> tuple[int, ...]:
        """Taps per dimension."""
        return tuple(self.weight.shape[2:])

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (self.in_features, *self.input_size)

    @property
    def output_shape(self) -> tuple[int, ...]:
        return (self.out_features, *self.geometry.output_size(self.kernel_size, self.input_size))

    @property
    def problem_dims(self) -> tuple[int, ...]:
        return tuple(range(-self.geometry.dims - 1, 0))

    def apply(self, u: Tensor) -> Tensor:
        u, batch = self._flatten(u, self.input_shape, "input")
        u, own = self._padded(match_dtype(u, self.weight))
        geometry = self.geometry
        conv = _CONV[geometry.dims - 1]
        out = conv(u, self.weight, None, geometry.stride, own, geometry.dilation, geometry.groups)
        return scale_rows(out.reshape(batch + out.shape[1:]), self.diagonal, geometry.dims)

    def adjoint(self, x: Tensor) -> Tensor:
        geometry = self.geometry
        output_shape = self.output_shape
        x, batch = self._flatten(x, output_shape, "output")
        x = match_dtype(scale_rows(x, self.diagonal, geometry.dims), self.weight)
        pads, own = self._split_padding()
        # A stride that does not divide the padded size leaves a remainder that no output depends on.
        remainder = [
            n + sum(sides) + 2 * p - (d * (k - 1) + 1) - (out - 1) * s
            for n, sides, p, k, d, s, out in zip(
                self.input_size,
                pads,
                own,
                self.kernel_size,
                geometry.dilation,
                geometry.stride,
                output_shape[1:],
                strict=True,
            )
        ]
        transpose = _CONV_TRANSPOSE[geometry.dims - 1]
        u = transpose(x, self.weight, None, geometry.stride, own, remainder, geometry.groups, geometry.dilation)
        for dim, (left, right) in zip(self.problem_dims[1:], pads, strict=True):
            if left or right:
                u = pad_adjoint(u, dim, left, right, geometry.padding_mode)
        return u.reshape(batch + u.shape[1:])

    def column_norms_sq(self) -> Tensor:
        with torch.no_grad():
            bound = column_suprema(self.weight, self.geometry, self.diagonal, self.input_size)
            return bound.to(torch.promote_types(self.weight.dtype, torch.float32))

    def weight_gradient(self, u: Tensor, grad: Tensor) -> Tensor:
        u, own = self._padded(self._flatten(u, self.input_shape, "input")[0])
        grad, _ = self._flatten(grad, self.output_shape, "output")
        geometry = self.geometry
        conv_weight = _CONV_WEIGHT[geometry.dims - 1]
        return conv_weight(u, self.weight.shape, grad, geometry.stride, own, geometry.dilation, geometry.groups)

    def _padded(self, u: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """Returns an input padded by hand, and the padding that is left to the convolution."""
        pads, own = self._split_padding()
        for dim, (left, right) in zip(self.problem_dims[1:], pads, strict=True):
            if left or right:
                u = pad(u, dim, left, right, self.geometry.padding_mode)
        return u, own

    def _split_padding(self) -> tuple[Padding, tuple[int, ...]]:
        """Returns the padding to do by hand, and the (symmetric, zero) padding that the convolution does itself."""
        pads = self.geometry.padding_for(self.kernel_size, self.input_size)
        none = (0,) * self.geometry.dims
        if self.geometry.padding_mode == "zeros" and all(left == right for left, right in pads):
            return tuple((0, 0) for _ in pads), tuple(left for left, _ in pads)
        return pads, none

    def _flatten(self, x: Tensor, shape: tuple[int, ...], what: str) -> tuple[Tensor, torch.Size]:
        """Checks the shape and merges all batch dimensions into one."""
        if x.ndim < len(shape) or tuple(x.shape[-len(shape) :]) != shape:
            raise ShapeError(
                f"Expected an {what} of shape (..., {', '.join(map(str, shape))}); found {tuple(x.shape)}."
            )
        batch = x.shape[: x.ndim - len(shape)]
        return (x if len(batch) == 1 else x.reshape((-1, *shape))), batch
