"""The symbol of a convolution on the infinite lattice, and bounds on its supremum by a grid of frequencies.

A convolution with stride ``s`` maps the ``s`` phases of its input by unstrided convolutions. Its symbol is the matrix
``P(w) = sum_t W_t exp(-i w t)`` of shape ``(n2, n1 * phases)`` with the polyphase kernel ``W_t`` of length
``ceil(k / s)``, and its squared norm is ``sup_w lambda_max(P(w) P(w)^H)``. On a grid of frequencies this is Lemma 2,
eq. (6), of the paper.

**From grid to supremum.** For unit vectors ``x, y``, ``|y^H P(w) x|^2`` is a nonnegative trigonometric polynomial of
degree ``m = length - 1`` along each dimension. With ``M`` its maximum, ``T - M/2`` is bounded by ``M/2``, hence (M.
Riesz) ``T(w) - M/2 >= M/2 cos(m (w - w*))`` near the maximum ``w*``. Some point of an N-point grid is within ``pi/N``,
so ``M <= T(grid) / cos(m pi / (2 N))^2``, with one such factor per dimension, for every ``N > m``.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from solver_plugins.operators.boundary import lattice_bounds
from solver_plugins.operators.geometry import Geometry
from solver_plugins.operators.precision import autocast_off, scaled_kernel

COLUMN_TOLERANCE = 0.1
_POWER_SLACK = 1.05
_SMALL = 128
"""Up to this many rows times taps, one product gives all lags, which are few operations for a compiler."""
_HALVED = 256
"""From twice this many rows on, the symmetry of a product is used."""


def polyphase(kernel: Tensor, stride: Sequence[int], groups: int) -> Tensor:
    """Splits a kernel ``[n2, n1/groups, *k]`` into ``[groups, n2/groups, n1/groups * phases, *length]``.

    Phases without a tap are left out: a 1x1 kernel with stride 2 has one phase.
    """
    blocks = kernel.reshape(groups, kernel.shape[0] // groups, *kernel.shape[1:])
    for axis, step in enumerate(stride, start=3):
        taps = blocks.shape[axis]
        if step == 1:
            continue
        phases, length = min(step, taps), -(-taps // step)
        if length > 1:
            missing = length * step - taps
            blocks = functional.pad(blocks, [0, 0] * (blocks.ndim - 1 - axis) + [0, missing])
        blocks = blocks.unflatten(axis, (length, phases)).movedim(axis + 1, 2).flatten(2, 3)
    return blocks


def frequencies(grid: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Returns one of each pair ``w, -w`` of an N-point grid per dimension, shape ``(F, dims)``."""
    if not grid:
        return torch.zeros(1, 0, device=device, dtype=dtype)
    # Real kernels have P(-w) = conj P(w), so the last sampled dimension can be halved.
    # Not max(..., default=0), which the compiler of torch 2.10 cannot follow.
    halved = max([0, *(axis for axis, n in enumerate(grid) if n > 1)])
    axes = [
        torch.arange(n // 2 + 1 if axis == halved else n, device=device).to(dtype) * (2 * math.pi / n)
        for axis, n in enumerate(grid)
    ]
    return torch.stack([axis.flatten() for axis in torch.meshgrid(*axes, indexing="ij")], dim=-1)


def tap_positions(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Returns the position of each tap of a flattened kernel as whole numbers, shape ``(taps, dims)``."""
    if not lengths:
        return torch.zeros(1, 0, dtype=torch.int64, device=device)
    axes = [torch.arange(length, device=device) for length in lengths]
    return torch.stack([axis.flatten() for axis in torch.meshgrid(*axes, indexing="ij")], dim=-1)


def grid_for(lengths: Sequence[int], tolerance: float) -> tuple[tuple[int, ...], float]:
    """Returns the grid per dimension whose factor is at most ``1 + tolerance``, and the factor."""
    sampled = sum(length > 1 for length in lengths)
    if not sampled:
        return (1,) * len(lengths), 1.0
    angle = math.acos((1 + tolerance) ** (-0.5 / sampled))
    # A grid of 2m + 1 points or more keeps the factor finite for any tolerance.
    grid = tuple(
        1 if length == 1 else max(2 * length - 1, math.ceil((length - 1) * math.pi / (2 * angle))) for length in lengths
    )
    factor = 1.0
    for length, n in zip(lengths, grid, strict=True):
        factor = factor / math.cos((length - 1) * math.pi / (2 * n)) ** 2
    return grid, factor


@dataclass(frozen=True, eq=False)
class GramSymbol:
    """``P(w) P(w)^H`` or ``P(w)^H P(w)``, whichever is smaller, from the autocorrelation of the kernel.

    ``G(w) = R_0 + sum_{j > 0} R_j exp(-i w j) + R_j^T exp(i w j)`` with ``R_j = sum_t W_{t+j} W_t^T``. The products are
    computed once, not once per frequency, and in real arithmetic: ``even`` is ``R_0`` and ``R_j + R_j^T``, ``odd`` is
    ``0`` and ``R_j^T - R_j``, both of shape ``(lags, groups, m, m)``, for lags ``(lags, dims)``.
    """

    even: Tensor
    odd: Tensor
    lags: Tensor

    @classmethod
    def of(cls, blocks: Tensor) -> "GramSymbol":
        """Returns the Gram symbol of polyphase blocks ``[groups, rows, columns, *length]``."""
        if blocks.shape[1] > blocks.shape[2]:
            blocks = blocks.transpose(1, 2)
        lengths = blocks.shape[3:]
        # One lag of each pair j, -j is kept; zero is the middle one.
        lags = list(itertools.product(*(range(-length + 1, length) for length in lengths)))
        lags = lags[len(lags) // 2 :]
        positions = torch.tensor(lags, device=blocks.device, dtype=blocks.dtype).reshape(len(lags), len(lengths))
        if len(lags) == 1:
            even = _correlate(blocks, lags[0])[None]
            return cls(even, even.new_zeros(()).expand_as(even), positions)
        if blocks.shape[1] * math.prod(lengths) <= _SMALL:
            correlations = list(_correlate_all(blocks)[-len(lags) :])
        else:
            correlations = [_correlate(blocks, lag) for lag in lags]
        correlations[0] = correlations[0] / 2
        return cls(
            # Stacked after the sums, because the sum of a stack and its transpose would not be contiguous.
            even=torch.stack([correlation + correlation.mT for correlation in correlations]),
            odd=torch.stack([correlation.mT - correlation for correlation in correlations]),
            lags=positions,
        )

    @property
    def side(self) -> int:
        """``m``."""
        return self.even.shape[-1]

    @property
    def is_real(self) -> bool:
        """Whether the imaginary part vanishes: there is no lag but zero, or the matrices are numbers."""
        return len(self.lags) == 1 or self.side == 1

    def real_at(self, points: Tensor) -> Tensor:
        """Returns the real part at frequencies ``(F, dims)``, shape ``(F, groups, m, m)``."""
        return _combine((points @ self.lags.T).cos(), self.even)

    def imaginary_at(self, points: Tensor) -> Tensor:
        """Returns the imaginary part at frequencies ``(F, dims)``, shape ``(F, groups, m, m)``."""
        return _combine((points @ self.lags.T).sin(), self.odd)


def column_suprema(
    kernel: Tensor, geometry: Geometry, diagonal: Tensor | None, input_size: Sequence[int] | None
) -> Tensor:
    """Returns an upper bound on ``lambda_max(A_i A_i^T)`` for each input channel ``i`` alone, shape ``(n1,)``.

    It reads no value, so it may be called in a compiled forward pass.
    """
    with autocast_off(kernel.device):
        groups, outputs = geometry.groups, kernel.shape[0] // geometry.groups
        # In float64, because reduced precision of float32 products (TF32) would break the bound. MPS has no float64.
        dtype = torch.float32 if kernel.device.type == "mps" else torch.float64
        single = scaled_kernel(kernel, diagonal, dtype).reshape(groups, outputs, *kernel.shape[1:]).transpose(1, 2)
        single = single.reshape(-1, 1, *kernel.shape[2:])
        channels = kernel.shape[1] * groups
        bound = None
        for stride, factor in lattice_bounds(geometry, kernel.shape[2:], input_size):
            blocks = polyphase(single, stride, channels)
            grid, slack = grid_for(blocks.shape[3:], COLUMN_TOLERANCE)
            gram = GramSymbol.of(blocks)
            points = frequencies(grid, blocks.device, blocks.dtype)
            new = _eigenvalue_bound(gram, points).amax(0) * (slack * factor)
            bound = new if bound is None else torch.minimum(bound, new)
        assert bound is not None
        return bound * (1 + 64 * torch.finfo(bound.dtype).eps)


def _eigenvalue_bound(gram: GramSymbol, points: Tensor) -> Tensor:
    """Returns ``|G^q|_F^(1/q)`` with a power of two ``q``: never below ``lambda_max(G)``, and at most 5% above."""
    matrix = gram.real_at(points)
    if gram.side == 1:
        return matrix[..., 0, 0].clamp_min(0)
    if not gram.is_real:
        # A Hermitian matrix S + iK as a real one of twice the size, with the same eigenvalues twice.
        imaginary = gram.imaginary_at(points)
        matrix = torch.cat([torch.cat([matrix, -imaginary], -1), torch.cat([imaginary, matrix], -1)], -2)
    scale = torch.linalg.matrix_norm(matrix, keepdim=True)
    matrix = matrix / scale.clamp_min(torch.finfo(matrix.dtype).tiny)
    squarings = max(0, math.ceil(math.log2(math.log(matrix.shape[-1]) / math.log(_POWER_SLACK))) - 1)
    power, result = 1, scale[..., 0, 0]
    for _ in range(squarings):
        matrix, power = matrix @ matrix, power * 2
        norm = torch.linalg.matrix_norm(matrix, keepdim=True)
        matrix = matrix / norm.clamp_min(torch.finfo(matrix.dtype).tiny)
        result = result * norm[..., 0, 0] ** (1 / power)
    return result


def _correlate_all(blocks: Tensor) -> Tensor:
    """Returns ``R_j`` for all lags in order, from the products of all pairs of taps, shape ``(lags, groups, m, m)``."""
    groups, side = blocks.shape[:2]
    lengths = blocks.shape[3:]
    position = tap_positions(lengths, blocks.device)
    lag = torch.zeros(len(position), len(position), dtype=torch.int64, device=blocks.device)
    for axis, length in enumerate(lengths):
        lag = lag * (2 * length - 1) + (position[:, None, axis] - position[None, :, axis] + length - 1)
    taps = blocks.flatten(3).transpose(2, 3).flatten(1, 2)
    pairs = (taps @ taps.mT).reshape(groups, side, len(position), side, len(position))
    pairs = pairs.permute(2, 4, 0, 1, 3).flatten(0, 1)
    count = math.prod([2 * length - 1 for length in lengths])
    return pairs.new_zeros(count, groups, side, side).index_add(0, lag.flatten(), pairs)


def _correlate(blocks: Tensor, lag: Sequence[int]) -> Tensor:
    """Returns ``R_j = sum_t W_{t+j} W_t^T`` per group."""
    if not any(lag):
        return _outer(blocks.flatten(2))
    ahead, behind = blocks, blocks
    for axis, step in enumerate(lag, start=3):
        overlap = blocks.shape[axis] - abs(step)
        ahead = ahead.narrow(axis, max(step, 0), overlap)
        behind = behind.narrow(axis, max(-step, 0), overlap)
    return ahead.flatten(2) @ behind.flatten(2).mT


def _outer(rows: Tensor) -> Tensor:
    """Returns ``A A^T`` per group; for large ones the blocks above the diagonal are copied from below."""
    half = rows.shape[1] // 2
    if half < _HALVED:
        return rows @ rows.mT
    first, second = rows[:, :half], rows[:, half:]
    below = second @ first.mT
    upper = torch.cat([_outer(first), below.mT], -1)
    return torch.cat([upper, torch.cat([below, _outer(second)], -1)], -2)


def _combine(coefficients: Tensor, matrices: Tensor) -> Tensor:
    return (coefficients @ matrices.flatten(1)).unflatten(1, matrices.shape[1:])
