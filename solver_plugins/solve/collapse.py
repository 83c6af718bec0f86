"""Solves without a prior as one affine map: a weight and a bias that are formed once, whatever the batch.

With ``g = 0`` every iterate is a polynomial in ``A A^T`` times ``c = A u + b``, and by push-through

    v_T = P (A u + b),     P A = A Q,     P = p(A A^T),  Q = p(A^T A),

so that ``W_T = P A = A Q`` and ``b_T = P b`` are formed on the smaller side. With constant steps and without momentum
``p`` is a geometric sum, which takes a few products by doubling; else the iterations run on the matrix. A gate that is
one number commutes with all that; one per feature does not, and the iterations run on ``P``, or on ``A`` and ``b``,
whichever is smaller. Gradients go through the small matrices. In evaluation the result is kept, and the block costs
what the plain layer costs.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from solver_plugins.operators import ConvMap, LinearMap, LinearOperator, autocast_off, is_eager, match_dtype
from solver_plugins.solve.base import Solver
from solver_plugins.solve.layout import Layout, matrix_of, symmetric_product, with_diagonal
from solver_plugins.solve.problem import BlockProblem, Scale
from solver_plugins.solve.recursion import Recursion
from solver_plugins.solve.steps import Numbers, times

SMALL_BATCH = 16
"""With fewer rows, a product with the weight to see whether it has moved would be most of the work."""


class Affine(NamedTuple):
    """A collapsed solve.

    Attributes:
        weight: Shaped as the layer's.
        bias: None for zero.
    """

    weight: Tensor
    bias: Tensor | None


def collapse(solver: Solver, problem: BlockProblem, gram: Tensor | None = None) -> Affine:
    """Returns weight and bias of all iterations of a solve; differentiable in the layer's.

    Args:
        solver: The solver.
        problem: The problem.
        gram: ``A A^T``, a constant, where it is known already.
    """
    operator, state = problem.operator.folded(), _Polynomial(solver, problem)
    with autocast_off(operator.weight.device):
        matrix = matrix_of(operator, operator.weight.to(problem.dtype))
        bias = None if problem.bias is None else problem.bias.reshape(*matrix.shape[:-1])
        if matrix.shape[-2] > matrix.shape[-1] and state.per_feature:
            affine = matrix if bias is None else torch.cat([matrix, bias.unsqueeze(-1)], -1)
            affine = state.run(lambda y: matrix @ (matrix.mT @ y), affine)
            weight, bias = affine[..., : matrix.shape[-1]], None if bias is None else affine[..., -1]
        elif matrix.shape[-2] <= matrix.shape[-1]:
            small = state.of(_Gram.apply(matrix, gram))
            weight = small @ matrix
            bias = None if bias is None else (small @ bias.unsqueeze(-1)).squeeze(-1)
        else:
            gram = _Gram.apply(matrix.mT, None)
            weight = matrix @ state.of(gram)
            bias = None if bias is None else state.times_vector(matrix, gram, bias)
    return Affine(weight.reshape(operator.weight.shape), None if bias is None else bias.reshape(-1))


def collapse_output(solver: Solver, problem: BlockProblem, gram: Tensor | None = None) -> Tensor:
    """Returns ``P``, with ``v_T = P c``: of use where the layer's output ``c`` is known."""
    operator = problem.operator.folded()
    with autocast_off(operator.weight.device):
        matrix = matrix_of(operator, operator.weight.to(problem.dtype))
        return _Polynomial(solver, problem).of(_Gram.apply(matrix, gram))


def multiplied(problem: BlockProblem, small: Tensor) -> Tensor:
    """Returns ``P c``."""
    layout = Layout.of(problem.operator, problem.output, problem.input.shape, "gram")
    with autocast_off(small.device):
        flat = layout.flat(problem.output)
        if layout.kind == "rows":
            return layout.back(flat @ small)
        several = flat.unflatten(0, (-1, len(small))) if small.dim() == 3 else flat
        return layout.back((small @ several).reshape(flat.shape))


def applied(operator: LinearOperator, u: Tensor, affine: Affine) -> Tensor:
    """Returns the affine map of an input, by the layer's own function."""
    dtype = operator.weight.dtype
    weight, bias = affine.weight.to(dtype), None if affine.bias is None else affine.bias.to(dtype)
    if isinstance(operator, LinearMap):
        return functional.linear(match_dtype(u, weight), weight, bias)
    assert isinstance(operator, ConvMap)
    geometry = operator.geometry
    batch = u.shape[: -geometry.dims - 1]
    flat = match_dtype(u if len(batch) == 1 else u.reshape(-1, *u.shape[-geometry.dims - 1 :]), weight)
    conv = (functional.conv1d, functional.conv2d, functional.conv3d)[geometry.dims - 1]
    out: Tensor = conv(flat, weight, bias, geometry.stride, 0, geometry.dilation, geometry.groups)
    return out if len(batch) == 1 else out.reshape(*batch, *out.shape[1:])


def power_sum(matrix: Tensor, count: int) -> Tensor:
    """Returns ``I + M + ... + M^(count-1)``, by ``S_2k(M) = (I + M) S_k(M^2)`` and ``S_k+1(M) = I + M S_k(M)``."""
    if count == 1:
        return with_diagonal(torch.zeros_like(matrix), 1.0)
    if count == 2:
        return with_diagonal(matrix, 1.0)
    if count % 2:
        return with_diagonal(matrix @ power_sum(matrix, count - 1), 1.0)
    half = power_sum(matrix @ matrix, count // 2)
    return half + matrix @ half


class _Gram(torch.autograd.Function):
    """``A A^T``, which may be known already; its gradient takes one product, ``(G + G^T) A``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(matrix: Tensor, gram: Tensor | None) -> Tensor:
        return symmetric_product(matrix) if gram is None else gram.to(matrix.dtype, copy=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (grad + grad.mT) @ ctx.saved_tensors[0], None


class _Polynomial:
    """``p`` with ``v_T = p(A A^T) c``."""

    def __init__(self, solver: Solver, problem: BlockProblem):
        recursion, self.iterations = solver.recursion, solver.config.iters
        assert recursion is not None
        momenta = recursion.momenta(self.iterations)
        assert momenta is not None
        self.recursion: Recursion = recursion
        self.momenta: tuple[float, ...] = momenta
        unit, gate = problem.formulation == "normalized", problem.gate
        self.per_feature = gate is not None and gate.dim() > 0
        if gate is not None and gate.dim():
            gate = gate.reshape(*matrix_of(problem.operator, problem.operator.weight).shape[:-1], 1)
        self.gate = gate
        self.numbers = Numbers(problem.smoothness, recursion.factor, self.iterations, unit=unit, lam=problem.lam)

    def of(self, gram: Tensor) -> Tensor:
        """Returns ``p`` of a symmetric matrix."""
        numbers = self.numbers
        constant = self.recursion.factor is None and not any(self.momenta) and not self.recursion.inertia
        if constant and not self.per_feature:
            step = with_diagonal(gram * -(numbers.scale * numbers.steps[0]), numbers.kept[0])
            step = step if self.gate is None else step * self.gate
            return times(power_sum(step, self.iterations), numbers.steps[0])
        return self.run(lambda y: gram @ y, with_diagonal(torch.zeros_like(gram), 1.0))

    def times_vector(self, matrix: Tensor, gram: Tensor, b: Tensor) -> Tensor:
        """Returns ``p(A A^T) b = q b + A w``, whose iterations need nothing larger than ``A^T A`` (``gram``)."""
        image = (matrix.mT @ b.unsqueeze(-1)).squeeze(-1)
        zero = torch.zeros_like(image[..., :1])
        start = torch.cat([torch.ones_like(zero), torch.zeros_like(image)], -1).unsqueeze(-1)

        def step(y: Tensor) -> Tensor:
            moved = image * y[..., :1, 0] + (gram @ y[..., 1:, :]).squeeze(-1)
            return torch.cat([zero, moved], -1).unsqueeze(-1)

        found = self.run(step, start)
        return found[..., :1, 0] * b + (matrix @ found[..., 1:, :]).squeeze(-1)

    def run(self, product: Any, source: Tensor) -> Tensor:
        """Takes the iterations on a matrix, or a vector, in the place of ``x``."""
        numbers, before = self.numbers, None
        x = first = times(source, numbers.steps[0])
        for k in range(1, self.iterations):
            moved = x if before is None else x - before
            y = x + self.momenta[k - 1] * moved if self.momenta[k - 1] else x
            rate = numbers.steps[k] * numbers.scale
            v = y * numbers.kept[k] - product(y) * rate + times(source, numbers.steps[k])
            v = v + self.recursion.inertia * moved if self.recursion.inertia else v
            before, x = x, v if self.gate is None else torch.lerp(first, v, self.gate)
        return x


@dataclass
class _Kept:
    """A collapsed solve, and what it was made of."""

    value: tuple[Any, ...]
    smoothness: Tensor
    image: Tensor | None = None
    parts: list[Tensor] = field(default_factory=list)
    marks: tuple[Any, ...] = ()


class Collapsed:
    """Keeps the affine map of a block in evaluation, as long as nothing that it was made of has moved.

    On the eager CPU every use looks: at ``A r`` for a fixed random vector ``r``, number by number, or, where there are
    few rows, at the tensors' versions. Elsewhere looking would stall; there it is dropped with the block's other
    constants. Copies and files start without it.
    """

    def __init__(self) -> None:
        self.kept: _Kept | None = None

    def __deepcopy__(self, memory: Any) -> "Collapsed":
        return Collapsed()

    def __reduce__(self) -> tuple[Any, ...]:
        return Collapsed, ()

    def drop(self) -> None:
        """Forgets what is kept."""
        self.kept = None

    def get(self, problem: BlockProblem, scale: Scale, make: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
        """Returns what ``make`` returned for this problem and scale, or what it returns now."""
        operator = problem.operator
        found = (*scale.tensors(), problem.bias, operator.diagonal)
        parts = [one for one in found if one is not None]
        eager = is_eager(operator.weight.device)
        if self.kept is not None and (not eager or self._holds(problem, parts)):
            return self.kept.value
        with torch.no_grad():
            value = make()
        if not torch.compiler.is_compiling():
            self.kept = _Kept(value, problem.smoothness.clone())
            if eager:
                self.kept.image = _image(operator.weight)
                self.kept.parts = [one.detach().clone() for one in parts]
                self.kept.marks = _marks(operator.weight, parts)
        return value

    def _holds(self, problem: BlockProblem, parts: list[Tensor]) -> bool:
        kept, weight = self.kept, problem.operator.weight
        assert kept is not None
        if len(parts) != len(kept.parts) or not torch.equal(kept.smoothness, problem.smoothness):
            return False
        rows = problem.input.numel() // problem.operator.in_features
        if rows < SMALL_BATCH and kept.marks and kept.marks == _marks(weight, parts):
            return True
        same = all(torch.equal(one, two) for one, two in zip(parts, kept.parts, strict=True))
        return same and kept.image is not None and torch.equal(kept.image, _image(weight))


def scaled(scale: Scale, first: Affine, last: Affine) -> Affine:
    """Returns a map with gain, shift and blend in it: each acts on the rows of weight and bias alike."""
    if scale.is_one:
        return last
    rows = (-1,) + (1,) * (last.weight.dim() - 1)
    weight = scale.of(
        last.weight, first.weight.to(last.weight.dtype), lambda values: values.reshape(rows), shifted=False
    )
    zero = torch.zeros(last.weight.shape[0], dtype=last.weight.dtype, device=last.weight.device)
    biases = [zero if one.bias is None else one.bias.to(zero.dtype) for one in (last, first)]
    return Affine(weight, scale.of(biases[0], biases[1], lambda values: values))


def _marks(weight: Tensor, parts: list[Tensor]) -> tuple[Any, ...]:
    """Returns versions and places of tensors, which change with every write that autograd sees; none in inference."""
    tensors = [weight, *parts]
    if any(one.is_inference() for one in tensors):
        return ()
    return tuple((one.data_ptr(), one._version) for one in tensors)


@torch.no_grad()
def _image(weight: Tensor) -> Tensor:
    """Returns ``A r``."""
    matrix = weight.detach().flatten(1)
    return matrix @ _probe(matrix.shape[1], matrix.dtype)


@functools.lru_cache(maxsize=256)
def _probe(count: int, dtype: torch.dtype) -> Tensor:
    """Returns ``r``: random, and the same in every call."""
    # Not an inference tensor, which could not be used outside of that mode.
    with torch.inference_mode(False):
        return torch.randn(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
