"""Minimal residuals (GMRES, in the form GCR) for ``y = w + J^T y``, separately for every sample.

A product with ``J^T`` also leaves what the gradients of the weights need. That is linear in ``y``, like the residual.
So after few products both are sums of what the products left, and no further product has to confirm them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from solver_plugins.equilibrium.problem import Jacobian, Pull, may_look, rows_of, states_of

_WINDOW = 8
"""A new direction is made orthogonal to this many past ones."""
_FEW = 4
"""Up to this many products, their pulls are added up; with more, that would need too much memory and save less."""
_TRUST = 30
"""In rounding errors: below this tolerance, a product confirms the residual of the recurrence."""


@dataclass(frozen=True, eq=False)
class Solved:
    """The solution of ``y = w + J^T y``, after ``products`` products with ``J^T``.

    ``pull`` is what the product leaves at ``y``, if it is known; ``residual`` is ``|w + J^T y - y| / |w + J^T y|``, one
    number per problem.
    """

    y: Tensor
    pull: Pull | None
    residual: Tensor
    products: int


def minimal_residuals(
    jacobian: Jacobian, w: Tensor, tolerance: float, products: int, *, pulls: bool, scale: Tensor | None = None
) -> Solved:
    """Solves ``y = w + J^T y`` for each problem of a batch; a problem that is done no longer moves.

    ``r_0 = w``. Each step takes one product with ``r_k`` and minimises the residual over the span of all ``r_j``:

        q_k = (I - J^T) r_k, made orthogonal to the earlier ones and of length one; p_k is r_k with the same changes
        y_{k+1} = y_k + <r_k, q_k> p_k,     r_{k+1} = r_k - <r_k, q_k> q_k

    Args:
        jacobian: ``J``.
        w: The right-hand sides.
        tolerance: The relative residual at which a problem is done.
        products: The largest number of products.
        pulls: Whether to return what the product leaves at ``y``; for a Jacobian with nothing appended.
        scale: One number per problem (``dims`` kept) by which the pull is multiplied; ``y`` is not.
    """
    looks = may_look()
    right = rows_of(jacobian, w)
    eps = torch.finfo(w.dtype).eps
    # A little below the tolerance, because the recurrence has rounding errors.
    target = tolerance - min(eps, tolerance / 2)
    y, r = torch.zeros_like(right), right
    moving = torch.ones_like(right[:, :1], dtype=torch.bool)
    basis = _Basis()
    combination = right.new_zeros(len(right), _FEW)
    left: list[Pull] = []
    error, made = torch.ones_like(right[:, :1]), 0
    while made < products:
        pull = jacobian.pull(states_of(jacobian, r, w.shape))
        q = r - rows_of(jacobian, jacobian.finish(pull))
        made += 1
        few = made <= _FEW
        if pulls and few:
            left.append(pull)
        elif left:
            left.clear()
        del pull
        p, q, parts = basis.push(r, q, made - 1)
        step = torch.where(moving, (r * q).sum(1, keepdim=True), 0.0)
        y, r = y.addcmul_(step, p), torch.addcmul(r, step, q, value=-1)
        if few:
            combination = torch.addcmul(combination, step, parts)
        error = torch.where(moving, _relative(r, y + r), error)
        moving = error > target
        if not looks or bool(moving.any()):
            continue
        if few and tolerance >= _TRUST * eps:
            if scale is not None:
                combination = combination * scale.reshape(-1, 1)
            return _solved(jacobian, w, y, _sum(left, combination) if pulls else None, error, made)
        if made == products:
            break
        # A product gives the true residual; if that is not small enough yet, the method restarts.
        pull = jacobian.pull(states_of(jacobian, y, w.shape))
        image = right + rows_of(jacobian, jacobian.finish(pull))
        made += 1
        r = image - y
        error = _relative(r, image)
        moving = error > tolerance
        if not bool(moving.any()):
            return _solved(jacobian, w, y, _times(pull, scale) if pulls else None, error, made)
        basis, left = _Basis(), []
        del pull, image
    return _solved(jacobian, w, y, None, error, made)


class _Basis:
    """The last directions ``p``, with orthonormal ``q = (I - J^T) p``."""

    def __init__(self) -> None:
        self._kept: list[tuple[Tensor, Tensor, Tensor]] = []

    def push(self, p: Tensor, q: Tensor, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Adds a direction; returns it, its ``q``, and its coefficients in the first residuals."""
        size = torch.linalg.vector_norm(p, dim=1, keepdim=True)
        parts = p.new_zeros(len(p), _FEW)
        if index < _FEW:
            parts[:, index] = 1
        for old_p, old_q, old_parts in self._kept:
            along = -(q * old_q).sum(1, keepdim=True)
            p, q = torch.addcmul(p, along, old_p), torch.addcmul(q, along, old_q)
            parts = torch.addcmul(parts, along, old_parts)
        length = torch.linalg.vector_norm(q, dim=1, keepdim=True)
        # A direction of rounding errors becomes zero and has no effect.
        scale = torch.where(length > 4 * torch.finfo(q.dtype).eps * size, length, torch.inf).reciprocal()
        made = p * scale, q * scale, parts * scale
        self._kept = [*self._kept, made][-_WINDOW:]
        return made


def _relative(change: Tensor, image: Tensor) -> Tensor:
    size = torch.linalg.vector_norm(image, dim=1, keepdim=True)
    return torch.linalg.vector_norm(change, dim=1, keepdim=True) / size.clamp_min(torch.finfo(size.dtype).tiny)


def _solved(jacobian: Jacobian, w: Tensor, y: Tensor, pull: Pull | None, error: Tensor, products: int) -> Solved:
    return Solved(states_of(jacobian, y, w.shape), pull, error.squeeze(1), products)


def _times(pull: Pull, scale: Tensor | None) -> Pull:
    if scale is None:
        return pull
    return Pull(tuple(one * scale for one in pull.outer), tuple(one * scale for one in pull.inner))


def _sum(pulls: Sequence[Pull], combination: Tensor) -> Pull:
    """Returns the pull at a linear combination of points, given the pulls at the points."""

    def added(tensors: Sequence[Tensor]) -> Tensor:
        weights = [one.reshape(-1, *(1,) * (tensors[0].ndim - 1)) for one in combination.unbind(1)]
        total = weights[0] * tensors[0]
        for weight, tensor in zip(weights[1:], tensors[1:], strict=False):
            total = total.addcmul_(weight, tensor)
        return total

    depth = range(len(pulls[0].outer))
    outer = tuple(added([pull.outer[n] for pull in pulls]) for n in depth)
    inner = tuple(added([pull.inner[n] for pull in pulls]) for n in depth)
    return Pull(outer, inner)
