"""Gram matrices ``X^T X`` of a layer's rows, in bounded memory.

The windows of a convolution overlap, so the entries of ``X^T X`` repeat. Along one axis (stride 1, ``k`` taps), with
``x_q`` for what lies at place ``q`` of the padded input, the block of taps ``i`` and ``j`` is

    S(i, j)          =  sum_{q < out} x_{i + q} x_{j + q}^T
    S(i + 1, j + 1)  =  S(i, j) + x_{i + out} x_{j + out}^T - x_i x_j^T

The sums over all places only depend on the lag ``j - i``. ``S(0, j)`` and ``S(i, 0)`` are these sums without the places
from ``out`` on, and every other block differs from its diagonal neighbour by one place at each border. Two axes, called
lines and columns, are treated like this, one inside the other. As ``S`` is symmetric, that needs the sums for
``k (2 k - 1)`` lags where im2col needs ``k^4`` products of the channels. A Fourier transform has the sums for all lags
in one product of the channels per frequency; if there is no memory for these, slices of the input are multiplied.
Padded zeros take no part.

Windows with gaps (dilation ``e``) only see every ``e``-th place: they are windows without gaps of ``e`` interleaved
inputs.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from solver_plugins.proxprop.rows import PIECE_BYTES, Margins, Rows, add_product, surround

SPECTRUM_BYTES = 2**25
"""Products of more frequencies and channels than this (32 MiB) are not kept; slices are multiplied instead."""


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

    ``tap`` is the first such ``i``; ``places`` are counted from the first that is not padding.
    """

    tap: int
    places: slice
    sign: int

    @property
    def size(self) -> int:
        return self.places.stop - self.places.start


@dataclass(frozen=True)
class _Axis:
    """An axis along which ``out`` windows of ``taps`` places without gaps move by one place.

    ``first`` is the first place that is not a padded zero, ``last`` the place after the last such place.
    """

    taps: int
    out: int
    first: int
    last: int

    def borders(self) -> list[_Border]:
        """Returns the borders that are not just padding."""
        found = []
        for start, sign in ((self.out, 1), (0, -1)):
            low, high = max(start, self.first), min(start + self.taps - 1, self.last)
            if low < high:
                found.append(_Border(low - start, slice(low - self.first, high - self.first), sign))
        return found


class _Correlation:
    """Sums of ``x_p x_{p + lag}^T`` over all places ``p``; the other factor lies in the same line or a later one."""

    def __init__(self, z: Tensor, line_taps: int, column_taps: int):
        self.groups, self.width, _, self.lines, self.columns = z.shape
        self.line_taps, self.column_taps = line_taps, column_taps
        # With so many zeros behind it, the circular correlation is the plain one.
        self.sizes = (self.lines + line_taps - 1, self.columns + column_taps - 1)
        frequencies = (self.sizes[0] // 2 + 1) * self.sizes[1]
        size = frequencies * self.groups * (2 * self.width) ** 2 * z.element_size()
        # Multiply-adds per place and channel, each way; products of a few channels are slow for their number.
        transforms = sum(self.sizes) + frequencies * 4 * self.width / (self.lines * self.columns)
        direct = line_taps * (2 * column_taps - 1) * max(self.width, 8)
        self.by_frequency = line_taps > 1 and size <= SPECTRUM_BYTES and 2 * transforms < direct
        if self.by_frequency:
            self.total = z.new_zeros(frequencies * self.groups, 2 * self.width, 2 * self.width)
        else:
            self.total = z.new_zeros(2 * column_taps - 1, self.groups, self.width, line_taps * self.width)

    def add(self, z: Tensor) -> None:
        """Adds the products of more samples ``[g, width, samples, lines, columns]``."""
        if self.by_frequency:
            spectrum = self._spectrum(z)
            add_product(self.total, spectrum, spectrum.mT)
            return
        run = z.shape[2]
        y = z.permute(0, 3, 1, 4, 2).flatten(3)
        lags = range(1 - min(self.column_taps, self.columns), min(self.column_taps, self.columns))
        for line in range(self.lines):
            near, far = y[:, line], y[:, line : line + self.line_taps].flatten(1, 2)
            for lag in lags:
                start, other, size = max(0, -lag) * run, max(0, lag) * run, (self.columns - abs(lag)) * run
                total = self.total[lag + self.column_taps - 1][..., : far.shape[1]]
                add_product(total, near[..., start : start + size], far[..., other : other + size].mT)

    def _spectrum(self, z: Tensor) -> Tensor:
        """Returns the Fourier transform by lines and columns, with real and imaginary parts as further channels.

        Maps are small, so two products are faster than a fast transform, and leave the samples in front of memory.
        """
        lines, columns = (self._waves(axis, z).flatten(0, 1) for axis in (0, 1))
        y = lines @ z.permute(3, 4, 0, 1, 2).reshape(self.lines, -1)
        # A product with cos - i sin of what has two parts itself.
        cos, sin = columns[0::2], columns[1::2]
        both = torch.stack([torch.cat([cos, -sin], 1), torch.cat([sin, cos], 1)], 1).flatten(0, 1)
        y = both @ y.view(-1, 2 * self.columns, z.shape[:3].numel())
        return y.view(-1, 2, *z.shape[:3]).transpose(1, 2).reshape(self.total.shape[0], 2 * self.width, -1)

    def _waves(self, axis: int, like: Tensor) -> Tensor:
        """Returns the real and imaginary parts of a transform, ``[frequencies, 2, places]``; half of those of lines."""
        size, places = self.sizes[axis], (self.lines, self.columns)[axis]
        frequencies = size // 2 + 1 if axis == 0 else size
        angles = _angles(frequencies, torch.arange(places), size)
        return torch.stack([angles.cos(), -angles.sin()], 1).to(like)

    def lags(self) -> Tensor:
        """Returns the sums as ``[line lags from 0, column lags from 1 - taps, g, width, width]``."""
        if not self.by_frequency:
            total = self.total.view(-1, self.groups, self.width, self.line_taps, self.width)
            return total.permute(3, 0, 1, 2, 4)
        (height, size), half = self.sizes, self.sizes[0] // 2 + 1
        total = self.total.view(-1, self.groups, 2, self.width, 2, self.width)
        (rr, ri), (ir, ii) = (total.select(2, part).unbind(3) for part in (0, 1))
        lines = _angles(half, torch.arange(self.line_taps), height).T
        columns = _angles(size, torch.arange(1 - self.column_taps, self.column_taps), size).T
        angles = (lines[:, None, :, None] + columns[None, :, None, :]).flatten(2)
        # The other half of the frequencies of lines has the conjugate values.
        twice = 1 + ((torch.arange(half) > 0) & (2 * torch.arange(half) != height)).to(angles.dtype)
        weights = (twice / (height * size)).repeat_interleave(size)
        cos, sin = ((weights * wave).to(total).flatten(0, 1) for wave in (angles.cos(), angles.sin()))
        found = cos @ (rr + ii).flatten(1) - sin @ (ri - ir).flatten(1)
        return found.view(self.line_taps, -1, self.groups, self.width, self.width)


def _angles(frequencies: int, places: Tensor, size: int) -> Tensor:
    return 2 * math.pi / size * torch.arange(frequencies, dtype=torch.float64)[:, None] * places


class _Columns:
    """Correlations of whole lines whose columns lie in windows."""

    def __init__(self, z: Tensor, line_taps: int, columns: _Axis):
        self.columns, self.all = columns, _Correlation(z, line_taps, columns.taps)
        self.borders = [(one, _Correlation(_strip(z, 4, one), line_taps, 1)) for one in columns.borders()]

    def add(self, z: Tensor) -> None:
        self.all.add(z)
        for border, sums in self.borders:
            sums.add(_strip(z, 4, border))

    def blocks(self) -> Tensor:
        """Returns the sums as ``[k, k, line lags, g, width, width]`` for all pairs of taps."""
        borders = []
        for border, sums in self.borders:
            change = sums.lags()[:, 0].unflatten(3, (border.size, -1)).unflatten(2, (border.size, -1))
            borders.append((border, change.permute(2, 4, 0, 1, 3, 5)))
        return _in_windows(self.all.lags().transpose(0, 1), borders)


def _strip(z: Tensor, axis: int, border: _Border) -> Tensor:
    """Returns the places of a border as further channels."""
    return z.narrow(axis, border.places.start, border.size).movedim(axis, 1).flatten(1, 2).unsqueeze(axis)


def _in_windows(lags: Tensor, borders: list[tuple[_Border, Tensor]]) -> Tensor:
    """Returns ``S(i, j)`` from the sums over all places, by lag from ``1 - k``, and the products at each border."""
    k = (len(lags) + 1) // 2
    blocks = lags.new_zeros(k, k, *lags.shape[1:])
    blocks[0], blocks[1:, 0] = lags[k - 1 :], lags[: k - 1].flip(0)
    for border, change in borders:
        for lag in range(border.size if border.sign > 0 else 0):
            blocks[0, lag] -= change.diagonal(lag).sum(-1)
            if lag:
                blocks[lag, 0] -= change.diagonal(-lag).sum(-1)
    for border, change in borders:
        taps = slice(1 + border.tap, 1 + border.tap + border.size)
        blocks[taps, taps].add_(change, alpha=border.sign)
    for i in range(1, k):
        blocks[i, 1:] += blocks[i - 1, :-1]
    return blocks


def _samples_last(x: Tensor) -> Tensor:
    """Returns the same tensor, with samples side by side in memory if torch's fast transposition applies."""
    if x.shape[0] < 60 or not x.is_contiguous():
        return x
    return x.flatten(1).t().contiguous().t().unflatten(1, x.shape[1:])


class _Overlap:
    """The Gram matrix of a convolution whose windows overlap along ``line_axis`` (if not None) and ``column_axis``."""

    def __init__(self, rows: Rows, line_axis: int | None, column_axis: int):
        self.rows, self.line_axis, self.column_axis = rows, line_axis, column_axis
        # Along these, windows are cut out.
        self.others = [axis for axis in range(rows.geometry.dims) if axis not in (line_axis, column_axis)]

    def add(self, total: Tensor, x: Tensor, margins: Margins) -> None:
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
        whole: _Columns | None = None
        edges: list[tuple[_Border, _Columns]] = []
        for z in pieces:
            if whole is None:
                whole = _Columns(z, lines.taps, columns)
                edges = [(one, _Columns(_strip(z, 3, one), 1, columns)) for one in lines.borders()]
            whole.add(z)
            for border, sums in edges:
                sums.add(_strip(z, 3, border))
        if whole is None:
            return
        borders = []
        for border, sums in edges:
            change = sums.blocks()[:, :, 0].unflatten(4, (border.size, -1)).unflatten(3, (border.size, -1))
            borders.append((border, change.permute(3, 5, 0, 1, 2, 4, 6)))
        lags = whole.blocks().movedim(2, 0)
        earlier = lags[1:].transpose(1, 2).mT.flip(0)
        self._assemble(total, _in_windows(torch.cat([earlier, lags]), borders))

    def _pieces(self, x: Tensor, lines: slice, columns: slice) -> Iterator[Tensor]:
        """Yields lines and columns of a few samples at a time as ``[g, width, samples, lines, columns]``.

        The width is the channels and the taps of the other axes, whose places count as samples.
        """
        rows, others = self.rows, self.others
        taps = range(3 + rows.geometry.dims, 3 + rows.geometry.dims + len(others))
        growth = math.prod(rows.taps[axis] for axis in others)
        for part in x.chunk(-(-x.numel() * growth * x.element_size() // PIECE_BYTES)):
            windows = rows.unfold(_samples_last(part), others).unflatten(1, (rows.groups, rows.kernel_shape[1]))
            windows = windows.unsqueeze(-1) if self.line_axis is None else windows
            line_dim = windows.dim() - 1 if self.line_axis is None else 3 + self.line_axis
            places = [3 + axis for axis in others]
            windows = windows.permute(1, 2, *taps, 0, *places, line_dim, 3 + self.column_axis)[..., lines, columns]
            yield windows.flatten(2 + len(others), -3).flatten(1, 1 + len(others))

    def _assemble(self, total: Tensor, blocks: Tensor) -> None:
        """Adds ``S``, which is ``[k, k, k', k', g, width, width]`` for lines and columns, to the Gram matrix."""
        rows, dims = self.rows, self.rows.geometry.dims
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
