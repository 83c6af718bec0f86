"""Solves without a prior as one affine map: a weight and a bias that are formed once, whatever the batch.

With ``g = 0`` every iterate is a polynomial in ``A A^T`` times ``c = A u + b``, and by push-through

    v_T = P (A u + b),     P A = A Q,     P = p(A A^T),  Q = p(A^T A),

so that ``W_T = P A = A Q`` and ``b_T = P b`` are formed on the smaller side. With constant steps and without momentum
``p`` is a geometric sum, which takes a few products by doubling; else it is what the kernel makes of the unit vectors.
A gate that is one number commutes with all that; one per feature does not: then the kernel runs on the unit vectors, or
on ``A`` and ``b``, whichever is smaller. Gradients go through the small matrices. In evaluation the result is kept, and
the block costs what the plain layer costs.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from solver_plugins.operators import ConvMap, LinearMap, LinearOperator, autocast_off, is_eager, match_dtype
from solver_plugins.prox import IdentityPrior
from solver_plugins.solve.base import Solver
from solver_plugins.solve.kernel import solve_recursion
from solver_plugins.solve.layout import Layout, matrix_of, symmetric_product, with_diagonal
from solver_plugins.solve.problem import BlockProblem, Scale
from solver_plugins.solve.recursion import Given, Rule
from solver_plugins.solve.steps import times


class Affine(NamedTuple):
    """A collapsed solve: a weight, shaped as the layer's, and a bias (None for zero)."""

    weight: Tensor
    bias: Tensor | None


def collapse(solver: Solver, problem: BlockProblem, gram: Tensor | None = None) -> Affine:
    """Returns weight and bias of all iterations of a solve; differentiable in the layer's.

    Args:
        solver: The solver.
        problem: The problem.
        gram: ``A A^T``, a constant, where it is known already.
    """
    operator, gate = problem.operator.folded(), problem.gate
    with autocast_off(operator.weight.device):
        matrix = _per_group(problem)
        bias = None if problem.bias is None else problem.bias.reshape(*matrix.shape[:-1], 1)
        if matrix.shape[-2] <= matrix.shape[-1]:
            small = polynomial(solver, problem, matrix, gram)
            weight, bias = small @ matrix, None if bias is None else small @ bias
        elif gate is not None and gate.dim():
            affine = _solved(solver, problem, matrix, matrix if bias is None else torch.cat([matrix, bias], -1))
            weight, bias = affine[..., : matrix.shape[-1]], None if bias is None else affine[..., -1]
        else:
            weight = matrix @ polynomial(solver, problem, matrix.mT)
            bias = None if bias is None else _solved(solver, problem, matrix, bias)
    return Affine(weight.reshape(operator.weight.shape), None if bias is None else bias.reshape(-1))


def collapse_output(solver: Solver, problem: BlockProblem, gram: Tensor | None = None) -> Tensor:
    """Returns ``P``, one for each group, with ``v_T = P c``: of use where the layer's output ``c`` is known."""
    with autocast_off(problem.operator.weight.device):
        return polynomial(solver, problem, _per_group(problem), gram)


def multiplied(problem: BlockProblem, small: Tensor) -> Tensor:
    """Returns ``P c``."""
    layout = Layout.of(problem.operator, problem.output, "gram")
    with autocast_off(small.device):
        flat = layout.flat(problem.output)
        if layout.kind == "rows":
            return layout.back(flat @ small[0].mT)
        return layout.back((small @ flat.unflatten(0, (-1, len(small)))).reshape(flat.shape))


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


def polynomial(solver: Solver, problem: BlockProblem, matrix: Tensor, gram: Tensor | None = None) -> Tensor:
    """Returns ``p(B B^T)`` of one matrix ``B`` per group, with ``p`` as in ``v_T = p(A A^T) c``.

    Args:
        solver: The solver.
        problem: The problem.
        matrix: ``B``: ``A``, or its transpose.
        gram: ``B B^T``, a constant, where it is known already.
    """
    gate, step, recursion, iterations = problem.gate, problem.step, solver.recursion, solver.config.iters
    assert recursion is not None
    if recursion.is_constant(iterations) and (gate is None or not gate.dim()):
        # In both formulations ``t s`` is 1/L.
        rate = problem.smoothness.reciprocal()
        moved = with_diagonal(_Gram.apply(matrix, gram) * -rate, 1 - rate * problem.lam)
        return times(power_sum(moved if gate is None else moved * gate, iterations), step)
    unit = torch.eye(matrix.shape[-2], dtype=matrix.dtype, device=matrix.device)
    return _solved(solver, problem, matrix, unit.expand(len(matrix), *unit.shape), "gram", gram)


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
        return (
            symmetric_product(matrix) if gram is None else gram.to(matrix.dtype, copy=True).expand(len(matrix), -1, -1)
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (grad + grad.mT) @ ctx.saved_tensors[0], None


@dataclass(frozen=True)
class _Matrices:
    """One matrix per group, on matrices of features by places."""

    weight: Tensor

    def apply(self, u: Tensor) -> Tensor:
        return self.weight @ u

    def adjoint(self, x: Tensor) -> Tensor:
        return self.weight.mT @ x

    def weight_gradient(self, u: Tensor, grad: Tensor) -> Tensor:
        return grad @ u.mT


def _per_group(problem: BlockProblem) -> Tensor:
    """Returns ``A`` in the working precision, as one matrix for each group."""
    matrix = matrix_of(problem.operator.folded()).to(problem.dtype)
    return matrix if matrix.dim() == 3 else matrix.unsqueeze(0)


def _solved(
    solver: Solver,
    problem: BlockProblem,
    matrix: Tensor,
    source: Tensor,
    path: str = "two_step",
    gram: Tensor | None = None,
) -> Tensor:
    """Returns the last iterates for other ``c``, one in each column of ``source``."""
    recursion, gate = solver.recursion, problem.gate
    assert recursion is not None
    rule = Rule(
        path=path,
        recursion=recursion.full(),
        iterations=solver.config.iters,
        prior=IdentityPrior(),
        dtype=problem.dtype,
        unit=problem.formulation == "normalized",
        lam=0.0 if isinstance(problem.lam, Tensor) else problem.lam,
        inner=problem.operator.inner,
        operator=_Matrices(matrix) if path == "two_step" else None,
    )
    gate = None if gate is None else gate.reshape(len(matrix), -1, 1) if gate.dim() else gate
    lam = problem.lam if isinstance(problem.lam, Tensor) else None
    none = dict.fromkeys(("u", "bias", "inputs", "outputs", "picks"))
    c = times(source, problem.step)
    given = Given(c=c, weight=matrix, gate=gate, smoothness=problem.smoothness, lam=lam, gram=gram, rule=rule, **none)
    return solve_recursion(given)[0]


@dataclass
class _Formed:
    """A collapsed solve, and what it was made of beside the weight."""

    value: tuple[Any, ...]
    parts: list[Tensor] = field(default_factory=list)


class Collapsed:
    """Keeps the affine map of a block in evaluation, as long as nothing that it was made of has moved.

    The block drops it where its weight has moved, like all else that it keeps. On the eager CPU every use looks at the
    other tensors; elsewhere looking would stall. Copies and files start without it.
    """

    def __init__(self) -> None:
        self.kept: _Formed | None = None

    def __deepcopy__(self, memory: Any) -> "Collapsed":
        return Collapsed()

    def __reduce__(self) -> tuple[Any, ...]:
        return Collapsed, ()

    def drop(self) -> None:
        """Forgets what is kept."""
        self.kept = None

    def get(self, problem: BlockProblem, scale: Scale, make: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
        """Returns what ``make`` returned for this problem and scale, or what it returns now."""
        given = (problem.smoothness, problem.bias, problem.operator.diagonal)
        found = (*given, scale.gain, scale.shift, scale.blend, scale.gate)
        parts, eager = [one for one in found if one is not None], is_eager(problem.operator.weight.device)
        kept = self.kept
        if kept is not None and (not eager or _same(parts, kept.parts)):
            return kept.value
        with torch.no_grad():
            value = make()
        if not torch.compiler.is_compiling():
            self.kept = _Formed(value, [one.detach().clone() for one in parts] if eager else [])
        return value


def _same(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(torch.equal(one, two) for one, two in zip(some, others, strict=True))
