"""Gram matrices ``X^T X`` of a layer's rows, in bounded memory.

For a convolution the entries of ``X^T X`` repeat: rows ``p`` and taps ``i, j`` meet in ``x[p + i] x[p + j]``, which
depends on ``p + i`` and ``j - i`` only. Cutting windows along all axes but the first gives matrices ``U_q``, one per
line ``q`` of the input, and (stride 1, dilation ``e``)

    block (i, j = i + h) of X^T X  =  sum_{q = e i}^{e i + out - 1} U_q^T U_{q + e h}

All blocks of one ``h`` share the lines ``e (k - 1 - h) <= q < out``: those are summed once, and only the few lines at
the borders are added per block. That is ``k`` products where im2col has ``k^2``.
"""

import math

from torch import Tensor

from solver_plugins.proxprop.products import add_product, multiply
from solver_plugins.proxprop.rows import PIECE_BYTES, Rows


def gram(rows: Rows, x: Tensor) -> Tensor:
    """Returns ``X^T X`` as ``[g, d, d]`` for a prepared input."""
    geometry = rows.geometry
    if geometry.dims and rows.taps[0] > 1 and geometry.stride[0] == 1:
        reach = geometry.dilation[0] * (rows.taps[0] - 1)
        if x.shape[2] - reach >= reach and x.shape[0]:
            return _by_lines(rows, x)
    total = x.new_zeros(rows.groups, rows.columns, rows.columns)
    for matrix in rows.matrices(x):
        add_product(total, matrix.mT, matrix)
    return total


def _by_lines(rows: Rows, x: Tensor) -> Tensor:
    dims, k, e = rows.geometry.dims, rows.taps[0], rows.geometry.dilation[0]
    channels, groups = rows.kernel_shape[1], rows.groups
    rest = math.prod(rows.taps[1:])
    width, lines = channels * rest, x.shape[2]
    total = x.new_zeros(groups, k, width, k, width)
    sample = rows.unfold(x[:1], first_axis=1)
    places, taps = range(4, 3 + dims), range(3 + dims, 2 + 2 * dims)
    for part in x.split(max(1, PIECE_BYTES // max(sample.numel() * x.element_size(), 1))):
        # U: [g, channels * taps, lines, batch * places]: copied in long runs, and neighbouring lines are one slice.
        u = rows.unfold(part, first_axis=1).reshape(part.shape[0], groups, channels, lines, *sample.shape[3:])
        u = u.permute(1, 2, *taps, 3, 0, *places).reshape(groups, width, lines, -1)
        for h in range(k):
            _add_blocks(total, u, h, k, e, _zero_lines(rows))
    for i in range(k):
        for j in range(i):
            total[:, i, :, j] = total[:, j, :, i].mT
    # Columns are (tap, channel, other taps) here, (channel, tap, other taps) in a weight.
    total = total.reshape(groups, k, channels, rest, k, channels, rest).permute(0, 2, 1, 3, 5, 4, 6)
    return total.reshape(groups, rows.columns, rows.columns)


def _zero_lines(rows: Rows) -> tuple[int, int]:
    """Returns how many lines in front and behind are known to be padding with zeros."""
    padding = rows.geometry.padding
    if padding == "same_dynamic" or rows.geometry.padding_mode != "zeros":
        return 0, 0
    return padding[0]


def _add_blocks(total: Tensor, u: Tensor, h: int, k: int, e: int, zeros: tuple[int, int]) -> None:
    """Adds the blocks ``(i, i + h)`` of one piece."""
    lines = u.shape[2]
    out = lines - e * (k - 1)
    low, high = zeros[0], lines - zeros[1] - e * h

    def product(first: int, last: int) -> Tensor | None:
        first, last = max(first, low), min(last, high)
        if first >= last:
            return None
        near, far = u[:, :, first:last].flatten(2), u[:, :, first + e * h : last + e * h].flatten(2)
        return multiply(near, far.mT)

    moves = k - 1 - h
    shared = product(e * moves, out)
    for i in range(moves + 1):
        _add(total[:, i, :, i + h], shared)
    # Block i has the lines [e i, e moves) in front of the shared ones, and [out, out + e i) behind them.
    before = after = None
    for i in range(1, moves + 1):
        before = _sum(before, product(e * (moves - i), e * (moves - i + 1)))
        after = _sum(after, product(out + e * (i - 1), out + e * i))
        _add(total[:, moves - i, :, moves - i + h], before)
        _add(total[:, i, :, i + h], after)


def _add(block: Tensor, part: Tensor | None) -> None:
    if part is not None:
        block += part


def _sum(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    return left + right
