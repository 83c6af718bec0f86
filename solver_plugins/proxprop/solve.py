"""Solvers of ``(I/tau + X^T X) v = g``, equation (16), as pure functions of matrices.

A leading dimension holds the groups of a convolution. A factorisation solves one system per group; conjugate gradients
treat all groups as one vector.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from solver_plugins.proxprop.errors import FactorizationError
from solver_plugins.proxprop.products import multiply


@dataclass(frozen=True)
class CgOutcome:
    """How conjugate gradients went; the defaults are for a factorisation.

    Attributes:
        iterations: The number of steps.
        residual: ``|g - M v| / |g|`` as the recurrence knows it.
    """

    iterations: int = 0
    residual: float = 0.0


def factorize(matrix: Tensor, shift: float) -> tuple[Tensor, float]:
    """Returns the Cholesky factor of ``shift I + matrix``, and the jitter that was added to ``shift``, usually 0.

    The matrix is overwritten.

    Raises:
        FactorizationError: If a jitter as large as the matrix itself does not help.
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


def conjugate_gradients(apply: Callable[[Tensor], Tensor], g: Tensor, steps: int) -> tuple[Tensor, CgOutcome]:
    """Returns the iterate after ``steps`` steps of conjugate gradients on ``M v = g`` from ``v = 0``.

    It starts at zero because a warm start loses the descent property (Proposition 5). Denominators have no epsilon,
    because gradients may be as small as it.

    Args:
        apply: ``p -> M p``, with ``M`` symmetric positive definite.
        g: The right-hand side.
        steps: The number of steps; fewer are taken if the residual vanishes.
    """
    v, r, p = torch.zeros_like(g), g, g
    size = start = _dot(r, r)
    scale = _rescaling(g, start)
    if scale is not None:
        v, outcome = conjugate_gradients(apply, g / scale, steps)
        return v * scale, outcome
    taken = 0
    while taken < steps and size > _floor(g.dtype, start):
        q = apply(p)
        alpha = size / _dot(p, q)
        v = v + alpha * p
        r = r - alpha * q
        taken += 1
        before, size = size, _dot(r, r)
        p = r + (size / before) * p
    return v, _outcome(taken, size, start)


def batch_conjugate_gradients(
    k: Tensor, d: Tensor, shift: float, steps: int
) -> tuple[Callable[[int, int], Tensor], CgOutcome]:
    """Solves in the space of the rows: ``X^T y`` is the iterate of :func:`conjugate_gradients` for ``g = X^T d``.

    Every vector of that iteration is ``X^T`` times a vector with a row per sample. With ``K = X X^T``,
    ``M X^T p = X^T (shift p + K p)`` and ``<X^T a, X^T b> = <a, K b>``: one product with ``K`` per step. If there are
    more outputs than rows, the vectors ``p = P d`` are stored as polynomials ``P`` in ``K``, which are smaller.

    Args:
        k: ``X X^T``, ``[g, N, N]``.
        d: Gradients of the outputs, ``[g, N, m]``.
        shift: ``1/tau``.
        steps: The number of steps; fewer are taken if the residual vanishes.

    Returns:
        A function that returns the outputs ``first`` to ``last`` of ``y``, and how the solve went. The residual is that
        before the last step, because the final one would cost another product.
    """
    scale = _rescaling(d, _dot(d, d))
    if scale is not None:
        scaled, outcome = batch_conjugate_gradients(k, d / scale, shift, steps)
        return lambda first, last: scaled(first, last) * scale, outcome
    size = float(k.diagonal(dim1=-2, dim2=-1).amax()) if k.numel() else 1.0
    known = torch.finfo(k.dtype)
    if known.max**0.25 < size < math.inf:
        # Squares of K would overflow; a multiple of the matrix has the same iterates.
        scaled, outcome = batch_conjugate_gradients(k / size, d, shift / size, steps)
        return lambda first, last: scaled(first, last) / size, outcome
    implicit = d.shape[2] > d.shape[1]
    weighting = multiply(d, d.mT) if implicit else None

    def weigh(a: Tensor) -> Tensor:
        return a if weighting is None else multiply(a, weighting)

    r = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device).expand_as(k) if implicit else d
    kr = k if implicit else multiply(k, d)
    weighted = weigh(kr)
    y = torch.zeros_like(kr)
    p, kp, kpw = r, kr, weighted
    size = start = _dot(r, weighted)
    taken = 0
    while size > _floor(d.dtype, start):
        alpha = size / (shift * _dot(p, kpw) + _dot(kp, kpw))
        y.add_(p, alpha=alpha)
        taken += 1
        if taken == steps:
            break
        # The first vectors belong to the caller; later ones are overwritten, because they are the largest tensors here.
        own = taken > 1
        r = r.add_(p, alpha=-alpha * shift) if own else torch.add(r, p, alpha=-alpha * shift)
        r.sub_(kp, alpha=alpha)
        kr = multiply(k, r)
        if taken + 1 == steps:
            del k  # No product follows, and freeing it lowers the peak of memory.
        weighted = weigh(kr)
        before, size = size, _dot(r, weighted)
        beta = size / before
        if implicit:
            kpw = kpw.mul_(beta).add_(weighted)
        del weighted
        kp = kp.mul_(beta).add_(kr) if own else torch.add(kr, kp, alpha=beta)
        del kr
        p = p.mul_(beta).add_(r) if own else torch.add(r, p, alpha=beta)
        if not implicit:
            kpw = kp

    def outputs(first: int, last: int) -> Tensor:
        return multiply(y, d[:, :, first:last]) if implicit else y[:, :, first:last]

    return outputs, _outcome(taken, size, start)


def _dot(a: Tensor, b: Tensor) -> float:
    return float(torch.dot(a.reshape(-1), b.reshape(-1)))


def _rescaling(g: Tensor, square: float) -> float | None:
    """Returns the largest entry of a vector if its squares may leave the range of its precision, otherwise None.

    Directions are homogeneous in the gradient, so it may be divided by any number.
    """
    known = torch.finfo(g.dtype)
    if known.tiny / known.eps**3 < square < known.max**0.5 or not g.numel():
        return None
    largest = float(g.abs().amax())
    # Zeros stay zeros; other code checks that numbers are finite.
    return largest if 0 < largest < math.inf and largest != 1 else None


def _floor(dtype: torch.dtype, start: float) -> float:
    return torch.finfo(dtype).eps ** 2 * start


def _outcome(taken: int, size: float, start: float) -> CgOutcome:
    return CgOutcome(taken, (max(size, 0.0) / start) ** 0.5 if start > 0 else 0.0)
