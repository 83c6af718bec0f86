"""Solvers of ``(I/tau + X^T X) v = g``, equation (16), as pure functions of matrices.

A leading dimension holds the groups of a convolution. A factorisation solves one system per group. Conjugate gradients
treat all outputs (and groups) as one vector, or each output on its own: ``M`` does not mix them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from solver_plugins.proxprop.errors import FactorizationError
from solver_plugins.proxprop.rows import multiply
from solver_plugins.solve import conjugate_gradients as block_conjugate_gradients


@dataclass(frozen=True)
class CgOutcome:
    """How conjugate gradients went: steps, and ``|g - M v| / |g|`` as the recurrence knows it; 0 if factorised."""

    iterations: int = 0
    residual: float = 0.0


def factorize(matrix: Tensor, shift: float) -> tuple[Tensor, float]:
    """Returns the Cholesky factor of ``shift I + matrix``, and the jitter that was added to ``shift``, usually 0.

    The matrix is overwritten. FactorizationError if a jitter as large as the matrix itself does not help.
    """
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    diagonal += shift
    factor, info = torch.linalg.cholesky_ex(matrix)
    if not info.any():
        return factor, 0.0
    largest = float(diagonal.amax())
    added, jitter = 0.0, torch.finfo(matrix.dtype).eps * largest
    while jitter <= largest:
        diagonal += jitter - added
        added = jitter
        factor, info = torch.linalg.cholesky_ex(matrix)
        if not info.any():
            return factor, added
        jitter *= 10
    raise FactorizationError(
        f"Expected X^T X to be positive semidefinite; found a matrix of size {matrix.shape[-1]} with a diagonal up to "
        f"{largest:.3g} that is not, even with jitter. Are the activations extremely large? Normalise the inputs."
    )


def conjugate_gradients(
    apply: Callable[[Tensor], Tensor], g: Tensor, steps: int, joint: bool
) -> tuple[Tensor, CgOutcome]:
    """Returns the iterate after ``steps`` steps of conjugate gradients on ``M v = g`` from ``v = 0``.

    It starts at zero because a warm start loses the descent property (Proposition 5). Denominators have no epsilon,
    because gradients may be as small as it. Fewer steps are taken if the residual vanishes. With ``joint``, all outputs
    have one step length, instead of one each.
    """
    dims = (0, 1, 2) if joint else (2,)
    scale = _largest(g, dims)
    v, residual, taken = block_conjugate_gradients(apply, g / scale, dims, steps, stop=True)
    return v.mul_(scale), CgOutcome(taken, float(residual.amax()))


def batch_conjugate_gradients(
    k: Tensor, d: Tensor, shift: float, steps: int, joint: bool
) -> tuple[Tensor, Tensor | None, CgOutcome]:
    """Solves in the space of the rows: ``X^T y`` is the iterate of :func:`conjugate_gradients` for ``g = X^T d``.

    Every vector of that iteration is ``X^T`` times a vector with a row per sample. With ``K = X X^T``, ``M X^T p = X^T
    (shift p + K p)`` and ``<X^T a, X^T b> = <a, K b>``: one product with ``K`` per step. If all outputs have the same
    step lengths, and there are more outputs than rows, the vectors ``p = P d`` are stored as polynomials ``P`` in
    ``K``, which are smaller.

    It returns ``y``, or a matrix and a right factor (``d``) whose product it is; and how the solve went. The residual
    is that before the last step, because the final one would cost another product.
    """
    dims = (0, 1, 2) if joint else (1,)
    size = float(k.diagonal(dim1=-2, dim2=-1).amax()) if k.numel() else 1.0
    if not torch.finfo(k.dtype).max ** 0.25 < size < math.inf:
        size = 1.0
    # Squares of K could overflow; a multiple of the matrix has the same iterates.
    k, shift = (k / size if size != 1 else k), shift / size
    scale = _largest(d, dims)
    d = d / scale
    implicit = joint and d.shape[2] > d.shape[1]
    weighting = multiply(d, d.mT) if implicit else None

    def weigh(a: Tensor) -> Tensor:
        return a if weighting is None else multiply(a, weighting)

    def dot(a: Tensor, b: Tensor) -> Tensor:
        return torch.dot(a.reshape(-1), b.reshape(-1)).reshape(1, 1, 1) if joint else (a * b).sum(1, keepdim=True)

    r = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device).expand_as(k) if implicit else d
    kr = multiply(k, r) if not implicit else k
    weighted = weigh(kr)
    y = torch.zeros_like(kr)
    p, kp, kpw = r, kr, weighted
    squared = start = dot(r, weighted)
    taken = 0
    while bool((moving := squared > torch.finfo(d.dtype).eps ** 2 * start).any()):
        curvature = shift * dot(p, kpw) + dot(kp, kpw)
        alpha = torch.where(moving, squared / torch.where(moving, curvature, 1.0), 0.0)
        y.addcmul_(alpha, p)
        taken += 1
        if taken == steps:
            break
        r = r - alpha * (shift * p + kp)
        kr = multiply(k, r)
        weighted = weigh(kr)
        before, squared = squared, torch.where(moving, dot(r, weighted), squared)
        beta = torch.where(moving, squared / torch.where(moving, before, 1.0), 0.0)
        p, kp = torch.addcmul(r, beta, p), torch.addcmul(kr, beta, kp)
        kpw = torch.addcmul(weighted, beta, kpw) if implicit else kp
    shares = squared.clamp_min(0.0) / torch.where(start > 0, start, 1.0)
    y = y / size if implicit else y.mul_(scale / size)
    return y, d * scale if implicit else None, CgOutcome(taken, float(shares.amax()) ** 0.5)


def _largest(g: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Returns the size of the largest entry, which keeps squares in the range of their precision; one for zeros.

    Directions are homogeneous in the gradient, so it may be divided by any number.
    """
    if not g.numel():
        return g.new_ones((1, 1, 1))
    largest = g.abs().amax(dims, keepdim=True)
    return torch.where(largest > 0, largest, 1.0)
