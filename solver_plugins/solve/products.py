"""The two exact ways to multiply by ``M = (1 - r lam) I - r A A^T``, with their share of the weight's gradient.

An iteration is ``v = M y + c``, with the rate ``r = 1/L``. From the gradients ``G_k`` of the ``v_k`` the weight gets

    dA = - r sum_k (G_k y_k^T + y_k G_k^T) A,

which ``gram`` computes as one product ``S = sum_k G_k y_k^T`` of all iterations and samples, and ``(S + S^T) A``;
``two_step`` as one product with the ``z_k = A^T y_k`` and ``h_k = A^T G_k`` that it has at hand. A ``z_k`` that was not
kept is computed again, or its share is that of ``gram``, whichever takes fewer multiply-adds.
"""

import abc
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from solver_plugins.operators import LinearMap, LinearOperator, is_eager

LARGE_BATCH = 192
"""From so many rows on a product gains nothing by more of them, and putting them together costs time and memory."""
SMALLEST_BLOCK = 192
"""Below so many rows a product is not split into blocks: small products are slow."""


@dataclass(frozen=True, eq=False)
class Map:
    """What a solve multiplies by.

    Attributes:
        operator: ``A`` without a diagonal; its weight is a stand-in for the one that is given to :func:`products`.
        lam: The strong convexity.
        dtype: The precision of the products; iterates have at least float32.
        few_rows: Whether a two-step path multiplies fewer rows than the weight has, so that these are scaled.
        regrouped: Whether a two-step path sums ``G_k y_k^T`` where no ``z_k`` was kept, instead of computing it again.
    """

    operator: LinearOperator
    lam: float
    dtype: torch.dtype
    few_rows: bool = False
    regrouped: bool = False


class Sum:
    """``sum_k a_k^T b_k`` over iterations: in one large product, or one by one where each is large by itself."""

    def __init__(self) -> None:
        self.left: list[Tensor] = []
        self.right: list[Tensor] = []
        self.total: Tensor | None = None

    def add(self, left: Tensor, right: Tensor) -> None:
        """Adds one iteration, with one row per sample in both factors."""
        if left.shape[0] < LARGE_BATCH:
            self.left.append(left)
            self.right.append(right)
        elif self.total is None:
            self.total = left.t() @ right
        else:
            self.total.addmm_(left.t(), right)

    def result(self) -> Tensor | None:
        """Returns the sum; None if there is nothing to add."""
        if not self.left:
            return self.total
        product = torch.cat(self.left).t() @ torch.cat(self.right)
        return product if self.total is None else self.total + product


class Products(abc.ABC):
    """Products with ``M``, and what they leave for the gradient of the weight.

    Attributes:
        matrix: What was made of ``A A^T``, if anything was.
    """

    matrix: Tensor | None = None

    @abc.abstractmethod
    def advance(self, y: Tensor, c: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns ``M y + c``, and ``z`` where the gradient of the weight needs it."""

    @abc.abstractmethod
    def pull(self, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns ``M G``, and ``h`` where the gradient of the weight needs it."""

    @abc.abstractmethod
    def collect(self, grad: Tensor, y: Tensor, z: Tensor | None, h: Tensor | None) -> None:
        """Takes note of one iteration for :meth:`weight_gradient`."""

    @abc.abstractmethod
    def weight_gradient(self) -> Tensor:
        """Returns the gradient of the weight by all iterations that were collected."""


def products(
    map: Map, weight: Tensor, rate: Tensor, path: str, gram: Tensor | None = None, matrix: Tensor | None = None
) -> Products:
    """Returns the products of a path.

    Args:
        map: What is multiplied by.
        weight: Its weight.
        rate: ``r``.
        path: "gram" or "two_step".
        gram: ``A A^T`` where it is known already.
        matrix: The :attr:`Products.matrix` of products that were made before.
    """
    return _Gram(map, weight, rate, gram, matrix) if path == "gram" else _TwoStep(map, weight, rate)


class _Gram(Products):
    matrix: Tensor

    def __init__(self, map: Map, weight: Tensor, rate: Tensor, gram: Tensor | None, matrix: Tensor | None):
        self.weight, self.rate, self.dtype = weight, rate, map.dtype
        self.lam, self.lowered = map.lam, map.dtype != rate.dtype
        if matrix is not None:
            self.matrix = matrix
        elif self.lowered:
            # Without the identity, which a half would round; scaled in both factors, so that none overflows.
            if gram is None:
                scaled = (weight.to(rate.dtype) * rate.sqrt()).to(map.dtype)
                self.matrix = scaled @ scaled.t()
            else:
                self.matrix = (gram.to(rate.dtype) * rate).to(map.dtype)
        elif is_eager(rate.device) and type(rate) is Tensor and not torch.is_grad_enabled():
            # The same in fewer operations: a small layer takes longer to call than to multiply.
            number = float(rate)
            self.matrix = (symmetric_product(weight) if gram is None else gram) * -number
            self.matrix.diagonal().add_(1 - number * map.lam)
        else:
            scaled = (symmetric_product(weight) if gram is None else gram) * -rate
            self.matrix = scaled + torch.diag_embed(self.kept.expand(scaled.shape[-1]))
        self.sum = Sum()

    @property
    def kept(self) -> Tensor:
        """``1 - r lam``."""
        return 1 - self.rate * self.lam

    def advance(self, y: Tensor, c: Tensor) -> tuple[Tensor, None]:
        if self.lowered:
            return torch.addcmul(c, y, self.kept) - (y.to(self.dtype) @ self.matrix).to(c.dtype), None
        return torch.addmm(c, y, self.matrix), None

    def pull(self, grad: Tensor) -> tuple[Tensor, None]:
        # M is symmetric.
        if self.lowered:
            return self.kept * grad - (grad.to(self.dtype) @ self.matrix).to(grad.dtype), None
        return grad @ self.matrix, None

    def collect(self, grad: Tensor, y: Tensor, z: Tensor | None, h: Tensor | None) -> None:
        self.sum.add(grad.to(self.dtype), y.to(self.dtype))

    def weight_gradient(self) -> Tensor:
        sums = self.sum.result()
        assert sums is not None
        return _regrouped(sums, self.weight.to(self.dtype), self.rate).to(self.weight.dtype)


def _regrouped(sums: Tensor, matrix: Tensor, rate: Tensor) -> Tensor:
    """Returns ``- r (S + S^T) A``."""
    sums = sums.to(rate.dtype)
    return ((sums + sums.t()) * -rate).to(matrix.dtype) @ matrix


class _TwoStep(Products):
    def __init__(self, map: Map, weight: Tensor, rate: Tensor):
        self.rate, self.kept, self.negative = rate, 1 - rate * map.lam, -rate
        self.lowered = map.dtype != rate.dtype
        self.regrouped, self.weight_dtype = map.regrouped, weight.dtype
        self.flat = isinstance(map.operator, LinearMap)
        # Where looking at it costs nothing, the rate is a number that a product takes along.
        self.number = float(rate) if not self.lowered and is_eager(rate.device) and type(rate) is Tensor else None
        self.alpha = 1 if self.number is None else -self.number
        # Else it is on the smaller factor, the weight or z; in half precision it might underflow on the weight.
        self.on_rows = self.lowered or (map.few_rows and self.number is None)
        matrix = weight.to(map.dtype)
        plain = self.on_rows or (self.flat and self.number is not None)
        scaled = matrix if plain else weight * self.negative
        if self.flat:
            self.factor, self.transposed = matrix, scaled.t()
        else:
            self.operator, self.scaled = (replace(map.operator, weight=one) for one in (matrix, scaled))
        self.sum, self.outer = Sum(), Sum()
        self.total: Tensor | None = None

    def advance(self, y: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        z = self._adjoint(y)
        # In place on what has just been made, and not addmm_, which a counter of operations does not see.
        if self.flat and not self.lowered:
            return torch.addmm(c, z, self.transposed, alpha=self.alpha).addcmul_(y, self.kept), z
        # A convolution returns a view, which is no result of a function that activations may overwrite.
        return torch.addcmul(c, y, self.kept).add_(self._times(z)), z

    def pull(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        h = self._adjoint(grad)
        if self.flat and self.number is not None:
            return torch.addmm(grad, h, self.transposed, beta=float(self.kept), alpha=self.alpha), h
        return self._times(h).to(grad.dtype).addcmul_(grad, self.kept), h

    def _adjoint(self, x: Tensor) -> Tensor:
        z = torch.mm(self._lower(x), self.factor) if self.flat else self.operator.adjoint(x)
        if self.lowered:
            return (z.to(self.rate.dtype) * self.negative).to(z.dtype)
        return z.mul_(self.negative) if self.on_rows else z

    def _times(self, z: Tensor) -> Tensor:
        """Returns ``- r A z``."""
        return torch.mm(z, self.transposed) if self.flat else self.scaled.apply(z)

    def _lower(self, x: Tensor) -> Tensor:
        return x.to(self.factor.dtype) if self.lowered else x

    def collect(self, grad: Tensor, y: Tensor, z: Tensor | None, h: Tensor | None) -> None:
        assert h is not None
        if self.flat:
            grad, y = self._lower(grad), self._lower(y)
            if z is None and self.regrouped:
                self.outer.add(grad, y)
                return
            self.sum.add(grad, self._adjoint(y) if z is None else z)
            self.sum.add(y, h)
            return
        # Batch and space are large enough for products of their own, and too large for copies.
        for u, g in ((self._adjoint(y) if z is None else z, grad), (h, y)):
            part = self.operator.weight_gradient(u, g.to(u.dtype)).to(self.rate.dtype)
            self.total = part if self.total is None else self.total.add_(part)

    def weight_gradient(self) -> Tensor:
        total, outer = self.sum.result() if self.flat else self.total, self.outer.result()
        if total is not None:
            total = total.to(self.rate.dtype)
            # Else z and h have the rate in them.
            total = total if self.on_rows else total * self.negative
        if outer is not None:
            rest = _regrouped(outer, self.factor, self.rate)
            total = rest if total is None else total + rest
        assert total is not None
        return total.to(self.weight_dtype)


def symmetric_product(matrix: Tensor) -> Tensor:
    """Returns ``A A^T`` with few more than half of the multiply-adds: blocks above the diagonal are copied."""
    rows = matrix.shape[0]
    if rows < 2 * SMALLEST_BLOCK:
        return matrix @ matrix.t()
    upper, lower = matrix[: rows // 2], matrix[rows // 2 :]
    corner = upper @ lower.t()
    above = torch.cat([symmetric_product(upper), corner], 1)
    return torch.cat([above, torch.cat([corner.t(), symmetric_product(lower)], 1)])
