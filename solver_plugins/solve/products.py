"""Exchangeable ways to multiply by ``M_k = (1 - t_k s lam) I - t_k s A D_k A^T``, with the weight's gradient.

From the gradients ``G_k`` of the ``v_{k+1} = M_k d_k + ...`` the weight gets

    dA = - sum_k (G_k z_k^T + s d_k h_k^T),      z_k = t_k D_k (s A^T d_k - u),      h_k = t_k D_k A^T G_k,

where ``u`` is there for a sampled gradient only, whose own gradient is ``sum_k h_k``. :class:`TwoStep` has ``z`` and
``h`` at hand; :class:`Gram` sums ``S = sum_k t_k G_k d_k^T`` and takes one product ``- s (S + S^T) A``.
"""

import abc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from solver_plugins.prox import Step
from solver_plugins.solve.layout import symmetric_product, with_diagonal
from solver_plugins.solve.recursion import Given
from solver_plugins.solve.steps import Numbers, is_one, times

Maybe = Tensor | None
LARGE_BATCH = 192
"""From this many rows on a product gains nothing by more of them, and putting them together costs time and memory."""


class Sum:
    """``sum_k a_k^T b_k`` over iterations: in one large product, or one by one where each is large by itself."""

    def __init__(self) -> None:
        self.small: list[tuple[Tensor, Tensor]] = []
        self.total: Tensor | None = None

    def add(self, left: Tensor, right: Tensor) -> None:
        """Adds one iteration: one row per sample in both factors, or one matrix of features by places."""
        if left.dim() == 2 and left.shape[0] < LARGE_BATCH:
            self.small.append((left, right))
            return
        left, right = (left.t(), right) if left.dim() == 2 else (left, right.mT)
        if self.total is None:
            self.total = left @ right
        else:
            (self.total.addmm_ if left.dim() == 2 else self.total.baddbmm_)(left, right)

    def result(self) -> Tensor | None:
        """Returns the sum; None if there is nothing to add."""
        if not self.small:
            return self.total
        left, right = (one[0] if len(one) == 1 else torch.cat(one) for one in zip(*self.small, strict=True))
        found = left.t() @ right
        return found if self.total is None else self.total + found


class Products(abc.ABC):
    """Products with ``M_k``, and what they leave for the gradient of the weight.

    Results are written to ``out`` and ``place`` where these are given, which they are where values are at hand.

    Attributes:
        matrix: What was made of ``A A^T``, if anything was.
        weights: What a chooser has drawn, one for each iteration.
    """

    matrix: Tensor | None = None
    weights: list[Tensor]

    def __init__(self, given: Given, numbers: Numbers):
        self.rule, self.numbers, self.given, self.weights = given.rule, numbers, given, []
        self.working, self.dtype = given.smoothness.dtype, given.rule.dtype
        self.lowered = self.dtype != self.working

    @abc.abstractmethod
    def advance(self, k: int, d: Maybe, base: Maybe, out: Maybe = None, place: Maybe = None) -> tuple[Tensor, Maybe]:
        """Returns ``M_k d + base``, None standing for zero, and ``z_k`` where the weight's gradient needs it."""

    @abc.abstractmethod
    def pull(self, k: int, grad: Tensor, out: Maybe = None, place: Maybe = None) -> tuple[Tensor, Maybe]:
        """Returns ``M_k G``, and ``h_k`` where the gradient of the weight needs it."""

    @abc.abstractmethod
    def collect(self, k: int, grad: Tensor, d: Maybe, z: Maybe, h: Maybe) -> None:
        """Takes note of one iteration, or of all in one buffer, for :meth:`weight_gradient`."""

    def spread(self, k: int, h: Tensor) -> Tensor:
        """Returns the share of an iteration in the gradient of the input."""
        return h

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
        self.matrix = self._made() if matrix is None else matrix
        # One matrix for every sample, or one for every group of it.
        assert given.c is not None
        self.rows, self.factor = given.c.dim() == 2, self.matrix
        if not self.rows:
            whole = self.matrix if self.matrix.dim() == 3 else self.matrix.unsqueeze(0)
            copies = given.c.shape[0] // len(whole)
            self.factor = whole.expand(copies, *whole.shape).reshape(-1, *whole.shape[1:])
        self.sum = Sum()

    def _made(self) -> Tensor:
        weight, gram = self.given.weight, self.given.gram
        if self.lowered and gram is None:
            # Without the identity, which a half would round; scaled in both factors, so that none overflows.
            scaled = (weight.to(self.working) * self.rate**0.5).to(self.dtype)
            return scaled @ scaled.mT
        if self.lowered and gram is not None:
            return (gram.to(self.working) * self.rate).to(self.dtype)
        matrix = (symmetric_product(weight) if gram is None else gram) * -self.rate
        if self.numbers.at_hand and not torch.is_grad_enabled():
            matrix.diagonal(dim1=-2, dim2=-1).add_(self.numbers.kept[0])
            return matrix
        return with_diagonal(matrix, self.numbers.kept[0])

    def _moved(self, k: int, x: Tensor, base: Maybe, out: Maybe) -> Tensor:
        """Returns ``M_k x + base``."""
        factor: Any = self.numbers.factors[k]
        if self.lowered:
            kept = x * self.numbers.kept[k]
            low = times(self._product(x.to(self.dtype), None), factor).to(self.working)
            return (kept if base is None else base + kept) - low
        if is_one(factor):
            return self._product(x, base, out)
        rest = x * (1 - factor) if base is None else base + x * (1 - factor)
        return self._product(x, rest, out, factor) if self.numbers.at_hand else rest + self._product(x, None) * factor

    def _product(self, x: Tensor, base: Maybe, out: Maybe = None, factor: float = 1.0) -> Tensor:
        left, right = (x, self.factor) if self.rows else (self.factor, x)
        if base is None:
            return (torch.mm if self.rows else torch.bmm)(left, right, out=out)
        return (torch.addmm if self.rows else torch.baddbmm)(base, left, right, alpha=factor, out=out)

    def advance(self, k: int, d: Maybe, base: Maybe, out: Maybe = None, place: Maybe = None) -> tuple[Tensor, None]:
        assert d is not None
        return self._moved(k, d, base, out), None

    def pull(self, k: int, grad: Tensor, out: Maybe = None, place: Maybe = None) -> tuple[Tensor, None]:
        # M is symmetric.
        return self._moved(k, grad, None, out), None

    def collect(self, k: int, grad: Tensor, d: Maybe, z: Maybe, h: Maybe) -> None:
        assert d is not None
        self.sum.add(times(grad, self.numbers.factors[k]).to(self.dtype), d.to(self.dtype))

    def weight_gradient(self) -> Tensor:
        sums, weight = self.sum.result(), self.given.weight
        assert sums is not None
        if sums.dim() == 3:
            sums = sums.unflatten(0, (-1, len(weight))).sum(0) if weight.dim() == 3 else sums.sum(0)
        sums = sums.to(self.working)
        found = ((sums + sums.mT) * -self.rate).to(self.dtype) @ weight.to(self.dtype)
        return found.to(weight.dtype)


class TwoStep(Products):
    """Products with ``A^T``, then ``A``; with a mask, or weights, between them where the inputs are sampled."""

    def __init__(self, given: Given, numbers: Numbers, weights: Sequence[Tensor] = ()):
        super().__init__(given, numbers)
        self.weights, rule = list(weights), self.rule
        self.weight, self.rows = given.weight.to(self.dtype), rule.operator is None
        # Rows take a number along in a product. In half precision s might underflow on the weight.
        self.rides = self.rows and not self.lowered and numbers.at_hand
        self.on_weight = not (self.lowered or self.rides or rule.path == "columns")
        scaled = times(self.weight, numbers.scale) if self.on_weight else self.weight
        self.pair = self._map(self.weight), self._map(scaled)
        self.sums = Sum(), Sum()
        self.outer = Sum()
        self.totals: list[Tensor | None] = [None, None]

    def _map(self, weight: Tensor) -> Any:
        """Returns what multiplies: a matrix itself, or a convolution."""
        return weight if self.rule.operator is None else replace(self.rule.operator, weight=weight)

    def _maps(self, k: int) -> tuple[Any, Any]:
        """Returns ``A`` in iteration ``k``, and ``s A`` if that is made."""
        return self.pair

    def _down(self, k: int, x: Tensor, scaled: bool, factor: Any, u: Maybe = None, out: Maybe = None) -> Tensor:
        """Returns ``factor * (A^T x - u)``, with ``s A`` for ``A`` where it is scaled."""
        scale: Any = self.numbers.scale if scaled else 1.0
        made = self._maps(k)[scaled]
        if self.rides:
            rate = factor * scale
            if u is not None:
                return torch.addmm(u, x, made, beta=-factor, alpha=rate, out=out)
            if rate == 1.0:
                return torch.mm(x, made, out=out)
            empty = x.new_empty((x.shape[0], made.shape[1])) if out is None else out
            return torch.addmm(empty, x, made, beta=0, alpha=rate, out=out)
        x = x.to(self.dtype)
        z = (torch.mm(x, made) if self.rows else made.adjoint(x)).to(self.working)
        z = z if self.on_weight else times(z, scale)
        return times(z if u is None else z - u, factor)

    def _up(self, k: int, z: Tensor, scaled: bool, base: Maybe, kept: Any = 1.0, out: Maybe = None) -> Tensor:
        """Returns ``kept * base - A z``, with ``s A`` for ``A`` where it is scaled; None is zero."""
        scale: Any = self.numbers.scale if scaled else 1.0
        made = self._maps(k)[scaled]
        if self.rides and base is not None:
            return torch.addmm(base, z, made.t(), beta=kept, alpha=-scale, out=out)
        z = (z if self.on_weight else times(z, scale)).to(self.dtype)
        moved = (torch.mm(z, made.t()) if self.rows else made.apply(z)).to(self.working)
        return -moved if base is None else torch.sub(times(base, kept), moved, out=out)

    def _factor(self, k: int) -> Step:
        """Returns ``t_k q``: what all entries of ``t_k D_k`` have in common."""
        step = self.numbers.steps[k]
        return step if self.rule.sample(k) is None else times(step, self.rule.share)

    def _diagonal(self, k: int, residual: Tensor | None = None) -> Tensor | None:
        """Returns ``D_k`` over its share; None for ones. A chooser looks at the residual, once."""
        place, chooser = self.rule.sample(k), self.rule.chooser
        if place is None:
            return None
        if chooser is None:
            assert self.given.inputs is not None
            return self.given.inputs[place]
        if place == len(self.weights):
            assert residual is not None
            with torch.no_grad():
                self.weights.append(chooser(residual.detach()))
        return self.weights[place]

    def _input(self, k: int) -> Tensor | None:
        return self.given.u if self.rule.sampled else None

    def _image(self, k: int, d: Maybe, out: Maybe = None) -> Tensor:
        """Returns ``z_k``."""
        u, chooses = self._input(k), self.rule.chooser is not None
        # A chooser sees the residual itself.
        factor = 1.0 if chooses else self._factor(k)
        if d is None:
            assert u is not None
            z = times(-u.to(self.working), factor)
        else:
            z = self._down(k, d, True, factor, u, out)
        diagonal = self._diagonal(k, z)
        if diagonal is None:
            return z
        # A product, not torch.where, which takes ten times as long.
        z = z * diagonal if torch.is_grad_enabled() or chooses else z.mul_(diagonal)
        return times(z, self._factor(k)) if chooses else z

    def advance(self, k: int, d: Maybe, base: Maybe, out: Maybe = None, place: Maybe = None) -> tuple[Tensor, Maybe]:
        z, kept = self._image(k, d, place), self.numbers.kept[k]
        if d is None:
            return self._up(k, z, False, base), z
        if base is None:
            return self._up(k, z, False, d, kept, out), z
        base = torch.add(base, d, alpha=kept, out=out) if isinstance(kept, float) else torch.addcmul(base, d, kept)
        # In place on what has just been made.
        # Not in a program of torch.export: autograd may run its operations, and takes no out=.
        if not (self.rides or torch.is_grad_enabled() or torch.compiler.is_compiling()):
            out = base
        return self._up(k, z, False, base, out=out), z

    def pull(self, k: int, grad: Tensor, out: Maybe = None, place: Maybe = None) -> tuple[Tensor, Maybe]:
        h, diagonal = self._down(k, grad, False, self._factor(k), out=place), self._diagonal(k)
        h = h if diagonal is None else h.mul_(diagonal)
        return self._up(k, h, True, grad, self.numbers.kept[k], out), h

    def collect(self, k: int, grad: Tensor, d: Maybe, z: Maybe, h: Maybe) -> None:
        if z is None and self.rows and self.rule.regrouped and d is not None:
            self.outer.add(times(grad, self._factor(k)).to(self.dtype), d.to(self.dtype))
            return
        for place, (left, right) in enumerate(((grad, self._image(k, d) if z is None else z), (d, h))):
            if left is not None and right is not None:
                self._add(k, place, left.to(self.dtype), right.to(self.dtype))

    def _add(self, k: int, place: int, left: Tensor, right: Tensor) -> None:
        if self.rows:
            self.sums[place].add(left, right)
            return
        # Batch and space are large enough for products of their own, and too large for copies.
        part, total = self.pair[0].weight_gradient(right, left).to(self.working), self.totals[place]
        self.totals[place] = part if total is None else total.add_(part)

    def weight_gradient(self) -> Tensor:
        scale, outer = self.numbers.scale, self.outer.result()
        found = [one.result() for one in self.sums] if self.rows else self.totals
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
        self.part: tuple[int, Any] = -1, None
        self.dim = -1 if self.rule.operator is None else self.rule.operator.feature_dim

    def _sample(self, k: int) -> Tensor:
        assert self.given.inputs is not None
        return self.given.inputs[k]

    def _maps(self, k: int) -> tuple[Any, Any]:
        if self.part[0] != k:
            self.part = k, self._map(self.transposed.index_select(0, self._sample(k)).transpose(0, 1))
        return self.part[1], self.part[1]

    def _input(self, k: int) -> Tensor | None:
        assert self.given.u is not None
        return self.given.u.index_select(self.dim, self._sample(k)).to(self.working)

    def _diagonal(self, k: int, residual: Tensor | None = None) -> Tensor | None:
        return None

    def _add(self, k: int, place: int, left: Tensor, right: Tensor) -> None:
        part = left.t() @ right if self.rows else self._maps(k)[0].weight_gradient(right, left)
        part = times(part.to(self.working), (1.0, self.numbers.scale)[place])
        self.total = self.total.index_add(0, self._sample(k), part.transpose(0, 1))

    def spread(self, k: int, h: Tensor) -> Tensor:
        assert self.given.u is not None
        return torch.zeros_like(self.given.u, dtype=h.dtype).index_add(self.dim, self._sample(k), h)

    def weight_gradient(self) -> Tensor:
        return -self.total.transpose(0, 1).to(self.given.weight.dtype)
