"""How the dimensions of a solve are merged for its products, and products that take a number along."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from solver_plugins.operators import ConvMap, LinearMap, LinearOperator
from solver_plugins.prox import Step
from solver_plugins.solve.steps import is_one, times

FEW_PLACES = 100
"""With fewer places per image, rows of all images are multiplied faster than one matrix per image."""


def is_matrix(operator: LinearOperator) -> bool:
    """Whether ``A A^T`` is one matrix at every place: a matrix, or a convolution whose windows do not overlap."""
    if isinstance(operator, LinearMap):
        return True
    assert isinstance(operator, ConvMap)
    geometry = operator.geometry
    if any(left or right for left, right in geometry.padding_for(operator.kernel_size, operator.input_size)):
        return False
    extents = (d * (k - 1) + 1 for d, k in zip(geometry.dilation, operator.kernel_size, strict=True))
    return all(step >= extent for step, extent in zip(geometry.stride, extents, strict=True))


@dataclass(frozen=True)
class Layout:
    """Merges the dimensions of outputs and puts them back.

    Attributes:
        kind: "rows", one for each sample (or place), "places", one matrix of features by places for each sample and
            group, or "space", as it is.
        shape: That of the output.
        input_shape: That of the input.
        dims: How many dimensions of space there are.
        groups: How many parts the features have that do not see each other.
    """

    kind: Literal["rows", "places", "space"]
    shape: torch.Size
    input_shape: torch.Size
    dims: int = 0
    groups: int = 1

    @classmethod
    def of(cls, operator: LinearOperator, output: Tensor | torch.Size, input: torch.Size, path: str) -> "Layout":
        """Returns the layout for a path."""
        shape = output if isinstance(output, torch.Size) else output.shape
        if isinstance(operator, LinearMap):
            return cls("rows", shape, input)
        assert isinstance(operator, ConvMap)
        dims, groups = operator.geometry.dims, operator.geometry.groups
        if path != "gram":
            return cls("space", shape, input, dims)
        places = math.prod(shape[-dims:])
        # Where the features are last in memory, rows are no copy.
        rows = places < FEW_PLACES or (isinstance(output, Tensor) and places > 1 and output.stride(-dims - 1) == 1)
        return cls("rows" if rows and groups == 1 else "places", shape, input, dims, groups)

    def flat(self, x: Tensor) -> Tensor:
        """Merges the dimensions of an output."""
        if self.kind == "space":
            return x
        if self.kind == "rows":
            return (x.movedim(-self.dims - 1, -1) if self.dims else x).reshape(-1, self.shape[-self.dims - 1])
        features = self.shape[-self.dims - 1] // self.groups
        return x.reshape(-1, features, math.prod(self.shape[-self.dims :]))

    def back(self, x: Tensor) -> Tensor:
        """Puts the dimensions of an output back, and not as a view: an activation may overwrite it."""
        if x.shape == self.shape:
            return x
        if self.kind == "rows" and self.dims:
            batch, space = self.shape[: -self.dims - 1], self.shape[-self.dims :]
            x = x.reshape(*batch, *space, x.shape[-1]).movedim(-1, -self.dims - 1)
        return torch.ops.aten._unsafe_view(x.contiguous(), self.shape)

    def per_feature(self, values: Tensor) -> Tensor:
        """Returns one number per output feature (or one in all) so that it broadcasts to what :meth:`flat` returns."""
        if self.kind == "rows" or not values.dim():
            return values
        if self.kind == "space":
            return values.reshape(-1, *(1,) * self.dims)
        samples = math.prod(self.shape[: -self.dims - 1])
        return values.reshape(self.groups, -1, 1).repeat(samples, 1, 1)

    def feature_sums(self, x: Tensor, like: Tensor) -> Tensor:
        """Returns the sums over all that :meth:`per_feature` repeats, in the shape of ``like``."""
        if not like.dim():
            return x.sum()
        if self.kind == "rows":
            return x.reshape(-1, x.shape[-1]).sum(0)
        if self.kind == "space":
            return x.movedim(-self.dims - 1, 0).flatten(1).sum(1)
        return x.sum(-1).reshape(-1, len(like)).sum(0)

    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        """Returns the inner product of each sample, broadcastable to what :meth:`flat` returns."""
        products = a * b
        if self.kind == "space":
            return products.sum(tuple(range(-self.dims - 1, 0)), keepdim=True)
        if not self.dims:
            return products.sum(-1, keepdim=True)
        copies = math.prod(self.shape[-self.dims :]) if self.kind == "rows" else self.groups
        sums = products.reshape(-1, copies * math.prod(products.shape[1:])).sum(1)
        return sums.repeat_interleave(copies).reshape(-1, *(1,) * (a.dim() - 1))


SMALLEST_BLOCK = 192
"""Below this many rows a product is not split into blocks: small products are slow."""


def plus(one: Tensor, other: Tensor, factor: Step, out: Tensor | None = None) -> Tensor:
    """Returns ``one + factor * other``."""
    if isinstance(factor, Tensor):
        return torch.addcmul(one, other, factor)
    return torch.add(one, other, alpha=factor, out=out)


def product(left: Tensor, right: Tensor, factor: Step, out: Tensor | None = None) -> Tensor:
    """Returns ``factor * left right`` of matrices, without a pass over memory where the factor is a number."""
    if isinstance(factor, Tensor) or is_one(factor):
        return times(torch.mm(left, right, out=out), factor)
    empty = left.new_empty((left.shape[0], right.shape[1])) if out is None else out
    return torch.addmm(empty, left, right, beta=0, alpha=factor, out=out)


def symmetric_product(matrix: Tensor) -> Tensor:
    """Returns ``A A^T`` with few more than half of the multiply-adds: blocks above the diagonal are copied."""
    rows = matrix.shape[-2]
    if rows < 2 * SMALLEST_BLOCK:
        return matrix @ matrix.mT
    upper, lower = matrix[..., : rows // 2, :], matrix[..., rows // 2 :, :]
    corner = upper @ lower.mT
    above = torch.cat([symmetric_product(upper), corner], -1)
    return torch.cat([above, torch.cat([corner.mT, symmetric_product(lower)], -1)], -2)


def with_diagonal(matrix: Tensor, number: Any) -> Tensor:
    """Returns a matrix with a number added to its diagonal."""
    number = torch.as_tensor(number, dtype=matrix.dtype, device=matrix.device)
    return matrix + torch.diag_embed(number.expand(matrix.shape[-1]))


def matrix_of(operator: LinearOperator, weight: Tensor) -> Tensor:
    """Returns ``A`` at one place, as one matrix per group where there are several."""
    groups = operator.geometry.groups if isinstance(operator, ConvMap) else 1
    matrix = weight.flatten(1)
    return matrix if groups == 1 else matrix.unflatten(0, (groups, -1))


Parts = list[tuple[int, Step]]
"""Iterates, by their number, and their shares."""


def combined(parts: Parts, values: dict[int, Tensor], total: Tensor | None = None) -> Tensor | None:
    """Returns ``total + sum_j share_j x_j``."""
    for place, share in parts:
        total = times(values[place], share) if total is None else plus(total, values[place], share)
    return total


def chosen(drawn: Tensor, new: Tensor, old: Tensor | None, otherwise: float | None) -> Tensor:
    """Returns the new value of outputs that were drawn, and the old one, or a number, of all others."""
    if old is not None:
        return torch.lerp(old, new, drawn)
    return drawn * new + (1 - drawn) * otherwise if otherwise else drawn * new
