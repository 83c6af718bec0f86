"""The matrix ``X`` of a layer: one row per sample (Linear), or per sample and place (Conv, im2col).

A layer is linear in its weight: its output is ``X W^T`` (plus the bias), with one block of columns per group. Nothing
here builds the whole ``X`` of a convolution: products with it are convolutions, and Gram matrices are summed in pieces.

Shapes: ``g`` groups, ``N`` rows, ``d`` columns per group (``n1/g`` times the taps), ``m`` outputs per group.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from solver_plugins.errors import ShapeError, UnsupportedLayerError
from solver_plugins.operators import Geometry, operator_from_kernel, read_layer
from solver_plugins.operators.padding import pad

PIECE_BYTES = 2**22
"""The largest piece of an im2col matrix while a Gram matrix is summed: 4 MiB, which fits into caches."""

Margins = tuple[tuple[int, int], ...]
"""Zeros in front of and behind an input, per axis."""


def surround(x: Tensor, margins: Margins) -> Tensor:
    """Returns an input with zeros around it."""
    amounts = [amount for pair in reversed(margins) for amount in pair]
    return functional.pad(x, amounts) if any(amounts) else x


@dataclass(frozen=True)
class Rows:
    """How a layer with a kernel ``[n2, n1/g, *k]`` (a Linear: ``[n2, n1]``) turns its input into rows."""

    kernel_shape: tuple[int, ...]
    geometry: Geometry

    @classmethod
    def of(cls, layer: nn.Module) -> "Rows":
        """Returns how a layer turns its input into rows; UnsupportedLayerError if its kernel is not just its weight."""
        kernel, geometry = read_layer(layer)
        weight = layer._parameters.get("weight")
        if weight is None:
            raise UnsupportedLayerError("its weight is computed (a parametrisation), not a Parameter")
        if weight.is_complex():
            raise UnsupportedLayerError("its weight is complex")
        if kernel is not weight and not _is_transposed(kernel, weight):
            raise UnsupportedLayerError("its kernel is computed from its weight, so their gradients differ")
        return cls(tuple(kernel.shape), geometry)

    @property
    def groups(self) -> int:
        """``g``."""
        return self.geometry.groups

    @property
    def outputs(self) -> int:
        """``m``."""
        return self.kernel_shape[0] // self.groups

    @property
    def columns(self) -> int:
        """``d``."""
        return math.prod(self.kernel_shape[1:])

    @property
    def taps(self) -> tuple[int, ...]:
        """``k``."""
        return self.kernel_shape[2:]

    def count(self, x: Tensor) -> int:
        """Returns ``N`` for one input."""
        if not self.geometry.dims:
            return x.numel() // self.kernel_shape[1]
        batch = x.shape[0] if x.dim() == self.geometry.dims + 2 else 1
        return batch * math.prod(self.geometry.output_size(self.taps, x.shape[-self.geometry.dims :])) if batch else 0

    def prepare(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns an input in ``dtype`` as ``[N, n1]``, or with its padding as ``[batch, n1, *size]``."""
        return surround(*self.without_zeros(x, dtype))

    def without_zeros(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Margins]:
        """Returns an input like :meth:`prepare` but without padded zeros, and the number of zeros at each end."""
        if not self.geometry.dims:
            return x.reshape(-1, self.kernel_shape[1]).to(dtype), ()
        x = self._batched(x).to(dtype)
        pairs = self.geometry.padding_for(self.taps, x.shape[2:])
        if self.geometry.padding_mode == "zeros":
            return x, pairs
        for axis, (left, right) in enumerate(pairs):
            if left or right:
                x = pad(x, axis - len(pairs), left, right, self.geometry.padding_mode)
        return x, ((0, 0),) * len(pairs)

    def output_rows(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns an output, or a gradient of its shape, as ``[g, N, m]``."""
        return self._as_rows((self._batched(y) if self.geometry.dims else y).to(dtype), self.outputs)

    def _as_rows(self, y: Tensor, r: int) -> Tensor:
        """Returns outputs with ``r`` channels per group as ``[g, N, r]``."""
        if not self.geometry.dims:
            return y.reshape(1, -1, r)
        return y.reshape(y.shape[0], self.groups, r, -1).permute(1, 0, 3, 2).reshape(self.groups, -1, r)

    def _batched(self, x: Tensor) -> Tensor:
        if x.dim() == self.geometry.dims + 1:
            return x.unsqueeze(0)
        if x.dim() != self.geometry.dims + 2:
            raise ShapeError(f"Expected {self.geometry.dims} spatial dimensions; found shape {tuple(x.shape)}.")
        return x

    def project(self, x: Tensor, p: Tensor) -> Tensor:
        """Returns ``X p^T`` as ``[g, N, r]`` for a prepared input and ``p`` of shape ``[g, r, d]``: a forward pass."""
        kernel = p.reshape(-1, *self.kernel_shape[1:])
        return self._as_rows(operator_from_kernel(kernel, self._bare, x.shape).apply(x), p.shape[1])

    def pull_back(self, x: Tensor, y: Tensor) -> Tensor:
        """Returns ``y^T X`` as ``[g, r, d]`` for a prepared input and ``y`` ``[g, N, r]``: a weight gradient."""
        r = y.shape[2]
        # Only the shape of the kernel matters.
        kernel = x.new_empty(()).expand(self.groups * r, *self.kernel_shape[1:])
        operator = operator_from_kernel(kernel, self._bare, x.shape)
        if self.geometry.dims:
            y = y.reshape(self.groups, x.shape[0], -1, r).permute(1, 0, 3, 2)
            y = y.reshape(x.shape[0], *operator.output_shape).contiguous()
        return operator.weight_gradient(x, y).reshape(self.groups, r, self.columns)

    @property
    def _bare(self) -> Geometry:
        """The geometry for an input that already has its padding."""
        return dataclasses.replace(self.geometry, padding=((0, 0),) * self.geometry.dims, padding_mode="zeros")

    def _places(self, x: Tensor) -> tuple[int, ...]:
        """Returns the size of the output for an input that already has its padding."""
        return self._bare.output_size(self.taps, x.shape[2:])

    def unfold(self, x: Tensor, axes: Iterable[int]) -> Tensor:
        """Returns a view of a prepared convolution input, cut into windows along some axes.

        The shape is ``[batch, n1, *(places, or sizes of axes that are not cut), *(taps)]``.
        """
        for axis in axes:
            gap, taps = self.geometry.dilation[axis], self.taps[axis]
            x = x.unfold(2 + axis, gap * (taps - 1) + 1, self.geometry.stride[axis])[..., ::gap]
        return x

    def matrices(self, x: Tensor) -> Iterator[Tensor]:
        """Yields ``X`` of a prepared input in pieces ``[g, rows, d]`` of a few samples each."""
        if not self.geometry.dims:
            yield x.unsqueeze(0)
            return
        dims = self.geometry.dims
        per_sample = math.prod(self._places(x)) * self.columns * self.groups * x.element_size()
        for part in x.split(max(1, PIECE_BYTES // max(per_sample, 1))):
            windows = self.unfold(part, range(dims))
            windows = windows.reshape(part.shape[0], self.groups, self.kernel_shape[1], *windows.shape[2:])
            order = (1, 0, *range(3, 3 + dims), 2, *range(3 + dims, 3 + 2 * dims))
            yield windows.permute(order).reshape(self.groups, -1, self.columns)

    def column_sums(self, x: Tensor, margins: Margins) -> Tensor:
        """Returns ``1^T X`` as ``[g, d]`` for an input and the zeros that belong around it."""
        sums = x.sum(0, keepdim=True)
        if not self.geometry.dims:
            return sums
        windows = self.unfold(surround(sums, margins), range(self.geometry.dims))[0]
        sums = windows.sum(tuple(range(1, 1 + self.geometry.dims)))
        return sums.reshape(self.groups, self.columns)

    def outer(self, inputs: list[Tensor]) -> Tensor:
        """Returns ``X X^T`` as ``[g, N, N]`` for the rows of all prepared inputs, some channels at a time."""
        if not self.geometry.dims:
            x = inputs[0] if len(inputs) == 1 else torch.cat(inputs)
            return (x @ x.T).unsqueeze(0)
        counts = [x.shape[0] * math.prod(self._places(x)) for x in inputs]
        total = sum(counts)
        result = inputs[0].new_zeros(self.groups, total, total)
        channels = self.kernel_shape[1]
        bytes_per_channel = total * self.groups * math.prod(self.taps) * result.element_size()
        step = min(channels, max(1, PIECE_BYTES // max(bytes_per_channel, 1)))
        grouped = [x.reshape(x.shape[0], self.groups, channels, *x.shape[2:]) for x in inputs]
        for start in range(0, channels, step):
            piece = min(step, channels - start)
            rows = Rows((self.kernel_shape[0], piece, *self.taps), self.geometry)
            parts = [x[:, :, start : start + piece].flatten(1, 2) for x in grouped]
            columns = torch.cat([matrix for part in parts for matrix in rows.matrices(part)], 1)
            add_product(result, columns, columns.mT)
        return result


def _is_transposed(kernel: Tensor, weight: Tensor) -> bool:
    other = weight.t() if weight.dim() == 2 else weight
    return kernel.shape == other.shape and kernel.stride() == other.stride() and kernel._base is weight


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Returns ``a b`` per group; a single group is a plain product."""
    return torch.mm(a[0], b[0]).unsqueeze(0) if a.shape[0] == 1 else torch.bmm(a, b)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Adds ``a b`` to ``total`` per group, in place."""
    if a.shape[0] == 1:
        total[0].addmm_(a[0], b[0])
    elif total.is_contiguous():
        total.baddbmm_(a, b)
    else:
        # torch's baddbmm_ would process the groups one after the other.
        total += torch.bmm(a, b)
