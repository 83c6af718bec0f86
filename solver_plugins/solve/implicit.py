"""Implicit differentiation of a converged deterministic solve: memory does not grow with the iterations.

An implicit gradient is right only at a fixed point. Forward and backward therefore check their residual; where it is
above ``implicit_tol`` they fall back to unrolling and say so (:class:`NotConvergedWarning`). Under ``torch.compile``
there is no such check: a data-dependent branch would break the graph.
"""

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from solver_plugins.errors import NotConvergedWarning, warn
from solver_plugins.operators import autocast_off
from solver_plugins.solve.adjoint import AdjointSystem
from solver_plugins.solve.attach import with_adjoint
from solver_plugins.solve.base import Solver, State
from solver_plugins.solve.loop import Solution
from solver_plugins.solve.paths import path_for
from solver_plugins.solve.problem import BlockProblem

Run = Callable[[bool], Solution]


def solve_implicit(
    solver: Solver,
    problem: BlockProblem,
    *,
    run: Run,
    residual: Tensor | None = None,
    keep_first: bool = False,
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
            v = problem.descend(x, problem.gradient(x), problem.step)
    x = problem.prior.prox(v, problem.step)
    image = problem.descend(x, problem.gradient(x), problem.step)
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
        _output=None,
    )
    config, batch = solver.config, math.prod(problem.input.shape[: -len(operator.problem_dims)])
    if path_for(solver, operator, batch, sampling=False, iterations=config.implicit_iters + 1) == "gram":
        with torch.no_grad(), autocast_off(nothing.device):
            detached.gram = detached.make_gram()
    return detached
