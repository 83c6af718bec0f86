"""Upper bounds on the squared norm of a layer that hold for every input size.

The squared norm on the infinite lattice is ``M = sup_w lambda_max(G(w))``. The search holds a number ``lower <= M`` and
proves ``M <= beta = (1 + tolerance) lower`` cell by cell (:mod:`~solver_plugins.operators.cells`): a Cholesky factor of
``beta shrink I - G(centre)`` exists only if that matrix is positive definite, and costs a tenth of its eigenvalues.
Where there is none, Lanczos raises ``lower`` or the cell is split. A proved cell stays proved, because ``beta`` never
falls. The search ends: a failure shows ``M >= beta shrink``, which is above ``lower`` once the cells are small.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from solver_plugins.operators.boundary import lattice_bounds
from solver_plugins.operators.cells import Cells, covering
from solver_plugins.operators.geometry import Geometry
from solver_plugins.operators.krylov import lanczos_estimates
from solver_plugins.operators.symbol import GramSymbol, frequencies, polyphase

_DIRECT_SIDE = 256
"""Up to this side, the eigenvalues of a real matrix are computed directly."""
_MATRIX_TOLERANCE = 0.01
"""For a real matrix there are no cells to save, and a tighter bound costs nothing."""
_COARSEST = 3.0
"""The largest factor between centre and cell at the start."""
_CHUNK = 3 << 19
"""How many entries of frequency matrices exist at a time; allocators reuse blocks of this size, but not larger ones."""


def certified_bound(
    kernel: Tensor, geometry: Geometry, input_size: Sequence[int] | None = None, tolerance: float = 0.1
) -> Tensor:
    """Returns a number that is never below ``lambda_max(A A^T)``, for one input size or, by default, for all.

    For zero padding, and for circular padding with stride 1, it is at most ``1 + tolerance`` times the supremum over
    sizes. The kernel must be float64: the bound includes all rounding errors of that precision.
    """
    # Scaled to entries of at most one, so that squares neither underflow nor overflow.
    scale = kernel.abs().amax() if kernel.numel() else kernel.new_zeros(())
    if scale == 0:
        return torch.zeros_like(scale)
    bounds = [
        _supremum(kernel / scale, stride, geometry.groups, tolerance) * factor
        for stride, factor in lattice_bounds(geometry, kernel.shape[2:], input_size)
    ]
    return torch.stack(bounds).amin() * scale * scale


def _supremum(kernel: Tensor, stride: Sequence[int], groups: int, tolerance: float) -> Tensor:
    """Returns a bound on ``sup_w lambda_max(P(w) P(w)^H)``, the largest over the groups."""
    blocks = polyphase(kernel, stride, groups)
    gram = GramSymbol.of(blocks)
    degrees = [length - 1 for length in blocks.shape[3:]]
    if not any(degrees) and gram.side <= _DIRECT_SIDE:
        bound = torch.linalg.eigvalsh(gram.even[0]).amax()
    else:
        bound = _searched(gram, degrees, tolerance if any(degrees) else min(tolerance, _MATRIX_TOLERANCE))
    # Products of length c, sums over the taps and a decomposition of side m have errors relative to trace(G) <= m |G|.
    # Each lag has a norm of |G| at most, and the cosine of a rounded angle of up to 2 pi m_j.
    depth = blocks[0].numel() // gram.side + len(gram.lags) + gram.side
    angles = len(gram.lags) * (1 + 2 * math.pi * sum(degrees))
    rounding = 8 * torch.finfo(kernel.dtype).eps * (gram.side * depth + angles)
    return bound * (1 + rounding)


def _searched(gram: GramSymbol, degrees: Sequence[int], tolerance: float) -> Tensor:
    """Returns ``(1 + tolerance) lower`` once it is proved not to be below the supremum."""
    # A thousandth of the tolerance is left for rounding.
    tolerance = 0.999 * tolerance
    lower, usual = _estimates(gram, degrees)
    # If most frequencies are far below the top, large cells are enough for them.
    factor = min(float(lower / usual), _COARSEST) * (1 + tolerance)
    cells = covering(degrees, factor, gram.lags.device)
    while len(cells.centres):
        lower, failed = _sweep(gram, cells, lower, tolerance)
        cells = cells.split(failed)
    return lower * (1 + tolerance)


def _estimates(gram: GramSymbol, degrees: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Returns a number below the supremum, and one above 90% of the eigenvalues on a coarse grid."""
    points = frequencies([max(1, 2 * degree) for degree in degrees], gram.lags.device, gram.lags.dtype)
    tops = torch.cat([lanczos_estimates(matrices).amax(1) for matrices in _matrices(gram, points)])
    # The mean of G over all frequencies is R_0, whose diagonal is positive unless all weights are zero.
    floor = gram.even[0].diagonal(dim1=-2, dim2=-1).amax()
    tops = tops.sort().values.maximum(floor)
    return tops[-1], tops[(9 * (len(tops) - 1)) // 10]


def _sweep(gram: GramSymbol, cells: Cells, lower: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
    """Tries to prove every cell; returns the new ``lower`` and a mask of the cells to split."""
    masks = []
    share = (1 + tolerance) * cells.shrink
    for matrices in _matrices(gram, cells.centres):
        failed = ~_below(matrices, lower * share)
        if failed.any():
            # Without a factor, a matrix is not below the number that it was compared with, up to rounding.
            rest = matrices[failed]
            lower = torch.maximum(torch.maximum(lower, lower * share), lanczos_estimates(rest).amax())
            failed[failed.clone()] = ~_below(rest, lower * share)
        masks.append(failed.any(1))
    return lower, torch.cat(masks)


def _matrices(gram: GramSymbol, points: Tensor) -> Iterator[Tensor]:
    """Yields ``G`` at a few frequencies at a time, shape ``(few, groups, m, m)``; as real numbers if it is real."""
    entries = gram.even[0].numel()
    for some in points.split(max(1, _CHUNK // entries)):
        real = gram.real_at(some)
        yield real if gram.is_real else torch.complex(real, gram.imaginary_at(some))


def _below(matrices: Tensor, bound: Tensor) -> Tensor:
    """Whether ``bound I - G`` is positive definite, for matrices ``(..., m, m)``."""
    if matrices.shape[-1] == 1:
        return matrices[..., 0, 0] < bound
    # G - bound I is negated in place and back: another copy would take a fifth of the time.
    diagonal = matrices.diagonal(dim1=-2, dim2=-1)
    before = diagonal.clone()
    diagonal.sub_(bound)
    below = torch.linalg.cholesky_ex(matrices.neg_()).info == 0
    matrices.neg_()
    diagonal.copy_(before)
    return below
