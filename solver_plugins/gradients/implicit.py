"""Implicit differentiation of a converged deterministic solve: memory does not grow with the iterations.

An implicit gradient is right only at a fixed point. Forward and backward therefore check their residual; where it is
above ``implicit_tol`` they fall back to unrolling and say so (:class:`NotConvergedWarning`). Under ``torch.compile``
there is no such check: a data-dependent branch would break the graph.
"""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from solver_plugins.errors import DoubleBackwardError, NotConvergedWarning
from solver_plugins.gradients.adjoint import conjugate_gradients, fixed_point, relative_residual
from solver_plugins.solvers import BlockProblem, Solution, Solver, State, solve


class _AdjointSolve(torch.autograd.Function):
    """The identity, with a linear solve as its backward.

    Differentiating that once more would be wrong, so it is refused.
    """

    @staticmethod
    def forward(v: Tensor, adjoint: Callable[[Tensor], Tensor]) -> Tensor:
        return v.view_as(v)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.adjoint = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # @once_differentiable alone lets a second derivative pass, silently without this term, where the incoming
        # gradient is a constant (loss = out.sum() + ...).
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise DoubleBackwardError(
                "Expected a first derivative only; found create_graph=True through a block with gradient='implicit'. "
                "Use gradient='unrolled', whose derivatives of any order are right."
            )
        return _AdjointSolve._solve(ctx, grad), None

    @staticmethod
    @once_differentiable
    def _solve(ctx: Any, grad: Tensor) -> Tensor:
        return ctx.adjoint(grad)


def solve_implicit(solver: Solver, problem: BlockProblem, *, diagnose: bool = False) -> Solution:
    """Solves without recording, then attaches the gradient of the fixed point.

    Args:
        solver: A deterministic solver with ``gradient="implicit"``.
        problem: The problem; gradients reach its input, weights, bias and the prior's parameters.
        diagnose: As in :func:`solver_plugins.solvers.solve`.
    """
    config = solver.config
    if not torch.is_grad_enabled():
        return solve(solver, problem, diagnose=diagnose)
    # The layer's output is computed once and kept: it must be recorded.
    _ = problem.output
    with torch.no_grad():
        solution = solve(solver, problem, diagnose=diagnose)
        v = solution.state.v
        x = solution.value
        residual = problem.residual(x)
    if not torch.compiler.is_compiling() and residual.numel() and not residual.max().item() <= config.implicit_tol:
        warnings.warn(
            f"{solver.name}: after {config.iters} iterations the residual is {residual.max().item():.2e}, above "
            f"implicit_tol={config.implicit_tol:.0e}; this gradient is unrolled instead. Raise iters or lam, or use "
            "gradient='unrolled'.",
            NotConvergedWarning,
            stacklevel=2,
        )
        return solve(solver, problem, diagnose=diagnose)
    # Everything that T depends on, except v itself, is live here. The value stays that of the solve itself, so that
    # training, evaluation and the unrolled mode agree to the last bit; only the derivative is that of T.
    x = problem.prior.prox(v, problem.step)
    image = problem.descend(x, problem.gradient(x), problem.step)
    frozen = _detached(problem)
    attached = v + _AdjointSolve.apply(image - image.detach(), lambda w: _adjoint(solver, frozen, v, w))
    return Solution(solver, problem, State(attached, problem.step), solution.diagnostics)


def _adjoint(solver: Solver, problem: BlockProblem, v: Tensor, w: Tensor) -> Tensor:
    config = solver.config
    method = conjugate_gradients if problem.prior.separable else fixed_point
    y = method(problem, v, w, config.implicit_iters)
    if torch.compiler.is_compiling():
        return y
    error = relative_residual(problem, v, w, y).item()
    if error <= config.implicit_tol:
        return y
    warnings.warn(
        f"{solver.name}: the implicit backward solve reached a relative residual of {error:.2e} in "
        f"{config.implicit_iters} "
        f"steps, above implicit_tol={config.implicit_tol:.0e}; the gradient of {config.iters} unrolled iterations is "
        f"used "
        "instead. Raise implicit_iters or lam.",
        NotConvergedWarning,
        stacklevel=2,
    )
    return fixed_point(problem, v, w, config.iters)


def _detached(problem: BlockProblem) -> BlockProblem:
    operator = problem.operator
    diagonal = None if operator.diagonal is None else operator.diagonal.detach()
    return dataclasses.replace(
        problem, operator=dataclasses.replace(operator, weight=operator.weight.detach(), diagonal=diagonal)
    )
