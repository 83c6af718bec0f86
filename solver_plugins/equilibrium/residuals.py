"""Minimal residuals (GMRES, in the form GCR) for ``y = w + J^T y``, every sample for itself.

A product with ``J^T`` also leaves what the gradients of the weights need, and that is linear in ``y``, as the residual
is: after few products both are sums of what the products left, and no further one has to confirm them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from solver_plugins.equilibrium.problem import Jacobian, Pull, rows_of, states_of

_WINDOW = 8
"""How many past directions a new one is made orthogonal to."""
_FEW = 4
"""After so many products what they left is added up; after more it would take too much memory, and save less."""
_TRUST = 30
"""In rounding errors: a residual that the recurrence says to be smaller is confirmed by a product."""


@dataclass(frozen=True, eq=False)
class Solved:
    """The solution of ``y = w + J^T y``.

    Attributes:
        y: The solution.
        pull: What the product with ``J^T`` leaves at ``y``, where it is known.
        residual: ``|w + J^T y - y| / |w + J^T y|``, one number per problem.
        products: Products with ``J^T``.
    """

    y: Tensor
    pull: Pull | None
    residual: Tensor
    products: int


@dataclass(frozen=True)
class _Layout:
    """How the states lie in memory; see :class:`~solver_plugins.equilibrium.problem.Layout`."""

    dims: tuple[int, ...]
    channels_last: bool


def minimal_residuals(
    jacobian: Jacobian,
    w: Tensor,
    dims: tuple[int, ...],
    *,
    tolerance: float,
    products: int,
    pulls: bool,
    scale: Tensor | None = None,
) -> Solved:
    """Solves ``y = w + J^T y`` for each problem of a batch; one that is done no longer moves.

    ``r_0 = w``. Each step makes one product, of ``r_k``, and the residual least on the span of all ``r_j`` so far:

        q_k = (I - J^T) r_k, made orthogonal to the earlier ones and of length one, as p_k of r_k alike
        y_{k+1} = y_k + <r_k, q_k> p_k,     r_{k+1} = r_k - <r_k, q_k> q_k

    Args:
        jacobian: ``J``.
        w: The right-hand sides.
        dims: The dimensions of one problem.
        tolerance: The relative residual at which a problem is done.
        products: At most so many products.
        pulls: Whether to return what the product leaves at ``y``; for a Jacobian with nothing appended.
        scale: One number per problem (``dims`` kept) that what is left is multiplied by; ``y`` is not.
    """
    layout, looks = _Layout(dims, jacobian.channels_last), not torch.compiler.is_compiling()
    right = rows_of(layout, w)
    eps = torch.finfo(w.dtype).eps
    # A little below, as what the recurrence says is off by rounding.
    target = tolerance - min(eps, tolerance / 2)
    y, r = torch.zeros_like(right), right
    moving = torch.ones_like(right[:, :1], dtype=torch.bool)
    basis = _Basis()
    combination = right.new_zeros(len(right), _FEW)
    left: list[Pull] = []
    error, made = torch.ones_like(right[:, :1]), 0
    while made < products:
        pull = jacobian.pull(states_of(layout, r, w.shape))
        q = r - rows_of(layout, jacobian.finish(pull))
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
            return _solved(layout, w, y, _sum(left, combination) if pulls else None, error, made)
        if made == products:
            break
        # A product tells the truth; where that is not small enough yet, it begins anew.
        pull = jacobian.pull(states_of(layout, y, w.shape))
        image = right + rows_of(layout, jacobian.finish(pull))
        made += 1
        r = image - y
        error = _relative(r, image)
        moving = error > tolerance
        if not bool(moving.any()):
            return _solved(layout, w, y, _times(pull, scale) if pulls else None, error, made)
        basis, left = _Basis(), []
        del pull, image
    return _solved(layout, w, y, None, error, made)


class _Basis:
    """Directions ``p`` with orthonormal ``q = (I - J^T) p``, as many as the window holds."""

    def __init__(self) -> None:
        self._kept: list[tuple[Tensor, Tensor, Tensor]] = []

    def push(self, p: Tensor, q: Tensor, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Adds a direction; returns it, its ``q``, and of which of the first residuals it is made."""
        size = torch.linalg.vector_norm(p, dim=1, keepdim=True)
        parts = p.new_zeros(len(p), _FEW)
        if index < _FEW:
            parts[:, index] = 1
        for old_p, old_q, old_parts in self._kept:
            along = -(q * old_q).sum(1, keepdim=True)
            p, q = torch.addcmul(p, along, old_p), torch.addcmul(q, along, old_q)
            parts = torch.addcmul(parts, along, old_parts)
        length = torch.linalg.vector_norm(q, dim=1, keepdim=True)
        # What is rounding error alone becomes zero and takes no part.
        scale = torch.where(length > 4 * torch.finfo(q.dtype).eps * size, length, torch.inf).reciprocal()
        made = p * scale, q * scale, parts * scale
        self._kept = [*self._kept, made][-_WINDOW:]
        return made


def _relative(change: Tensor, image: Tensor) -> Tensor:
    size = torch.linalg.vector_norm(image, dim=1, keepdim=True)
    return torch.linalg.vector_norm(change, dim=1, keepdim=True) / size.clamp_min(torch.finfo(size.dtype).tiny)


def _solved(layout: _Layout, w: Tensor, y: Tensor, pull: Pull | None, error: Tensor, products: int) -> Solved:
    return Solved(states_of(layout, y, w.shape), pull, error.squeeze(1), products)


def _times(pull: Pull, scale: Tensor | None) -> Pull:
    if scale is None:
        return pull
    return Pull(tuple(one * scale for one in pull.outer), tuple(one * scale for one in pull.inner))


def _sum(pulls: Sequence[Pull], combination: Tensor) -> Pull:
    """Returns the pull at a combination of the points whose pulls these are."""

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
