"""One entrance for every way of differentiating a solve."""

from torch import Tensor

from solver_plugins.gradients.implicit import solve_implicit
from solver_plugins.solvers import BlockProblem, Draws, Solution, Solver, solve


def differentiable_solve(
    solver: Solver,
    problem: BlockProblem,
    *,
    draws: Draws | None = None,
    diagnose: bool = False,
    residual: Tensor | None = None,
    keep_first: bool = False,
) -> Solution:
    """Solves a block problem so that gradients reach its input, weights, bias and prior.

    Unrolled (autograd through every iteration, any order of derivatives) unless the solver's config says
    ``gradient="implicit"`` (first derivatives only; a second one is refused). An implicit solve writes its
    residual into the 0-d buffer ``residual``, if there is one. ``keep_first`` also returns the argument of the first
    iterate.
    """
    if solver.implicit:
        return solve_implicit(solver, problem, diagnose=diagnose, residual=residual, keep_first=keep_first)
    return solve(solver, problem, draws=draws, diagnose=diagnose, keep_first=keep_first)
