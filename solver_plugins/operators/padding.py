"""Padding, its exact adjoint, and how often padding repeats an entry, one dimension at a time.

Padding in several dimensions is the composition of padding in each. Everything here consists of slices, flips and
sums: it is out of place, differentiable to any order, and free of data-dependent shapes.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional


def pad(x: Tensor, dim: int, left: int, right: int, mode: str) -> Tensor:
    """Returns ``E x``: ``x`` extended along a (negative) dimension as ``torch.nn.functional.pad`` does."""
    if mode == "zeros":
        return _zeros(x, dim, left, right)
    n = x.shape[dim]
    parts = [x]
    if left:
        parts.insert(0, _LEFT[mode](x, dim, n, left))
    if right:
        parts.append(_RIGHT[mode](x, dim, n, right))
    return torch.cat(parts, dim) if len(parts) > 1 else x


def pad_adjoint(y: Tensor, dim: int, left: int, right: int, mode: str) -> Tensor:
    """Returns ``E^T y``: entries in the padding are added to those that they were copied from."""
    n = y.shape[dim] - left - right
    core = y.narrow(dim, left, n)
    if mode == "zeros":
        return core
    if left:
        core = core + _LEFT_ADJOINT[mode](y.narrow(dim, 0, left), dim, n, left)
    if right:
        core = core + _RIGHT_ADJOINT[mode](y.narrow(dim, left + n, right), dim, n, right)
    return core


def _zeros(x: Tensor, dim: int, left: int, right: int) -> Tensor:
    return functional.pad(x, [0, 0] * (-dim - 1) + [left, right])


def _repeat(x: Tensor, dim: int, times: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = times
    return x.expand(shape)


_Side = Callable[[Tensor, int, int, int], Tensor]

_LEFT: dict[str, _Side] = {
    "circular": lambda x, dim, n, p: x.narrow(dim, n - p, p),
    "reflect": lambda x, dim, n, p: x.narrow(dim, 1, p).flip(dim),
    "replicate": lambda x, dim, n, p: _repeat(x.narrow(dim, 0, 1), dim, p),
}
_RIGHT: dict[str, _Side] = {
    "circular": lambda x, dim, n, p: x.narrow(dim, 0, p),
    "reflect": lambda x, dim, n, p: x.narrow(dim, n - 1 - p, p).flip(dim),
    "replicate": lambda x, dim, n, p: _repeat(x.narrow(dim, n - 1, 1), dim, p),
}
_LEFT_ADJOINT: dict[str, _Side] = {
    "circular": lambda y, dim, n, p: _zeros(y, dim, n - p, 0),
    "reflect": lambda y, dim, n, p: _zeros(y.flip(dim), dim, 1, n - 1 - p),
    "replicate": lambda y, dim, n, p: _zeros(y.sum(dim, keepdim=True), dim, 0, n - 1),
}
_RIGHT_ADJOINT: dict[str, _Side] = {
    "circular": lambda y, dim, n, p: _zeros(y, dim, 0, n - p),
    "reflect": lambda y, dim, n, p: _zeros(y.flip(dim), dim, n - 1 - p, 1),
    "replicate": lambda y, dim, n, p: _zeros(y.sum(dim, keepdim=True), dim, n - 1, 0),
}


def repetition(mode: str, left: int, right: int, n: int | None) -> int:
    """Returns ``|E|^2``, the largest number of copies of one entry; over all sizes if ``n`` is None.

    ``E`` has one 1 per row, so ``E^T E`` is diagonal and counts the copies.
    """
    if mode == "zeros" or left + right == 0:
        return 1
    if mode == "replicate":
        return 1 + left + right if n is None or n == 1 else 1 + max(left, right)
    if mode == "circular":
        n = max(left, right) if n is None else n
        return -(-(n + left + right) // n)
    if not (left and right):
        return 2
    # Reflection copies 1..left and n-1-right..n-2; only a short input has entries in both ranges.
    sizes = range(max(left, right) + 1, left + right + 4) if n is None else (n,)
    return 3 if any(max(1, size - 1 - right) <= min(left, size - 2) for size in sizes) else 2
