"""Exchangeable ways to multiply by ``M_k = (1 - t_k s lam) I - t_k s A D_k A^T``, with the weight's gradient.

From the gradients ``G_k`` of the ``v_{k+1} = M_k d_k + ...`` the weight gets

    dA = - sum_k (G_k z_k^T + s d_k h_k^T),      z_k = t_k D_k (s A^T d_k - u),      h_k = t_k D_k A^T G_k,

where ``u`` is there for a sampled gradient only, whose own gradient is ``sum_k h_k``. :class:`TwoStep` has ``z`` and
``h`` at hand; :class:`Gram` sums ``S = sum_k t_k G_k d_k^T`` and takes one product ``- s (S + S^T) A``.
"""

import abc
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from solver_plugins.operators import LinearMap, LinearOperator, is_eager
from solver_plugins.prox import Prior
from solver_plugins.prox.base import Step
from solver_plugins.solve.layout import Layout
from solver_plugins.solve.recursion import Recursion, Samples

LARGE_BATCH = 192
"""From this many rows on a product gains nothing by more of them, and putting them together costs time and memory."""
SMALLEST_BLOCK = 192
"""Below this many rows a product is not split into blocks: small products are slow."""


@dataclass(frozen=True, eq=False)
class Rule:
    """All of a solve that is not a tensor.

    Attributes:
        operator: ``A`` without a diagonal; its weight is a stand-in for that of :class:`Given`.
        dtype: The precision of the products; iterates have at least float32.
        path: "two_step", "gram", "masked" or "columns".
        recursion: The iterations.
        iterations: ``T``.
        prior: ``g``.
        lam: The strong convexity.
        unit: Whether ``s = 1/L`` and ``t = 1`` (formulation ``normalized``), else ``s = 1`` and ``t = 1/L``.
        layout: How the output's dimensions are merged.
        samples: What was drawn, but for its tensors.
        low: Whether iterates are computed again in the backward pass instead of being kept.
        images: Of how many iterations, the first ones, ``z_k`` is kept.
        regrouped: Whether a two-step path sums ``G_k d_k^T`` where no ``z_k`` was kept, instead of computing it again.
        stacked: Whether all iterations may be kept in one buffer, where values are at hand.
    """

    operator: LinearOperator
    dtype: torch.dtype
    path: str
    recursion: Recursion
    iterations: int
    prior: Prior
    lam: float
    unit: bool
    layout: Layout
    samples: Samples = Samples()
    low: bool = False
    images: int = 0
    regrouped: bool = False
    stacked: bool = False

    @property
    def draws_gradients(self) -> bool:
        """Whether the samples are those of whole gradients, with the input in them."""
        return self.path in ("masked", "columns") and self.recursion.reference is None

    @property
    def is_flat(self) -> bool:
        """Whether products are those of rows with a matrix."""
        return isinstance(self.operator, LinearMap)

    def sample(self, k: int) -> int | None:
        """Returns the place of iteration ``k`` among the samples of the inputs; None for a full gradient."""
        if self.path not in ("masked", "columns"):
            return None
        inner = self.recursion.reference
        if inner is None:
            return k
        return None if k % inner == 0 else k - 1 - k // inner


class Given(NamedTuple):
    """A whole solve, in the order in which autograd is given it.

    Attributes:
        c: ``v_1``, where that is the layer's output; None where gradients are sampled.
        u: The input, where gradients are sampled.
        weight: ``A``.
        bias: ``b`` where gradients are sampled.
        smoothness: ``L``.
        gram: ``A A^T``, a constant, where it is known already.
        inputs: See :class:`~solver_plugins.solve.recursion.Samples`, as for the next two.
        outputs: Masks of the outputs.
        picks: Shares of the iterates in reference points.
        rule: All that is not a tensor.
    """

    c: Tensor | None
    u: Tensor | None
    weight: Tensor
    bias: Tensor | None
    smoothness: Tensor
    gram: Tensor | None
    inputs: Tensor | None
    outputs: Tensor | None
    picks: Tensor | None
    rule: Rule


class Numbers:
    """The scalars of a solve: Python numbers where looking at them costs nothing, else 0-d tensors.

    Attributes:
        at_hand: Whether they are numbers.
        scale: ``s``.
        factors: ``f_k``.
        steps: ``t_k``.
        kept: ``1 - t_k s lam``.
        constant: Whether all steps are the same.
    """

    def __init__(self, smoothness: Tensor, recursion: Recursion, iterations: int, *, unit: bool, lam: float):
        self.at_hand = is_eager(smoothness.device) and type(smoothness) is Tensor
        constant: Step = float(smoothness) if self.at_hand else smoothness
        inverse = 1 / constant
        self.scale: Step = inverse if unit else 1.0
        base: Step = 1.0 if unit else inverse
        factor = recursion.factor
        self.factors: list[Step] = [1.0 if factor is None else factor(k, constant) for k in range(iterations)]
        self.steps: list[Step] = [times(base, one) for one in self.factors]
        self.kept: list[Step] = [1 - step * (self.scale * lam) for step in self.steps]
        self.constant = factor is None or all(isinstance(one, float) and one == 1.0 for one in self.factors)


def times(one: Any, factor: Step) -> Any:
    """Returns ``factor * one``, without a pass over memory where the factor is the number one."""
    return one if isinstance(factor, float) and factor == 1.0 else one * factor


def plus(one: Tensor, other: Tensor, factor: Step, out: Tensor | None = None) -> Tensor:
    """Returns ``one + factor * other``."""
    if isinstance(factor, Tensor):
        return torch.addcmul(one, other, factor)
    return torch.add(one, other, alpha=factor, out=out)


def product(left: Tensor, right: Tensor, factor: Step, out: Tensor | None = None) -> Tensor:
    """Returns ``factor * left right`` of matrices, without a pass over memory where the factor is a number."""
    if isinstance(factor, Tensor):
        return (left @ right) * factor
    if factor == 1.0:
        return torch.mm(left, right, out=out)
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


class Sum:
    """``sum_k a_k^T b_k`` over iterations: in one large product, or one by one where each is large by itself."""

    def __init__(self) -> None:
        self.left: list[Tensor] = []
        self.right: list[Tensor] = []
        self.total: Tensor | None = None

    def add(self, left: Tensor, right: Tensor) -> None:
        """Adds one iteration, with one row per sample in both factors, or one matrix per problem."""
        if left.dim() == 3:
            part = left @ right.mT
            self.total = part if self.total is None else self.total.add_(part)
        elif left.shape[0] < LARGE_BATCH:
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

    def __init__(self, given: Given, numbers: Numbers):
        self.rule, self.numbers, self.given = given.rule, numbers, given
        self.working = given.smoothness.dtype
        self.lowered = given.rule.dtype != self.working
        self.weights: list[Tensor] = []

    @abc.abstractmethod
    def advance(
        self, k: int, d: Tensor | None, base: Tensor | None, out: Tensor | None = None, image: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns ``M_k d + base``, and ``z_k`` where the gradient of the weight needs it.

        Args:
            k: The iteration.
            d: None is zero, in a sampled gradient.
            base: None is zero.
            out: Where to write the first result, where values are at hand.
            image: Where to write the second.
        """

    @abc.abstractmethod
    def pull(
        self, k: int, grad: Tensor, out: Tensor | None = None, image: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns ``M_k G``, and ``h_k`` where the gradient of the weight needs it; arguments as in :meth:`advance`."""

    @abc.abstractmethod
    def collect(self, k: int, grad: Tensor, d: Tensor | None, z: Tensor | None, h: Tensor | None) -> None:
        """Takes note of one iteration, or of all in one buffer, for :meth:`weight_gradient`."""

    @abc.abstractmethod
    def weight_gradient(self) -> Tensor:
        """Returns the gradient of the weight by all iterations that were collected."""


def make_products(given: Given, numbers: Numbers, matrix: Tensor | None = None) -> Products:
    """Returns the products of a path; ``matrix`` is the :attr:`Products.matrix` of products that were made before."""
    if given.rule.path == "gram":
        return Gram(given, numbers, matrix)
    return Columns(given, numbers) if given.rule.path == "columns" else TwoStep(given, numbers)


class Gram(Products):
    """Products with ``M = (1 - t s lam) I - t s A A^T`` as a matrix: rows from the right, places from the left."""

    matrix: Tensor

    def __init__(self, given: Given, numbers: Numbers, matrix: Tensor | None):
        super().__init__(given, numbers)
        rate, gram = self.rate, given.gram
        if matrix is None and self.lowered:
            # Without the identity, which a half would round; scaled in both factors, so that none overflows.
            if gram is None:
                scaled = (self._rows(given.weight).to(self.working) * rate**0.5).to(self.rule.dtype)
                matrix = scaled @ scaled.mT
            else:
                matrix = (gram.to(self.working) * rate).to(self.rule.dtype)
        elif matrix is None:
            gram = symmetric_product(self._rows(given.weight)) if gram is None else gram
            matrix = gram * -rate
            kept = numbers.kept[0]
            if isinstance(kept, float) and not torch.is_grad_enabled():
                matrix.diagonal(dim1=-2, dim2=-1).add_(kept)
            else:
                diagonal = torch.as_tensor(kept, dtype=matrix.dtype, device=matrix.device)
                matrix = matrix + torch.diag_embed(diagonal.expand(matrix.shape[-1]))
        self.matrix = matrix
        self.sum = Sum()

    @property
    def rate(self) -> Any:
        """``t s``, which is ``1/L``."""
        return self.numbers.scale * self.numbers.steps[0]

    def _rows(self, weight: Tensor) -> Tensor:
        """Returns ``A`` at one place, as one matrix per group where there are several."""
        groups = 1 if self.rule.is_flat else self.rule.operator.geometry.groups  # type: ignore[attr-defined]
        matrix = weight.flatten(1)
        return matrix if groups == 1 else matrix.unflatten(0, (groups, -1))

    def _times(self, x: Tensor, base: Tensor | None, factor: Step, out: Tensor | None = None) -> Tensor:
        """Returns ``factor * M x + base``."""
        if x.dim() == 2:
            if base is None:
                return product(x, self.matrix, factor, out)
            if isinstance(factor, float):
                return torch.addmm(base, x, self.matrix, alpha=factor, out=out)
            return base + (x @ self.matrix) * factor
        matrix = self.matrix.expand(x.shape[0] // len(self.matrix), -1, -1, -1) if self.matrix.dim() == 3 else None
        matrix = self.matrix.expand(len(x), -1, -1) if matrix is None else matrix.reshape(-1, *self.matrix.shape[1:])
        if base is None:
            return times(torch.bmm(matrix, x), factor)
        if isinstance(factor, float):
            return torch.baddbmm(base, matrix, x, alpha=factor, out=out)
        return base + torch.bmm(matrix, x) * factor

    def advance(
        self, k: int, d: Tensor | None, base: Tensor | None, out: Tensor | None = None, image: Tensor | None = None
    ) -> tuple[Tensor, None]:
        assert d is not None and base is not None
        factor = self.numbers.factors[k]
        if self.lowered:
            low = self._times(d.to(self.rule.dtype), None, factor).to(self.working)
            return plus(base, d, self.numbers.kept[k]) - low, None
        if not (isinstance(factor, float) and factor == 1.0):
            base = plus(base, d, 1 - factor)
        return self._times(d, base, factor, out), None

    def pull(self, k: int, grad: Tensor, out: Tensor | None = None, image: Tensor | None = None) -> tuple[Tensor, None]:
        # M is symmetric.
        factor = self.numbers.factors[k]
        if self.lowered:
            low = self._times(grad.to(self.rule.dtype), None, factor).to(self.working)
            return self.numbers.kept[k] * grad - low, None
        if isinstance(factor, float) and factor == 1.0:
            return self._times(grad, None, 1.0, out), None
        return self._times(grad, grad * (1 - factor), factor), None

    def collect(self, k: int, grad: Tensor, d: Tensor | None, z: Tensor | None, h: Tensor | None) -> None:
        assert d is not None
        self.sum.add(times(grad, self.numbers.factors[k]).to(self.rule.dtype), d.to(self.rule.dtype))

    def weight_gradient(self) -> Tensor:
        sums = self.sum.result()
        assert sums is not None
        matrix = self._rows(self.given.weight).to(self.rule.dtype)
        if sums.dim() == 3:
            # One matrix per problem and group.
            sums = sums.unflatten(0, (-1, len(matrix) if matrix.dim() == 3 else 1)).sum(0)
            sums = sums if matrix.dim() == 3 else sums[0]
        sums = sums.to(self.working)
        found = ((sums + sums.mT) * -self.rate).to(matrix.dtype) @ matrix
        return found.reshape(self.given.weight.shape).to(self.given.weight.dtype)


class TwoStep(Products):
    """Products with ``A^T``, then ``A``; with a mask, or weights, between them where the inputs are sampled."""

    def __init__(self, given: Given, numbers: Numbers):
        super().__init__(given, numbers)
        weight = given.weight.to(self.rule.dtype)
        self.flat, self.weight = self.rule.is_flat, weight
        # Rows take a number along in a product; in half precision s might underflow on the weight.
        self.rides = self.flat and not self.lowered and numbers.at_hand
        self.on_weight = not self.lowered and not self.rides
        scaled = times(weight, numbers.scale) if self.on_weight else weight
        self.plain, self.scaled = (replace(self.rule.operator, weight=one) for one in (weight, scaled))
        self.first, self.second, self.outer = Sum(), Sum(), Sum()
        self.totals: list[Tensor | None] = [None, None]

    def _adjoint(self, x: Tensor, operator: LinearOperator) -> Tensor:
        if self.flat:
            return torch.mm(x.to(operator.weight.dtype), operator.weight).to(self.working)
        return operator.adjoint(x).to(self.working)

    def _apply(self, z: Tensor, operator: LinearOperator) -> Tensor:
        if self.flat:
            return torch.mm(z.to(operator.weight.dtype), operator.weight.t())
        return operator.apply(z.to(operator.weight.dtype))

    def _factor(self, k: int) -> Step:
        """Returns ``t_k q``: what all entries of ``t_k D_k`` have in common."""
        step, share = self.numbers.steps[k], self.rule.samples.share
        return step if share == 1.0 or self.rule.sample(k) is None else step * share

    def _diagonal(self, k: int, residual: Tensor | None = None) -> Tensor | None:
        """Returns ``D_k`` over its share; None for ones. A chooser looks at the residual, once."""
        place, rule = self.rule.sample(k), self.rule
        if place is None:
            return None
        if rule.samples.chooser is None:
            assert self.given.inputs is not None
            return self.given.inputs[place]
        if place == len(self.weights):
            assert residual is not None
            self.weights.append(self._chosen(residual))
        return self.weights[place]

    def _chosen(self, residual: Tensor) -> Tensor:
        chooser, shape = self.rule.samples.chooser, self.rule.layout.input_shape
        assert chooser is not None
        with torch.no_grad():
            weights = chooser(residual.detach().reshape(shape) if self.flat else residual.detach())
        return weights.reshape(-1, residual.shape[-1]) if self.flat else weights

    def _image(self, k: int, d: Tensor | None, out: Tensor | None = None) -> Tensor:
        """Returns ``z_k``."""
        u, factor = (self.given.u if self.rule.draws_gradients else None), self._factor(k)
        if self.rule.samples.chooser is not None:
            # The draw sees the residual itself.
            assert u is not None
            z = -u.to(self.working) if d is None else self._residual(d, u, 1.0, None)
            diagonal = self._diagonal(k, z)
            assert diagonal is not None
            return z * times(diagonal, factor)
        if d is None:
            assert u is not None
            z = times(-u.to(self.working), factor)
        else:
            z = self._residual(d, u, factor, out)
        diagonal = self._diagonal(k)
        if diagonal is None:
            return z
        # A product, not torch.where, which takes ten times as long.
        return z.mul_(diagonal) if not torch.is_grad_enabled() else z * diagonal

    def _residual(self, d: Tensor, u: Tensor | None, factor: Step, out: Tensor | None) -> Tensor:
        """Returns ``factor * (s A^T d - u)``."""
        scale = self.numbers.scale
        if self.rides and isinstance(factor, float) and isinstance(scale, float):
            if u is None:
                return product(d, self.weight, scale * factor, out)
            return torch.addmm(u, d, self.weight, beta=-factor, alpha=scale * factor, out=out)
        z = self._adjoint(d, self.scaled)
        z = z if self.on_weight else times(z, scale)
        return times(z if u is None else z - u, factor)

    def advance(
        self, k: int, d: Tensor | None, base: Tensor | None, out: Tensor | None = None, image: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        z = self._image(k, d, image)
        return self._descended(k, d, base, z, out), z

    def _descended(self, k: int, d: Tensor | None, base: Tensor | None, z: Tensor, out: Tensor | None) -> Tensor:
        """Returns ``(1 - t_k s lam) d + base - A z``."""
        kept = self.numbers.kept[k]
        if self.rides:
            transposed = self.weight.t()
            if d is None:
                return product(z, transposed, -1.0) if base is None else torch.addmm(base, z, transposed, alpha=-1)
            if base is None and isinstance(kept, float):
                return torch.addmm(d, z, transposed, beta=kept, alpha=-1, out=out)
            target = times(d, kept) if base is None else plus(base, d, kept, out)
            return torch.addmm(target, z, transposed, alpha=-1, out=out)
        moved = self._apply(z, self.plain).to(self.working)
        if d is None:
            return -moved if base is None else base - moved
        target = times(d, kept) if base is None else plus(base, d, kept)
        # A convolution may return a view, which is not a result that an activation may overwrite.
        return target - moved if torch.is_grad_enabled() else target.sub_(moved)

    def pull(
        self, k: int, grad: Tensor, out: Tensor | None = None, image: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        factor, kept, scale = self._factor(k), self.numbers.kept[k], self.numbers.scale
        if self.rides:
            h = product(grad, self.weight, factor, image)
        else:
            h = times(self._adjoint(grad, self.plain), factor)
        diagonal = self._diagonal(k)
        h = h if diagonal is None else h.mul_(diagonal)
        return self._pushed(grad, h, kept, scale, out), h

    def _pushed(self, grad: Tensor, h: Tensor, kept: Step, scale: Step, out: Tensor | None) -> Tensor:
        """Returns ``kept G - s A h``."""
        if self.rides and isinstance(kept, float) and isinstance(scale, float):
            return torch.addmm(grad, h, self.weight.t(), beta=kept, alpha=-scale, out=out)
        moved = self._apply(h if self.on_weight else times(h, scale), self.scaled)
        return grad * kept - moved.to(self.working)

    def collect(self, k: int, grad: Tensor, d: Tensor | None, z: Tensor | None, h: Tensor | None) -> None:
        assert h is not None
        dtype = self.rule.dtype
        if z is None and d is not None:
            if self.flat and self.rule.regrouped:
                self.outer.add(times(grad, self._factor(k)).to(dtype), d.to(dtype))
                return
            z = self._image(k, d)
        for place, (left, right) in enumerate(((grad, z), (d, h))):
            if left is None or right is None:
                continue
            if self.flat:
                (self.first, self.second)[place].add(left.to(dtype), right.to(dtype))
                continue
            # Batch and space are large enough for products of their own, and too large for copies.
            part = self.plain.weight_gradient(right.to(dtype), left.to(dtype)).to(self.working)
            total = self.totals[place]
            self.totals[place] = part if total is None else total.add_(part)

    def weight_gradient(self) -> Tensor:
        first, second = (self.first.result(), self.second.result()) if self.flat else self.totals
        outer, scale, total = self.outer.result(), self.numbers.scale, None
        if first is not None:
            total = first.to(self.working)
        if second is not None:
            second = times(second.to(self.working), scale)
            total = second if total is None else total + second
        if outer is not None:
            outer = times(outer.to(self.working), scale)
            rest = ((outer + outer.t()).to(self.rule.dtype) @ self.weight).to(self.working)
            total = rest if total is None else total + rest
        assert total is not None
        return -total.to(self.given.weight.dtype)


class Columns(TwoStep):
    """Products with the sampled columns of ``A``, gathered in every iteration."""

    def __init__(self, given: Given, numbers: Numbers):
        super().__init__(given, numbers)
        # Rows are gathered faster than columns.
        self.transposed = self.weight.transpose(0, 1).contiguous()
        self.total = torch.zeros_like(self.transposed, dtype=self.working)

    def _part(self, k: int) -> LinearOperator:
        assert self.given.inputs is not None
        rows = self.transposed.index_select(0, self.given.inputs[k])
        return replace(self.rule.operator, weight=rows.transpose(0, 1))

    def advance(
        self, k: int, d: Tensor | None, base: Tensor | None, out: Tensor | None = None, image: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        assert self.given.u is not None and self.given.inputs is not None
        part, kept = self._part(k), self.numbers.kept[k]
        u = self.given.u.index_select(self.rule.operator.feature_dim, self.given.inputs[k]).to(self.working)
        z = times(-u if d is None else times(self._adjoint(d, part), self.numbers.scale) - u, self._factor(k))
        moved = self._apply(z, part).to(self.working)
        target = base if d is None else times(d, kept) if base is None else plus(base, d, kept)
        return (-moved if target is None else target - moved), z

    def pull(
        self, k: int, grad: Tensor, out: Tensor | None = None, image: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        part = self._part(k)
        h = times(self._adjoint(grad, part), self._factor(k))
        moved = self._apply(times(h, self.numbers.scale), part).to(self.working)
        return grad * self.numbers.kept[k] - moved, h

    def collect(self, k: int, grad: Tensor, d: Tensor | None, z: Tensor | None, h: Tensor | None) -> None:
        assert self.given.inputs is not None and z is not None and h is not None
        part = self._part(k)
        found = part.weight_gradient(z.to(self.rule.dtype), grad.to(self.rule.dtype)).to(self.working)
        if d is not None:
            second = part.weight_gradient(h.to(self.rule.dtype), d.to(self.rule.dtype)).to(self.working)
            found = found + times(second, self.numbers.scale)
        self.total = self.total.index_add(0, self.given.inputs[k], found.transpose(0, 1))

    def weight_gradient(self) -> Tensor:
        return -self.total.transpose(0, 1).to(self.given.weight.dtype)


def has_values(*tensors: Tensor | None) -> bool:
    """Whether there are plain values to compute with: nothing is recorded, compiled or transformed."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    for one in tensors:
        if one is None:
            continue
        # Of several gradients at once (is_grads_batched) none shows, but for this.
        if type(one) not in (Tensor, nn.Parameter) or torch._C._functorch.is_legacy_batchedtensor(one):
            return False
        if not is_eager(one.device):
            return False
    return True
