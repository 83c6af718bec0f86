"""Implicit differentiation of a converged deterministic solve: memory does not grow with the iterations.

An implicit gradient is right only at a fixed point. Forward and backward therefore check their residual; where it is
above ``implicit_tol`` they fall back to unrolling and say so (:class:`NotConvergedWarning`). Under ``torch.compile``
there is no such check: a data-dependent branch would break the graph.

At a fixed point ``v = T(v) = M prox(v) + t c``, ``M = I - t H``, an incoming gradient ``w`` of ``v`` becomes the
gradient ``y`` of one application of ``T`` by

    y = w + J M y,       J = d prox_{t g}(v) / dv   (symmetric)

For a separable prior ``J = D`` is a diagonal in [0, 1], and ``y = w + D^(1/2) z`` with the symmetric positive definite

    (I - D^(1/2) M D^(1/2)) z = D^(1/2) M w,

which conjugate gradients solve; for ReLU this is CG on the active coordinates. Otherwise (softmax) the fixed-point form
is iterated: softmax is 1/2-Lipschitz, so each step halves the error.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from solver_plugins.errors import DoubleBackwardError, NotConvergedWarning, warn
from solver_plugins.operators import autocast_off
from solver_plugins.solve.base import Solver, State
from solver_plugins.solve.conjugate import conjugate_gradients
from solver_plugins.solve.paths import path_for, solve_size
from solver_plugins.solve.problem import BlockProblem
from solver_plugins.solve.run import Solution

Run = Callable[[bool], Solution]


@dataclass(frozen=True)
class AdjointSystem:
    """``y = w + J M y`` at one fixed point; it holds what it needs and no live Parameter.

    Attributes:
        problem: The problem, detached.
        jacobian: ``y -> J y``.
        diagonal: ``D`` for a separable prior, else None.
    """

    problem: BlockProblem
    jacobian: Callable[[Tensor], Tensor]
    diagonal: Tensor | None

    @classmethod
    def at(cls, problem: BlockProblem, v: Tensor) -> "AdjointSystem":
        """Sets the system up at ``v``; the prior is asked now, for its parameters may be others later."""
        prior, step = problem.prior, problem.step
        if not prior.separable:
            return cls(problem, lambda y: prior.vjp(v, step, y), None)
        with torch.no_grad():
            diagonal = prior.derivative(v, step)
        return cls(problem, lambda y: diagonal * y, diagonal)

    def smooth(self, y: Tensor) -> Tensor:
        """Returns ``M y``, or ``a M y`` behind a gate, which is one number here."""
        moved = self.problem.descend(y, self.problem.hessian(y), self.problem.step)
        return moved if self.problem.gate is None else moved * self.problem.gate

    def solve(self, w: Tensor, iterations: int) -> Tensor:
        """Returns ``y`` as well as ``iterations`` steps can, every sample by itself."""
        dims, diagonal = self.problem.operator.problem_dims, self.diagonal
        # Gradients may be of any size, and their squares must not underflow.
        scale = w.abs().amax(dims, keepdim=True)
        scale = torch.where(scale > 0, scale, 1.0)
        w = w / scale
        if diagonal is None:
            return self.fixed_point(w, iterations) * scale
        root = diagonal.sqrt()
        right = root * self.smooth(w)
        z = conjugate_gradients(lambda at: at - root * self.smooth(root * at), right, dims, iterations)[0]
        return (w + root * z) * scale

    def fixed_point(self, w: Tensor, iterations: int) -> Tensor:
        """Takes ``y <- w + J M y`` that many times: the gradient of ``iterations + 1`` unrolled iterations at ``v``."""
        y = w
        for _ in range(iterations):
            y = w + self.jacobian(self.smooth(y))
        return y

    def relative_residual(self, w: Tensor, y: Tensor) -> Tensor:
        """Returns ``|y - w - J M y| / |w|`` per sample."""
        dims = self.problem.operator.problem_dims
        error = torch.linalg.vector_norm(y - w - self.jacobian(self.smooth(y)), dim=dims)
        return error / torch.linalg.vector_norm(w, dim=dims).clamp_min(torch.finfo(w.dtype).tiny)


def with_adjoint(image: Tensor, adjoint: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns ``image`` itself, whose incoming gradient ``w`` becomes ``adjoint(w)`` before it goes on.

    With ``image = T(z)`` recorded at a fixed point ``z`` that is not, and ``adjoint`` solving ``y = w + J^T y``, this
    is the gradient of the fixed point (implicit function theorem). A second derivative is refused.
    """
    result: Tensor = _AdjointSolve.apply(image, adjoint)
    return result


def refuse_second_derivative() -> None:
    """Raises DoubleBackwardError where the backward pass that calls it is recorded.

    ``@once_differentiable`` alone lets a second derivative pass, silently without this term, where the incoming
    gradient is a constant (``loss = out.sum() + ...``).
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise DoubleBackwardError(
            "Expected a first derivative only; found create_graph=True, or a torch.func transform, which always "
            "records, through an implicit gradient. Use gradient='unrolled', whose derivatives of any order are right."
        )


class _AdjointSolve(torch.autograd.Function):
    """The identity, with a linear solve as its backward."""

    @staticmethod
    def forward(v: Tensor, adjoint: Callable[[Tensor], Tensor]) -> Tensor:
        return v.view_as(v)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.adjoint = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        refuse_second_derivative()
        return _AdjointSolve._solve(ctx, grad), None

    @staticmethod
    @once_differentiable
    def _solve(ctx: Any, grad: Tensor) -> Tensor:
        return ctx.adjoint(grad)


def solve_implicit(
    solver: Solver, problem: BlockProblem, *, run: Run, residual: Tensor | None = None, keep_first: bool = False
) -> Solution:
    """Solves without recording, then attaches the gradient of the fixed point.

    Args:
        solver: A deterministic solver with ``gradient="implicit"``.
        problem: The problem; gradients reach its input, weights, bias and the prior's parameters.
        run: Solves the problem, recorded where gradients are; told whether to keep the first iterate.
        residual: A 0-d buffer that receives the largest residual of the batch, also in a compiled graph.
        keep_first: As in :func:`solver_plugins.solve.solve`.
    """
    # The layer's output is computed once and kept: it must be recorded.
    _ = problem.output
    first = None
    if keep_first:
        first = solver.argument(problem, solver.step(problem, solver.init(problem), 0, None))
    with torch.no_grad():
        solution = run(False)
        if torch.compiler.is_exporting():
            # A program has nobody to report a residual to.
            return dataclasses.replace(solution, first=first)
        found = problem.residual(solution.value)
        worst = found.amax() if found.numel() else found.new_zeros(())
        if residual is not None:
            residual.copy_(worst)
    solution = dataclasses.replace(solution, first=first)
    if not torch.is_grad_enabled():
        return solution
    config = solver.config
    if not torch.compiler.is_compiling() and not float(worst) <= config.implicit_tol:
        warn(
            f"{solver.name}: after {config.iters} iterations the residual is about {float(worst):.0e}, above "
            f"implicit_tol={config.implicit_tol:.0e}; this gradient is unrolled instead. Raise iters or lam, or use "
            "gradient='unrolled'.",
            NotConvergedWarning,
        )
        return run(keep_first)
    # Everything that T depends on, except v itself, is live here. The value stays that of the solve itself, so that
    # training, evaluation and the unrolled mode agree to the last bit; only the derivative is that of T.
    v = solution.state.v
    if not solver.stays_at_step:
        # The state belongs to another step; one plain iteration leads to the fixed point that belongs to this one.
        with torch.no_grad():
            x = solution.value
            v = problem.gated(problem.descend(x, problem.gradient(x), problem.step))
    x = problem.prior.prox(v, problem.step)
    image = problem.gated(problem.descend(x, problem.gradient(x), problem.step))
    system = AdjointSystem.at(_detached(solver, problem), v)
    attached = v + with_adjoint(image - image.detach(), lambda w: _adjoint(solver, system, w))
    return Solution(solver, problem, State(attached, problem.step), solution.diagnostics, first)


def _adjoint(solver: Solver, system: AdjointSystem, w: Tensor) -> Tensor:
    config = solver.config
    y = system.solve(w, config.implicit_iters)
    if torch.compiler.is_compiling() or not w.numel():
        return y
    error = float(system.relative_residual(w, y).amax())
    if error <= config.implicit_tol:
        return y
    warn(
        f"{solver.name}: the implicit backward solve reached a relative residual of about {error:.0e} in "
        f"{config.implicit_iters} steps, above implicit_tol={config.implicit_tol:.0e}; the gradient of {config.iters} "
        "unrolled iterations is used instead. Raise implicit_iters or lam.",
        NotConvergedWarning,
    )
    return system.fixed_point(w, config.iters - 1)


def _detached(solver: Solver, problem: BlockProblem) -> BlockProblem:
    """Returns the problem's Hessian alone: no graph, and no input or output that would be kept alive."""
    operator = problem.operator
    diagonal = None if operator.diagonal is None else operator.diagonal.detach()
    nothing = operator.weight.new_empty(0)
    detached = dataclasses.replace(
        problem,
        operator=dataclasses.replace(operator, weight=operator.weight.detach(), diagonal=diagonal),
        input=nothing,
        bias=None,
        layer=lambda: nothing,
        gram=None,
        gate=None if problem.gate is None else problem.gate.detach(),
        start=None,
        _output=None,
    )
    config, batch = solver.config, math.prod(problem.input.shape[: -len(operator.problem_dims)])
    size = solve_size(solver, operator, batch, sampling=False, iterations=config.implicit_iters + 1)
    if path_for(solver, size) == "gram":
        with torch.no_grad(), autocast_off(nothing.device):
            detached.gram = detached.make_gram()
    return detached
