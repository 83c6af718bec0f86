"""Upper bounds on the squared norm of a layer that hold for every input size."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from solver_plugins.operators.boundary import lattice_bounds
from solver_plugins.operators.geometry import Geometry
from solver_plugins.operators.krylov import lanczos_estimate
from solver_plugins.operators.symbol import GramSymbol, frequencies, grid_for, polyphase

_DIRECT_SIDE = 1024
"""Up to this side one real matrix is decomposed; above, its bound is estimated and proved."""
_DIRECT_WORK = 2e8
"""Up to this many ``count * side^3`` a batch of complex matrices is decomposed."""
_CHUNK = 1 << 22
"""How many entries of frequency matrices exist at a time."""


def certified_bound(
    kernel: Tensor, geometry: Geometry, input_size: Sequence[int] | None = None, tolerance: float = 0.1
) -> Tensor:
    """Returns a number that is never below ``lambda_max(A A^T)``, for one input size or, without it, for all.

    For zero padding, and for circular padding with stride 1, it is at most ``1 + tolerance`` times the supremum over
    sizes.
    The kernel must be float64: the bound contains all rounding errors of that precision.
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
    slack = tolerance / 10
    # The rest of the tolerance belongs to the grid; the slack is spent once or twice when eigenvalues are not computed.
    grid, factor = grid_for(blocks.shape[3:], (1 + tolerance) / (1 + 2 * slack) - 1)
    gram = GramSymbol.of(blocks)
    points = frequencies(grid, kernel.device, kernel.dtype)
    count, side = len(points) * groups, gram.side
    direct = side <= _DIRECT_SIDE if gram.is_real and count == 1 else side == 1 or count * side**3 <= _DIRECT_WORK
    step = max(1, _CHUNK // (groups * side * side + len(gram.lags)))
    if not direct:
        # In a mixed order the first chunk has a frequency near the top, and later ones seldom raise the bound.
        points = points[torch.arange(len(points), device=points.device) * _coprime(len(points)) % len(points)]
    bound = kernel.new_zeros(())
    for chunk in points.split(step):
        matrices = gram.real_at(chunk).flatten(0, 1)
        if not gram.is_real:
            matrices = torch.complex(matrices, gram.imaginary_at(chunk).flatten(0, 1))
        if side == 1:
            bound = torch.maximum(bound, matrices.amax())
        elif direct:
            bound = torch.maximum(bound, torch.linalg.eigvalsh(matrices).amax())
        else:
            bound = _proved_bound(matrices, bound, min(slack, 2e-3) if gram.is_real else slack)
    # Products of length c, sums over the taps and a decomposition of side m: errors relative to trace(G) <= m |G|.
    depth = blocks[0].numel() // side + len(gram.lags) + side
    rounding = 8 * torch.finfo(kernel.dtype).eps * side * depth
    return bound * (factor * (1 + rounding))


def _proved_bound(matrices: Tensor, bound: Tensor, slack: float) -> Tensor:
    """Raises ``bound`` until ``bound I - G`` has a Cholesky factor, i.e. is positive definite, for all ``G``.

    Where it has none an estimate from below tells how far to go; a factorisation costs a tenth of the eigenvalues.
    """
    estimated = False
    while True:
        if bound > 0:
            eye = torch.eye(matrices.shape[-1], device=matrices.device, dtype=matrices.dtype)
            failed = torch.linalg.cholesky_ex(bound * eye - matrices).info > 0
            if not failed.any():
                return bound
            matrices = matrices[failed]
        if estimated:
            bound = bound * (1 + slack)
            slack = 2 * slack
        else:
            estimate = lanczos_estimate(matrices)
            if estimate == 0:
                return bound
            bound = torch.maximum(bound, estimate * (1 + slack))
            estimated = True


def _coprime(count: int) -> int:
    """Returns a stride near ``0.618 count`` that visits every index once."""
    return next(step for step in range(max(1, round(0.618 * count)), count + 2) if math.gcd(step, count) == 1)
