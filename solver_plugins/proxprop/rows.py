"""The matrix ``X`` of a layer: one row per sample (Linear) or per sample and place (Conv, im2col).

A layer is linear in its weight: its output is ``X W^T`` (plus the bias), with one block of columns per group. Nothing
here builds all of ``X`` for a convolution: products with it are convolutions, and Gram matrices are summed in pieces.

Shapes: ``g`` groups, ``N`` rows, ``d`` columns per group (``n1/g`` times the taps), ``m`` outputs per group.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional, grad

from solver_plugins.errors import ShapeError
from solver_plugins.operators import Geometry
from solver_plugins.operators.padding import pad
from solver_plugins.proxprop.products import add_product

_CONV: tuple[Callable[..., Tensor], ...] = (functional.conv1d, functional.conv2d, functional.conv3d)
_WEIGHT_GRADIENT: tuple[Callable[..., Tensor], ...] = (grad.conv1d_weight, grad.conv2d_weight, grad.conv3d_weight)

PIECE_BYTES = 2**22
"""How large a piece of an im2col matrix may be while a Gram matrix is summed: 4 MiB, so that caches hold it."""

Margins = tuple[tuple[int, int], ...]
"""Zeros in front of and behind an input, per axis."""


def surround(x: Tensor, margins: Margins) -> Tensor:
    """Returns an input with zeros around it."""
    amounts = [amount for pair in reversed(margins) for amount in pair]
    return functional.pad(x, amounts) if any(amounts) else x


@dataclass(frozen=True)
class Rows:
    """How a layer turns its input into rows.

    Attributes:
        kernel_shape: ``[n2, n1/g, *k]``; a Linear: ``[n2, n1]``.
        geometry: Stride, padding, dilation and groups.
    """

    kernel_shape: tuple[int, ...]
    geometry: Geometry

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
        """Returns an input as ``[N, n1]``, or with its padding as ``[batch, n1, *size]``, in ``dtype``."""
        return surround(*self.without_zeros(x, dtype))

    def without_zeros(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Margins]:
        """Returns an input in ``dtype`` as :meth:`prepare` does, and how many zeros it leaves out at each end."""
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
        if not self.geometry.dims:
            return y.reshape(1, -1, self.kernel_shape[0]).to(dtype)
        y = self._batched(y).to(dtype)
        places = y.reshape(y.shape[0], self.groups, self.outputs, -1)
        return places.permute(1, 0, 3, 2).reshape(self.groups, -1, self.outputs)

    def _batched(self, x: Tensor) -> Tensor:
        if x.dim() == self.geometry.dims + 1:
            return x.unsqueeze(0)
        if x.dim() != self.geometry.dims + 2:
            raise ShapeError(f"Expected {self.geometry.dims} spatial dimensions; found shape {tuple(x.shape)}.")
        return x

    def project(self, x: Tensor, p: Tensor) -> Tensor:
        """Returns ``X p^T`` as ``[g, N, r]`` for a prepared input and ``p`` of shape ``[g, r, d]``: a forward pass."""
        if not self.geometry.dims:
            return (x @ p[0].T).unsqueeze(0)
        kernel = p.reshape(-1, *self.kernel_shape[1:])
        y = _CONV[self.geometry.dims - 1](
            x, kernel, stride=self.geometry.stride, dilation=self.geometry.dilation, groups=self.groups
        )
        return (
            y.reshape(x.shape[0], self.groups, p.shape[1], -1).permute(1, 0, 3, 2).reshape(self.groups, -1, p.shape[1])
        )

    def pull_back(self, x: Tensor, y: Tensor) -> Tensor:
        """Returns ``y^T X`` as ``[g, r, d]`` for a prepared input and ``y`` ``[g, N, r]``: a weight gradient."""
        if not self.geometry.dims:
            return (y[0].T @ x).unsqueeze(0)
        r = y.shape[2]
        size = self._places(x)
        spread = (
            y.reshape(self.groups, x.shape[0], -1, r).permute(1, 0, 3, 2).reshape(x.shape[0], self.groups * r, *size)
        )
        result = _WEIGHT_GRADIENT[self.geometry.dims - 1](
            x,
            (self.groups * r, *self.kernel_shape[1:]),
            spread.contiguous(),
            stride=self.geometry.stride,
            dilation=self.geometry.dilation,
            groups=self.groups,
        )
        return result.reshape(self.groups, r, self.columns)

    def _places(self, x: Tensor) -> tuple[int, ...]:
        """Returns the output's size for an input that has its padding already."""
        bare = Geometry(self.geometry.stride, ((0, 0),) * self.geometry.dims, self.geometry.dilation)
        return bare.output_size(self.taps, x.shape[2:])

    def unfold(self, x: Tensor, axes: Iterable[int]) -> Tensor:
        """Returns a view of a prepared convolution input that is cut into windows along some axes.

        The shape is ``[batch, n1, *(places, or sizes of axes that are not cut), *(taps)]``.
        """
        for axis in axes:
            gap, taps = self.geometry.dilation[axis], self.taps[axis]
            x = x.unfold(2 + axis, gap * (taps - 1) + 1, self.geometry.stride[axis])[..., ::gap]
        return x

    def matrices(self, x: Tensor) -> Iterator[Tensor]:
        """Yields ``X`` of a prepared input in pieces ``[g, rows, d]``, a few samples each."""
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
