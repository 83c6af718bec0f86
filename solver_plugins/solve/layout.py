"""How the dimensions of a solve are merged for its products, which convolutions are matrices, and their products."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from solver_plugins.operators import ConvMap, LinearMap, LinearOperator

FEW_PLACES = 100
"""With fewer places per image, rows of all images are multiplied faster than one matrix per image."""
SMALLEST_BLOCK = 192
"""Below this many rows a product is not split into blocks: small products are slow."""


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


def matrix_of(operator: LinearOperator) -> Tensor:
    """Returns ``A`` at one place, as one matrix per group where there are several."""
    groups = operator.geometry.groups if isinstance(operator, ConvMap) else 1
    matrix = operator.weight if operator.weight.dim() == 2 else operator.weight.flatten(1)
    return matrix if groups == 1 else matrix.unflatten(0, (groups, -1))


@dataclass(frozen=True)
class Layout:
    """Merges the dimensions of a solve and puts them back.

    Attributes:
        kind: "rows", one for each sample (or place), "places", one matrix of features by places for each sample and
            group, or "space", as it is.
        shape: That of the output.
        dims: How many dimensions of space there are.
        groups: How many parts the features have that do not see each other.
    """

    kind: Literal["rows", "places", "space"]
    shape: torch.Size
    dims: int = 0
    groups: int = 1

    @classmethod
    def of(cls, operator: LinearOperator, output: Tensor | torch.Size, path: str) -> "Layout":
        """Returns the layout for a path."""
        shape = output if isinstance(output, torch.Size) else output.shape
        if isinstance(operator, LinearMap):
            return cls("rows", shape)
        assert isinstance(operator, ConvMap)
        dims, groups = operator.geometry.dims, operator.geometry.groups
        if path != "gram":
            return cls("space", shape, dims)
        places = math.prod(shape[-dims:])
        # Where the features are last in memory, rows are no copy.
        rows = places < FEW_PLACES or (isinstance(output, Tensor) and places > 1 and output.stride(-dims - 1) == 1)
        return cls("rows" if rows and groups == 1 else "places", shape, dims, groups)

    def flat(self, x: Tensor) -> Tensor:
        """Merges the dimensions of an output (or, where there is no space, of anything with features)."""
        if self.kind == "space" or (x.dim() == 2 and not self.dims):
            return x
        if self.kind == "rows":
            x = x.movedim(-self.dims - 1, -1) if self.dims else x
            return x.reshape(-1, x.shape[-1])
        features = self.shape[-self.dims - 1] // self.groups
        return x.reshape(-1, features, math.prod(self.shape[-self.dims :]))

    def behind(self, x: Tensor, lead: int) -> Tensor:
        """Merges the batch dimensions of rows behind the first ones; what all samples share stays as it is."""
        return x if self.dims or x.dim() <= lead + 2 else x.reshape(*x.shape[:lead], -1, x.shape[-1])

    def masks(self, masks: Tensor) -> Tensor:
        """Merges the dimensions of masks of the output, one for each iteration."""
        if self.kind == "space" or not self.dims:
            return self.behind(masks, 1)
        return torch.stack([self.flat(one.expand(self.shape)) for one in masks])

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
        return values.reshape(self.groups, -1, 1).repeat(math.prod(self.shape[: -self.dims - 1]), 1, 1)

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
