"""Exchangeable ways to multiply by ``M_k = (1 - t_k s lam) I - t_k s A D_k A^T``, with the weight's gradient.

From the gradients ``G_k`` of the ``v_{k+1} = M_k d_k + ...`` the weight gets

    dA = - sum_k (G_k z_k^T + s d_k h_k^T),      z_k = t_k D_k (s A^T d_k - u),      h_k = t_k D_k A^T G_k,

where ``u`` is there for a sampled gradient only, whose own gradient is ``sum_k h_k``. :class:`TwoStep` has ``z`` and
``h`` at hand; :class:`Gram` sums ``S = sum_k t_k G_k d_k^T`` and takes one product ``- s (S + S^T) A``.

A gate per output channel has its place in ``advance`` (``base + a * (M d)``) and ``pull``, which then multiplies
``a * G``: ``M`` stays symmetric.
"""

import abc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from solver_plugins.operators import LinearOperator
from solver_plugins.prox import Step
from solver_plugins.solve.layout import matrix_of, plus, product, symmetric_product, with_diagonal
from solver_plugins.solve.recursion import Given
from solver_plugins.solve.steps import Numbers, is_one, times

LARGE_BATCH = 192
"""From this many rows on a product gains nothing by more of them, and putting them together costs time and memory."""
Slots = tuple[Tensor | None, Tensor | None]
"""Where to write two results, where values are at hand; None for anywhere."""
ANYWHERE: Slots = (None, None)


class Sum:
    """``sum_k a_k^T b_k`` over iterations: in one large product, or one by one where each is large by itself."""

    def __init__(self) -> None:
        self.left: list[Tensor] = []
        self.right: list[Tensor] = []
        self.total: Tensor | None = None

    def add(self, left: Tensor, right: Tensor) -> None:
        """Adds one iteration: one row per sample in both factors, or one matrix of features by places."""
        if left.dim() == 2 and left.shape[0] < LARGE_BATCH:
            self.left.append(left)
            self.right.append(right)
        elif self.total is None:
            self.total = left @ right.mT if left.dim() == 3 else left.t() @ right
        elif left.dim() == 3:
            self.total.baddbmm_(left, right.mT)
        else:
            self.total.addmm_(left.t(), right)

    def result(self) -> Tensor | None:
        """Returns the sum; None if there is nothing to add."""
        if not self.left:
            return self.total
        left, right = (one[0] if len(one) == 1 else torch.cat(one) for one in (self.left, self.right))
        found = left.t() @ right
        return found if self.total is None else self.total + found


class Products(abc.ABC):
    """Products with ``M_k``, and what they leave for the gradient of the weight.

    Attributes:
        matrix: What was made of ``A A^T``, if anything was.
        weights: What a chooser has drawn, one for each iteration.
    """

    matrix: Tensor | None = None

    def __init__(self, given: Given, numbers: Numbers, weights: Sequence[Tensor] = ()):
        self.rule, self.numbers, self.given, self.weights = given.rule, numbers, given, list(weights)
        self.working, self.dtype = given.smoothness.dtype, given.rule.dtype
        self.lowered = self.dtype != self.working

    @abc.abstractmethod
    def advance(
        self, k: int, d: Tensor | None, base: Tensor | None, to: Slots = ANYWHERE
    ) -> tuple[Tensor, Tensor | None]:
        """Returns ``M_k d + base``, None standing for zero, and ``z_k`` where the weight's gradient needs it."""

    @abc.abstractmethod
    def pull(self, k: int, grad: Tensor, to: Slots = ANYWHERE) -> tuple[Tensor, Tensor | None]:
        """Returns ``M_k G``, and ``h_k`` where the gradient of the weight needs it."""

    @abc.abstractmethod
    def collect(self, k: int, grad: Tensor, d: Tensor | None, z: Tensor | None, h: Tensor | None) -> None:
        """Takes note of one iteration, or of all in one buffer, for :meth:`weight_gradient`."""

    @abc.abstractmethod
    def weight_gradient(self) -> Tensor:
        """Returns the gradient of the weight by all iterations that were collected."""


def make_products(
    given: Given, numbers: Numbers, matrix: Tensor | None = None, weights: Sequence[Tensor] = ()
) -> Products:
    """Returns the products of a path; ``matrix`` and ``weights`` are those of products that were made before."""
    if given.rule.path == "gram":
        return Gram(given, numbers, matrix)
    return (Columns if given.rule.path == "columns" else TwoStep)(given, numbers, weights)


class Gram(Products):
    """Products with ``M = (1 - t s lam) I - t s A A^T`` as a matrix: rows from the right, places from the left."""

    matrix: Tensor

    def __init__(self, given: Given, numbers: Numbers, matrix: Tensor | None):
        super().__init__(given, numbers)
        self.rate: Any = numbers.scale * numbers.steps[0]
        if matrix is not None:
            self.matrix = matrix
        elif self.lowered and given.gram is None:
            # Without the identity, which a half would round; scaled in both factors, so that none overflows.
            scaled = (self._weight().to(self.working) * self.rate**0.5).to(self.dtype)
            self.matrix = scaled @ scaled.mT
        elif self.lowered and given.gram is not None:
            self.matrix = (given.gram.to(self.working) * self.rate).to(self.dtype)
        else:
            gram = symmetric_product(self._weight()) if given.gram is None else given.gram
            self.matrix = gram * -self.rate
            if numbers.at_hand and not torch.is_grad_enabled():
                self.matrix.diagonal(dim1=-2, dim2=-1).add_(numbers.kept[0])
            else:
                self.matrix = with_diagonal(self.matrix, numbers.kept[0])
        self.sum = Sum()

    def _weight(self) -> Tensor:
        return matrix_of(self.rule.operator, self.given.weight)

    def _times(self, x: Tensor, base: Tensor | None, factor: Any, out: Tensor | None = None) -> Tensor:
        """Returns ``factor * M x + base``."""
        matrix, rides = self.matrix, isinstance(factor, float)
        if x.dim() == 3:
            # One matrix for every sample, or one for every group of it.
            copies = x.shape[0] // len(matrix) if matrix.dim() == 3 else x.shape[0]
            matrix = (
                matrix.expand(copies, *matrix.shape).reshape(-1, *matrix.shape[-2:])
                if matrix.dim() == 3
                else (matrix.expand(copies, -1, -1))
            )
            if base is None or not rides:
                found = times(torch.bmm(matrix, x), factor)
                return found if base is None else base + found
            return torch.baddbmm(base, matrix, x, alpha=factor, out=out)
        if base is None:
            return product(x, matrix, factor, out)
        return torch.addmm(base, x, matrix, alpha=factor, out=out) if rides else base + (x @ matrix) * factor

    def advance(
        self, k: int, d: Tensor | None, base: Tensor | None, to: Slots = ANYWHERE
    ) -> tuple[Tensor, Tensor | None]:
        assert d is not None and base is not None
        factor = self.numbers.factors[k]
        if self.lowered:
            low = self._times(d.to(self.dtype), None, factor).to(self.working)
            return plus(base, d, self.numbers.kept[k]) - low, None
        return self._times(d, base if is_one(factor) else plus(base, d, 1 - factor), factor, to[0]), None

    def pull(self, k: int, grad: Tensor, to: Slots = ANYWHERE) -> tuple[Tensor, Tensor | None]:
        # M is symmetric.
        factor = self.numbers.factors[k]
        if self.lowered:
            low = self._times(grad.to(self.dtype), None, factor).to(self.working)
            return self.numbers.kept[k] * grad - low, None
        return self._times(grad, None if is_one(factor) else grad * (1 - factor), factor, to[0]), None

    def collect(self, k: int, grad: Tensor, d: Tensor | None, z: Tensor | None, h: Tensor | None) -> None:
        assert d is not None
        self.sum.add(times(grad, self.numbers.factors[k]).to(self.dtype), d.to(self.dtype))

    def weight_gradient(self) -> Tensor:
        sums, matrix, weight = self.sum.result(), self._weight().to(self.dtype), self.given.weight
        assert sums is not None
        if sums.dim() == 3:
            sums = sums.unflatten(0, (-1, len(matrix))).sum(0) if matrix.dim() == 3 else sums.sum(0)
        sums = sums.to(self.working)
        found = ((sums + sums.mT) * -self.rate).to(self.dtype) @ matrix
        return found.reshape(weight.shape).to(weight.dtype)


class TwoStep(Products):
    """Products with ``A^T``, then ``A``; with a mask, or weights, between them where the inputs are sampled."""

    def __init__(self, given: Given, numbers: Numbers, weights: Sequence[Tensor] = ()):
        super().__init__(given, numbers, weights)
        self.weight, self.flat = given.weight.to(self.dtype), self.rule.is_flat
        # Rows take a number along in a product. In half precision s might underflow on the weight.
        self.rides = self.flat and not self.lowered and numbers.at_hand and self.rule.path != "columns"
        self.on_weight = not (self.lowered or self.rides or self.rule.path == "columns")
        scaled = times(self.weight, numbers.scale) if self.on_weight else self.weight
        self.pair = tuple(replace(self.rule.operator, weight=one) for one in (self.weight, scaled))
        self.sums: tuple[Sum, Sum, Sum] = (Sum(), Sum(), Sum())
        self.totals: list[Tensor | None] = [None, None]

    def _operators(self, k: int) -> tuple[LinearOperator, ...]:
        """Returns ``A`` in iteration ``k``, and ``s A`` if that is made."""
        return self.pair

    def _adjoint(self, x: Tensor, operator: LinearOperator) -> Tensor:
        x = x.to(self.dtype)
        return (torch.mm(x, operator.weight) if self.flat else operator.adjoint(x)).to(self.working)

    def _apply(self, z: Tensor, operator: LinearOperator) -> Tensor:
        z = z.to(self.dtype)
        return (torch.mm(z, operator.weight.t()) if self.flat else operator.apply(z)).to(self.working)

    def _factor(self, k: int) -> Step:
        """Returns ``t_k q``: what all entries of ``t_k D_k`` have in common."""
        step, share = self.numbers.steps[k], self.rule.samples.share
        return step if self.rule.sample(k) is None else times(step, share)

    def _diagonal(self, k: int, residual: Tensor | None = None) -> Tensor | None:
        """Returns ``D_k`` over its share; None for ones. A chooser looks at the residual, once."""
        place, chooser = self.rule.sample(k), self.rule.samples.chooser
        if place is None:
            return None
        if chooser is None:
            assert self.given.inputs is not None
            return self.given.inputs[place]
        if place == len(self.weights):
            assert residual is not None
            with torch.no_grad():
                chosen = chooser(residual.detach().reshape(self.rule.layout.input_shape))
            self.weights.append(chosen.reshape(-1, chosen.shape[-1]) if self.flat else chosen)
        return self.weights[place]

    def _input(self, k: int) -> Tensor | None:
        return self.given.u if self.rule.draws_gradients else None

    def _image(self, k: int, d: Tensor | None, out: Tensor | None = None) -> Tensor:
        """Returns ``z_k``."""
        u, factor, chooses = self._input(k), self._factor(k), self.rule.samples.chooser is not None
        # A chooser sees the residual itself.
        z = self._residual(k, d, u, 1.0 if chooses else factor, out)
        diagonal = self._diagonal(k, z)
        if diagonal is None:
            return z
        # A product, not torch.where, which takes ten times as long.
        z = z * diagonal if torch.is_grad_enabled() or chooses else z.mul_(diagonal)
        return times(z, factor) if chooses else z

    def _residual(self, k: int, d: Tensor | None, u: Tensor | None, factor: Step, out: Tensor | None) -> Tensor:
        """Returns ``factor * (s A^T d - u)``."""
        scale = self.numbers.scale
        if d is None:
            assert u is not None
            return times(-u.to(self.working), factor)
        if self.rides and isinstance(factor, float) and isinstance(scale, float):
            if u is None:
                return product(d, self.weight, scale * factor, out)
            return torch.addmm(u, d, self.weight, beta=-factor, alpha=scale * factor, out=out)
        z = self._adjoint(d, self._operators(k)[1])
        z = z if self.on_weight else times(z, scale)
        return times(z if u is None else z - u, factor)

    def advance(
        self, k: int, d: Tensor | None, base: Tensor | None, to: Slots = ANYWHERE
    ) -> tuple[Tensor, Tensor | None]:
        z, kept = self._image(k, d, to[1]), self.numbers.kept[k]
        if self.rides and d is not None and base is None and isinstance(kept, float):
            return torch.addmm(d, z, self.weight.t(), beta=kept, alpha=-1, out=to[0]), z
        target = base if d is None else times(d, kept) if base is None else plus(base, d, kept, to[0])
        if self.rides and target is not None:
            return torch.addmm(target, z, self.weight.t(), alpha=-1, out=to[0]), z
        moved = self._apply(z, self._operators(k)[0])
        # In place on what has just been made. A convolution may return a view, which no activation may overwrite.
        mine = d is not None and target is not None and target is not base and not torch.is_grad_enabled()
        return (-moved if target is None else target.sub_(moved) if mine else target - moved), z

    def pull(self, k: int, grad: Tensor, to: Slots = ANYWHERE) -> tuple[Tensor, Tensor | None]:
        factor, kept, scale, (plain, scaled) = (
            self._factor(k), self.numbers.kept[k], self.numbers.scale, self._operators(k),
        )  # fmt: skip
        h = product(grad, self.weight, factor, to[1]) if self.rides else times(self._adjoint(grad, plain), factor)
        diagonal = self._diagonal(k)
        h = h if diagonal is None else h.mul_(diagonal)
        if self.rides and isinstance(kept, float) and isinstance(scale, float):
            return torch.addmm(grad, h, self.weight.t(), beta=kept, alpha=-scale, out=to[0]), h
        return grad * kept - self._apply(h if self.on_weight else times(h, scale), scaled), h

    def collect(self, k: int, grad: Tensor, d: Tensor | None, z: Tensor | None, h: Tensor | None) -> None:
        if z is None and self.flat and self.rule.regrouped and d is not None:
            self.sums[2].add(times(grad, self._factor(k)).to(self.dtype), d.to(self.dtype))
            return
        z = self._image(k, d) if z is None else z
        for place, (left, right) in enumerate(((grad, z), (d, h))):
            if left is not None and right is not None:
                self._add(k, place, left.to(self.dtype), right.to(self.dtype))

    def _add(self, k: int, place: int, left: Tensor, right: Tensor) -> None:
        if self.flat:
            self.sums[place].add(left, right)
            return
        # Batch and space are large enough for products of their own, and too large for copies.
        part, total = self.pair[0].weight_gradient(right, left).to(self.working), self.totals[place]
        self.totals[place] = part if total is None else total.add_(part)

    def weight_gradient(self) -> Tensor:
        scale, outer = self.numbers.scale, self.sums[2].result()
        found = [one.result() for one in self.sums[:2]] if self.flat else self.totals
        parts = [times(one.to(self.working), s) for one, s in zip(found, (1.0, scale), strict=True) if one is not None]
        if outer is not None:
            outer = times(outer.to(self.working), scale)
            parts.append(((outer + outer.t()).to(self.dtype) @ self.weight).to(self.working))
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return -total.to(self.given.weight.dtype)


class Columns(TwoStep):
    """Products with the sampled columns of ``A``, gathered in every iteration."""

    def __init__(self, given: Given, numbers: Numbers, weights: Sequence[Tensor] = ()):
        super().__init__(given, numbers)
        # Rows are gathered faster than columns.
        self.transposed = self.weight.transpose(0, 1).contiguous()
        self.total = torch.zeros_like(self.transposed, dtype=self.working)
        self.part: tuple[int, LinearOperator] | None = None

    def _sample(self, k: int) -> Tensor:
        assert self.given.inputs is not None
        return self.given.inputs[k]

    def _operators(self, k: int) -> tuple[LinearOperator, ...]:
        if self.part is None or self.part[0] != k:
            columns = self.transposed.index_select(0, self._sample(k)).transpose(0, 1)
            self.part = k, replace(self.rule.operator, weight=columns)
        return self.part[1], self.part[1]

    def _input(self, k: int) -> Tensor | None:
        assert self.given.u is not None
        return self.given.u.index_select(self.rule.operator.feature_dim, self._sample(k)).to(self.working)

    def _diagonal(self, k: int, residual: Tensor | None = None) -> Tensor | None:
        return None

    def _add(self, k: int, place: int, left: Tensor, right: Tensor) -> None:
        part = self._operators(k)[0].weight_gradient(right, left).to(self.working)
        part = part if place == 0 else times(part, self.numbers.scale)
        self.total = self.total.index_add(0, self._sample(k), part.transpose(0, 1))

    def weight_gradient(self) -> Tensor:
        return -self.total.transpose(0, 1).to(self.given.weight.dtype)
