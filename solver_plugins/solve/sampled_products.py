"""Products with the sampled columns of ``A``, and the gradient of the weight that they leave."""

from dataclasses import replace

import torch
from torch import Tensor

from solver_plugins.operators import LinearMap
from solver_plugins.prox.base import Step
from solver_plugins.solve.products import Sum
from solver_plugins.solve.sampled_rule import Rule


class Samples:
    """Products with the sampled columns of ``A``, in every iteration other ones."""

    def __init__(self, u: Tensor, weight: Tensor, samples: Tensor, smoothness: Tensor, rule: Rule):
        self.u, self.samples, self.columns = u, samples, rule.columns
        self.scale: Step = smoothness.reciprocal() if rule.unit else 1.0
        self.working = smoothness.dtype
        self.lowered = rule.dtype != self.working
        self.operator = replace(rule.operator, weight=weight.to(rule.dtype))
        self.matrix = isinstance(rule.operator, LinearMap)
        # Rows are gathered faster than columns.
        self.transposed = self.operator.weight.t().contiguous() if self.columns else None
        self.scaled = self.operator
        if self.matrix and not self.lowered and not self.columns:
            self.scaled = replace(rule.operator, weight=weight * self.scale)

    def part(self, k: int) -> Tensor:
        """Returns the sampled columns of iteration ``k`` as rows."""
        assert self.transposed is not None
        return self.transposed.index_select(0, self.samples[k])

    def input(self, k: int) -> Tensor:
        """Returns ``m_k * u``."""
        if self.columns:
            return self.u.index_select(-1, self.samples[k])
        # A product, not torch.where, which takes ten times as long.
        return self.u * self.samples[k]

    def residual(self, x: Tensor | None, k: int) -> Tensor:
        """Returns ``r_k``."""
        if x is None:
            return -self.input(k).to(self.working)
        if self.columns:
            product = (x.to(self.operator.weight.dtype) @ self.part(k).t()).to(self.working)
            return product * self.scale - self.input(k)
        if self.matrix and not self.lowered:
            return torch.addmm(self.u, x, self.scaled.weight, beta=-1).mul_(self.samples[k])
        product = self.operator.adjoint(x).to(self.working)
        return (product * self.scale - self.u).mul_(self.samples[k])

    def descend(self, base: Tensor, r: Tensor, k: int, factor: Step) -> Tensor:
        """Returns ``base - factor * A r``."""
        if self.lowered or not self.matrix or isinstance(factor, Tensor):
            r = (r * -factor).to(self.operator.weight.dtype)
            product = r @ self.part(k) if self.columns else self.operator.apply(r)
            return base + product.to(base.dtype)
        return torch.addmm(base, r, self.part(k) if self.columns else self.operator.weight.t(), alpha=-factor)

    def pull(self, grad: Tensor, k: int) -> Tensor:
        """Returns ``m_k * A^T grad``."""
        if self.columns:
            return (grad.to(self.operator.weight.dtype) @ self.part(k).t()).to(self.working)
        return self.operator.adjoint(grad).to(self.working).mul_(self.samples[k])

    def push(self, base: Tensor, h: Tensor, k: int) -> Tensor:
        """Returns ``base - s A h``."""
        if self.scaled is not self.operator:
            return torch.addmm(base, h, self.scaled.weight.t(), alpha=-1)
        return self.descend(base, h if isinstance(self.scale, float) else h * self.scale, k, 1.0)


class WeightGradient:
    """Sums ``- (G_k r_k^T + s x_k h_k^T)``: in two sums of products where the samples are masks."""

    def __init__(self, made: Samples, rule: Rule, weight: Tensor):
        self.made, self.columns, self.weight_dtype = made, rule.columns, weight.dtype
        self.sums = (Sum(), Sum())
        self.total: Tensor | None = None
        if rule.columns:
            assert made.transposed is not None
            self.total = torch.zeros_like(made.transposed, dtype=made.working)

    def add(self, grad: Tensor, r: Tensor, k: int) -> None:
        self._add(grad, r, k, 0, 1.0)

    def add_second(self, x: Tensor, h: Tensor, k: int) -> None:
        self._add(x, h, k, 1, self.made.scale)

    def _add(self, left: Tensor, right: Tensor, k: int, place: int, scale: Step) -> None:
        dtype = self.made.operator.weight.dtype
        left, right = left.to(dtype), right.to(dtype)
        if self.columns:
            assert self.total is not None
            part = (right.t() @ left).to(self.total.dtype) * scale
            self.total = self.total.index_add(0, self.made.samples[k], part)
        elif self.made.matrix:
            self.sums[place].add(left, right)
        else:
            # Batch and space are large enough for products of their own, and too large for copies.
            part = self.made.operator.weight_gradient(right, left).to(self.made.working) * scale
            self.total = part if self.total is None else self.total + part

    def result(self) -> Tensor:
        """Returns the gradient of the weight."""
        if self.columns and self.total is not None:
            return -self.total.t().to(self.weight_dtype)
        if self.total is None:
            first, second = (one.result() for one in self.sums)
            assert first is not None
            self.total = first.to(self.made.working)
            if second is not None:
                self.total = self.total + second.to(self.made.working) * self.made.scale
        return -self.total.to(self.weight_dtype)
