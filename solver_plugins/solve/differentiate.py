"""One entrance for every way of differentiating a solve."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from solver_plugins.solve.base import Draws, Solver
from solver_plugins.solve.implicit import solve_implicit
from solver_plugins.solve.loop import Solution, solve
from solver_plugins.solve.paths import path_for
from solver_plugins.solve.problem import BlockProblem
from solver_plugins.solve.sampled import has_sampled_kernel, solve_sampled
from solver_plugins.solve.unrolled import has_kernel, solve_unrolled


def differentiable_solve(
    solver: Solver,
    problem: BlockProblem,
    *,
    draws: Draws | None = None,
    diagnose: bool = False,
    residual: Tensor | None = None,
    keep_first: bool = False,
    gram: Tensor | None = None,
    fresh_gram: Tensor | None = None,
) -> Solution:
    """Solves a block problem so that gradients reach its input, weights, bias and prior.

    Unrolled (any order of derivatives) unless the solver's config says ``gradient="implicit"`` (first derivatives
    only; a second one is refused). An implicit solve writes its residual into the 0-d buffer ``residual``, if there is
    one. ``keep_first`` also returns the argument of the first iterate. The path is that of the cost model, or of the
    solver's config; ``gram`` is ``A A^T`` where that is known already, which is then used if no gradient of the weight
    is asked for. ``fresh_gram`` is what :func:`solver_plugins.solve.fresh_gram` has just computed.
    """
    if gram is not None and torch.is_grad_enabled() and problem.operator.weight.requires_grad:
        gram = None
    batch = math.prod(problem.input.shape[: -len(problem.operator.problem_dims)])
    path = path_for(solver, problem.operator, batch, sampling=draws is not None, gram_is_known=gram is not None)
    written = path in ("gram", "two_step") and not diagnose and has_kernel(solver, problem)

    def run(keep_first: bool) -> Solution:
        if path in ("masked", "columns") and draws is not None and not diagnose and has_sampled_kernel(solver, problem):
            return solve_sampled(solver, problem, path, draws, keep_first=keep_first)
        if written:
            known = fresh_gram if gram is None else gram
            return solve_unrolled(solver, problem, path, gram=known, keep_first=keep_first)
        made = replace(problem, gram=problem.make_gram(gram)) if path == "gram" else problem
        return solve(solver, made, draws=draws, diagnose=diagnose, keep_first=keep_first)

    if solver.implicit:
        return solve_implicit(solver, problem, run=run, residual=residual, keep_first=keep_first)
    return run(keep_first)
