"""The two exact ways to multiply by ``M = (1 - r lam) I - r A A^T``, with their share of the weight's gradient.

An iteration is ``v = M y + c``, with the rate ``r = 1/L``. From the gradients ``G_k`` of the ``v_k`` the weight gets

    dA = - r sum_k (G_k y_k^T + y_k G_k^T) A,

which ``gram`` computes as one product ``S = sum_k G_k y_k^T`` of all iterations and samples, and ``(S + S^T) A``;
``two_step`` as one product with the ``z_k = A^T y_k`` and ``h_k = A^T G_k`` that it has at hand.
"""

import abc
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from solver_plugins.operators import LinearMap, LinearOperator

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
    """

    operator: LinearOperator
    lam: float
    dtype: torch.dtype


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
        self.kept = 1 - rate * map.lam
        self.lowered = map.dtype != rate.dtype
        if matrix is not None:
            self.matrix = matrix
        elif self.lowered:
            # Without the identity, which a half would round; scaled in both factors, so that none overflows.
            if gram is None:
                scaled = (weight.to(rate.dtype) * rate.sqrt()).to(map.dtype)
                self.matrix = scaled @ scaled.t()
            else:
                self.matrix = (gram.to(rate.dtype) * rate).to(map.dtype)
        else:
            scaled = (symmetric_product(weight) if gram is None else gram) * -rate
            self.matrix = scaled + torch.diag_embed(self.kept.expand(scaled.shape[-1]))
        self.sum = Sum()

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
        sums = sums.to(self.rate.dtype)
        both = ((sums + sums.t()) * -self.rate).to(self.dtype)
        return (both @ self.weight.to(self.dtype)).to(self.weight.dtype)


class _TwoStep(Products):
    def __init__(self, map: Map, weight: Tensor, rate: Tensor):
        self.rate, self.kept = rate, 1 - rate * map.lam
        self.lowered = map.dtype != rate.dtype
        self.operator = replace(map.operator, weight=weight.to(map.dtype))
        # The rate on the weight once, not on z in every iteration; in half precision it might underflow there.
        self.scaled = self.operator if self.lowered else replace(map.operator, weight=weight * -rate)
        self.flat = isinstance(map.operator, LinearMap)
        self.weight_dtype = weight.dtype
        self.sum = Sum()
        self.total: Tensor | None = None

    def advance(self, y: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        z = self._adjoint(y)
        base = torch.addcmul(c, y, self.kept)
        return self._add(base, z), z

    def pull(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        h = self._adjoint(grad)
        return self._add(self.kept * grad, h), h

    def _adjoint(self, x: Tensor) -> Tensor:
        z = self.operator.adjoint(x)
        return (z.to(self.rate.dtype) * -self.rate).to(z.dtype) if self.lowered else z

    def _add(self, base: Tensor, z: Tensor) -> Tensor:
        if self.flat and not self.lowered:
            return torch.addmm(base, z, self.scaled.weight.t())
        return base + self.scaled.apply(z).to(base.dtype)

    def collect(self, grad: Tensor, y: Tensor, z: Tensor | None, h: Tensor | None) -> None:
        assert z is not None and h is not None
        grad, y = grad.to(z.dtype), y.to(z.dtype)
        if self.flat:
            self.sum.add(grad, z)
            self.sum.add(y, h)
            return
        # Batch and space are large enough for products of their own, and too large for copies.
        for u, g in ((z, grad), (h, y)):
            part = self.operator.weight_gradient(u, g).to(self.rate.dtype)
            self.total = part if self.total is None else self.total + part

    def weight_gradient(self) -> Tensor:
        total = self.sum.result() if self.flat else self.total
        assert total is not None
        total = total.to(self.rate.dtype)
        # In half precision z and h have the rate in them.
        return (total if self.lowered else total * -self.rate).to(self.weight_dtype)


def symmetric_product(matrix: Tensor) -> Tensor:
    """Returns ``A A^T`` with few more than half of the multiply-adds: blocks above the diagonal are copied."""
    rows = matrix.shape[0]
    if rows < 2 * SMALLEST_BLOCK:
        return matrix @ matrix.t()
    upper, lower = matrix[: rows // 2], matrix[rows // 2 :]
    corner = upper @ lower.t()
    above = torch.cat([symmetric_product(upper), corner], 1)
    return torch.cat([above, torch.cat([corner.t(), symmetric_product(lower)], 1)])
