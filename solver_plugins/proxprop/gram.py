"""Gram matrices ``X^T X`` of a layer's rows, in bounded memory.

The windows of a convolution overlap, so the entries of ``X^T X`` repeat. Along one axis (stride 1, ``k`` taps), with
``x_q`` for what lies at place ``q`` of the padded input, the block of taps ``i`` and ``j`` is

    S(i, j)          =  sum_{q < out} x_{i + q} x_{j + q}^T
    S(i + 1, j + 1)  =  S(i, j) + x_{i + out} x_{j + out}^T - x_i x_j^T

Only the first row and column of blocks are sums over all places. Every other block differs from its diagonal neighbour
by one place at each border. Two axes, called lines and columns, are treated like this, one inside the other. As ``S``
is symmetric, that needs ``k (2 k - 1)`` products of the channels where im2col needs ``k^4``. Padded zeros are never
multiplied, and the factors of a product are slices of the input, so nothing is copied per tap.

Windows with gaps (dilation ``e``) only see every ``e``-th place: they are windows without gaps of ``e`` interleaved
inputs.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from solver_plugins.proxprop.products import add_product
from solver_plugins.proxprop.rows import PIECE_BYTES, Margins, Rows, surround


def gram(rows: Rows, x: Tensor, margins: Margins) -> Tensor:
    """Returns ``X^T X`` as ``[g, d, d]`` for an input and the zeros around it."""
    total = x.new_zeros(rows.groups, rows.columns, rows.columns)
    sliding = [axis for axis, taps in enumerate(rows.taps) if taps > 1 and rows.geometry.stride[axis] == 1]
    if not x.shape[0]:
        return total
    if sliding:
        _Overlap(rows, sliding[0] if len(sliding) > 1 else None, sliding[-1]).add(total, x, margins)
        return total
    for matrix in rows.matrices(surround(x, margins)):
        add_product(total, matrix.mT, matrix)
    return total


@dataclass(frozen=True)
class _Border:
    """What a window gains (sign 1) or loses (-1) by moving on: ``x_{i + out}`` or ``x_i``, if not padding.

    Attributes:
        tap: The first such ``i``.
        places: The places, counted from the first that is not padding.
        sign: The sign.
    """

    tap: int
    places: slice
    sign: int

    @property
    def size(self) -> int:
        """The number of places."""
        return self.places.stop - self.places.start


@dataclass(frozen=True)
class _Axis:
    """An axis along which windows without gaps move by one place.

    Attributes:
        taps: ``k``.
        out: The number of windows.
        first: The first place that is not a padded zero.
        last: The place after the last such place.
    """

    taps: int
    out: int
    first: int
    last: int

    def shifts(self, symmetric: bool) -> Iterator[tuple[slice, slice]]:
        """Yields the places for ``S(0, 0), ..., S(0, k - 1)``, and also for ``S(1, 0), ...`` unless symmetric."""
        for shift in range(self.taps):
            yield self._places(0, shift), self._places(shift, 0)
        for shift in range(1, 1 if symmetric else self.taps):
            yield self._places(shift, 0), self._places(0, shift)

    def _places(self, start: int, other: int) -> slice:
        """Returns ``out`` places from ``start`` on, without those that are padding here or from ``other`` on."""
        low = max(0, self.first - min(start, other))
        high = min(self.out, self.last - max(start, other))
        return slice(start + low - self.first, start + max(low, high) - self.first)

    def borders(self) -> list[_Border]:
        """Returns the borders that are not just padding."""
        found = []
        for start, sign in ((self.out, 1), (0, -1)):
            low, high = max(start, self.first), min(start + self.taps - 1, self.last)
            if low < high:
                found.append(_Border(low - start, slice(low - self.first, high - self.first), sign))
        return found


class _Sums:
    """Sums of products of lines with other lines, for every pair of taps along the columns."""

    def __init__(self, like: Tensor, columns: _Axis, near: int, far: int, symmetric: bool):
        groups, width = like.shape[0], like.shape[2]
        self.columns, self.near, self.far, self.width, self.symmetric = columns, near, far, width, symmetric
        count = columns.taps if symmetric else 2 * columns.taps - 1
        self.shifts = like.new_zeros(count, groups, near * width, far * width)
        sizes = [border.size * width for border in columns.borders()]
        self.borders = [like.new_zeros(groups, near * size, far * size) for size in sizes]

    def add(self, z: Tensor, strips: list[Tensor], near: slice, far: slice) -> None:
        """Adds the products of two sets of lines of ``z``; ``strips`` are its borders."""
        run = z.shape[-1] // (self.columns.last - self.columns.first)
        left, right = z[:, near].flatten(1, 2), z[:, far].flatten(1, 2)
        for total, (here, there) in zip(self.shifts, self.columns.shifts(self.symmetric), strict=True):
            a, b = left[..., here.start * run : here.stop * run], right[..., there.start * run : there.stop * run]
            add_product(total[:, : a.shape[1], : b.shape[1]], a, b.mT)
        for total, strip in zip(self.borders, strips, strict=True):
            a, b = strip[:, near].flatten(1, 3), strip[:, far].flatten(1, 3)
            add_product(total[:, : a.shape[1], : b.shape[1]], a, b.mT)

    def blocks(self) -> Tensor:
        """Returns the sums as ``[k, k, g, near, width, far, width]``."""
        k, (groups, width) = self.columns.taps, (self.shifts.shape[1], self.width)
        blocks = self.shifts.new_zeros(k, k, groups, self.near, width, self.far, width)
        shifts = self.shifts.view(-1, *blocks.shape[2:])
        blocks[0] = shifts[:k]
        blocks[1:, 0] = shifts[1:].permute(0, 1, 4, 5, 2, 3) if self.symmetric else shifts[k:]
        for border, total in zip(self.columns.borders(), self.borders, strict=True):
            change = total.view(groups, self.near, width, border.size, self.far, width, border.size)
            taps = slice(1 + border.tap, 1 + border.tap + border.size)
            blocks[taps, taps].add_(change.permute(3, 6, 0, 1, 2, 4, 5), alpha=border.sign)
        _add_along_diagonals(blocks)
        return blocks


def _lines_at_once(width: int, lines: int) -> int:
    """Returns how many lines to multiply at a time.

    Small products are slow, and large ones contain pairs of lines that no window holds. It is a power of two, because
    libraries are fast at such sizes.
    """
    return 2 ** int(math.log2(max(1, min(lines, math.sqrt(200 / width)))))


def _samples_last(x: Tensor) -> Tensor:
    """Returns the same tensor, with samples side by side in memory if torch's fast transposition applies."""
    if x.shape[0] < 60 or not x.is_contiguous():
        return x
    return x.flatten(1).t().contiguous().t().unflatten(1, x.shape[1:])


def _add_along_diagonals(blocks: Tensor) -> None:
    """Turns differences ``S(i + 1, j + 1) - S(i, j)`` into ``S(i + 1, j + 1)``."""
    for i in range(1, blocks.shape[0]):
        blocks[i, 1:] += blocks[i - 1, :-1]


class _Overlap:
    """The Gram matrix of a convolution whose windows overlap along ``line_axis`` (if not None) and ``column_axis``."""

    def __init__(self, rows: Rows, line_axis: int | None, column_axis: int):
        self.rows, self.line_axis, self.column_axis = rows, line_axis, column_axis
        # Along these, windows are cut out.
        self.others = [axis for axis in range(rows.geometry.dims) if axis not in (line_axis, column_axis)]

    def add(self, total: Tensor, x: Tensor, margins: Margins) -> None:
        """Adds the matrix of one input."""
        x = surround(x, tuple(pair if axis in self.others else (0, 0) for axis, pair in enumerate(margins)))
        # Phases of the same kind are summed together: wide gaps have many phases, but few kinds.
        kinds: dict[tuple[_Axis, _Axis], list[Iterator[Tensor]]] = {}
        for line_phase, column_phase in itertools.product(self._phases(self.line_axis), self._phases(self.column_axis)):
            lines, line_places = self._axis(self.line_axis, x, margins, line_phase)
            columns, column_places = self._axis(self.column_axis, x, margins, column_phase)
            if min(lines.out, columns.out, lines.last - lines.first, columns.last - columns.first) > 0:
                kinds.setdefault((lines, columns), []).append(self._pieces(x, line_places, column_places))
        for (lines, columns), pieces in kinds.items():
            self._add_pieces(total, itertools.chain.from_iterable(pieces), lines, columns)

    def _phases(self, axis: int | None) -> range:
        return range(1 if axis is None else self.rows.geometry.dilation[axis])

    def _axis(self, axis: int | None, x: Tensor, margins: Margins, phase: int) -> tuple[_Axis, slice]:
        """Returns every ``dilation``-th place of an axis from ``phase`` on, and its slice of the input."""
        if axis is None:
            return _Axis(1, 1, 0, 1), slice(None)
        taps, gap = self.rows.taps[axis], self.rows.geometry.dilation[axis]
        size, (left, right) = x.shape[2 + axis], margins[axis]
        out = left + size + right - gap * (taps - 1)
        first, last = -((phase - left) // gap), -((phase - left - size) // gap)
        return _Axis(taps, -((phase - out) // gap), first, last), slice(phase + gap * first - left, None, gap)

    def _add_pieces(self, total: Tensor, pieces: Iterator[Tensor], lines: _Axis, columns: _Axis) -> None:
        top: _Sums | None = None
        edges: list[tuple[_Border, _Sums]] = []
        stop = min(lines.out, lines.last) - lines.first
        for z in pieces:
            if top is None:
                height = _lines_at_once(z.shape[2], stop)
                top = _Sums(z, columns, height, height + lines.taps - 1, symmetric=lines.taps == 1)
                edges = [(one, _Sums(z, columns, one.size, one.size, symmetric=True)) for one in lines.borders()]
            places = z.unflatten(3, (columns.last - columns.first, -1))
            strips = [places[:, :, :, border.places].contiguous() for border in columns.borders()]
            for start in range(0, stop, top.near):
                near, far = min(start + top.near, stop), min(start + top.far, z.shape[1])
                top.add(z, strips, slice(start, near), slice(start, far))
            for border, sums in edges:
                sums.add(z, strips, border.places, border.places)
        if top is not None:
            self._assemble(total, top, edges)

    def _pieces(self, x: Tensor, lines: slice, columns: slice) -> Iterator[Tensor]:
        """Yields lines and columns of a few samples at a time as ``[g, lines, width, columns * rest]``.

        The width is the channels and the taps of the other axes; the rest is the samples and the places along those
        axes. So neighbouring lines form one matrix, and neighbouring columns are a slice of it.
        """
        rows, others = self.rows, self.others
        taps = range(3 + rows.geometry.dims, 3 + rows.geometry.dims + len(others))
        growth = math.prod(rows.taps[axis] for axis in others)
        for part in x.chunk(-(-x.numel() * growth * x.element_size() // PIECE_BYTES)):
            windows = rows.unfold(_samples_last(part), others).unflatten(1, (rows.groups, rows.kernel_shape[1]))
            windows = windows.unsqueeze(-1) if self.line_axis is None else windows
            line_dim = windows.dim() - 1 if self.line_axis is None else 3 + self.line_axis
            places = [3 + axis for axis in others]
            windows = windows.permute(1, line_dim, 3 + self.column_axis, 2, *taps, 0, *places)[:, lines, columns]
            # [g, lines, channels, *taps, columns, samples, *places]
            windows = windows.movedim(2, 3 + len(others))
            yield windows.reshape(*windows.shape[:2], math.prod(windows.shape[2 : 3 + len(others)]), -1)

    def _assemble(self, total: Tensor, top: _Sums, edges: list[tuple[_Border, _Sums]]) -> None:
        """Adds ``S`` of the lines; ``top`` has its first row, and ``edges`` the changes at the borders."""
        rows, dims = self.rows, self.rows.geometry.dims
        k = 1 if self.line_axis is None else rows.taps[self.line_axis]
        first = top.blocks()
        blocks = first.new_zeros(k, k, *first.shape[:3], top.width, top.width)
        for tap in range(k):
            row = first.diagonal(tap, 3, 5).sum(-1)
            blocks[0, tap] = row
            blocks[tap, 0] = row.permute(1, 0, 2, 4, 3)
        for border, sums in edges:
            taps = slice(1 + border.tap, 1 + border.tap + border.size)
            blocks[taps, taps].add_(sums.blocks().permute(3, 5, 0, 1, 2, 4, 6), alpha=border.sign)
        _add_along_diagonals(blocks)
        # In a weight the taps follow the channels.
        near, far = [2 + axis for axis in range(dims)], [3 + dims + axis for axis in range(dims)]
        result = total.view(rows.groups, rows.kernel_shape[1], *rows.taps, rows.kernel_shape[1], *rows.taps)
        if self.line_axis is None:
            line_dims = [result.dim(), result.dim() + 1]
            result = result[..., None, None]
        else:
            line_dims = [near[self.line_axis], far[self.line_axis]]
        sides = [1, *(near[axis] for axis in self.others), 2 + dims, *(far[axis] for axis in self.others)]
        result = result.permute(*line_dims, near[self.column_axis], far[self.column_axis], 0, *sides)
        result += blocks.reshape(result.shape)
