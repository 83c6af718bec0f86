"""The scalars of a solve, and products that take them along."""

from typing import Any

import torch
from torch import Tensor

from solver_plugins.operators import ConvMap, LinearOperator, is_eager
from solver_plugins.prox import Step
from solver_plugins.solve.recursion import Recursion

SMALLEST_BLOCK = 192
"""Below this many rows a product is not split into blocks: small products are slow."""


class Numbers:
    """The scalars of a solve: Python numbers where looking at them costs nothing, else 0-d tensors.

    Attributes:
        at_hand: Whether they are numbers.
        scale: ``s``.
        factors: ``f_k``.
        steps: ``t_k``.
        kept: ``1 - t_k s lam``.
    """

    def __init__(self, smoothness: Tensor, recursion: Recursion, iterations: int, *, unit: bool, lam: Step):
        self.at_hand = is_eager(smoothness.device) and type(smoothness) is Tensor
        constant: Step = float(smoothness) if self.at_hand else smoothness
        self.scale: Step = 1 / constant if unit else 1.0
        lam = float(lam) if self.at_hand else lam
        base: Step = 1.0 if unit else 1 / constant
        factor = recursion.factor
        self.factors: list[Step] = [1.0 if factor is None else factor(k, constant) for k in range(iterations)]
        self.steps: list[Step] = [times(base, one) for one in self.factors]
        self.kept: list[Step] = [1 - step * (self.scale * lam) for step in self.steps]


def is_one(factor: Any) -> bool:
    """Whether a factor is the number one."""
    return isinstance(factor, float) and factor == 1.0


def times(one: Any, factor: Any) -> Any:
    """Returns ``factor * one``, without a pass over memory where the factor is the number one."""
    return one if is_one(factor) else one * factor


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
