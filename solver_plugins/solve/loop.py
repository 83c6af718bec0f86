"""The loop that runs a solver, and what it found."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from solver_plugins.solve.base import Draws, Solver
from solver_plugins.solve.problem import BlockProblem


@dataclass(frozen=True)
class Diagnostics:
    """How a solve went.

    Attributes:
        objective: ``F(x_k) + g(x_k)`` of the problem actually solved, shape ``(iterations, *batch)``.
        residual: Relative size of a further proximal-gradient step (zero at a minimiser), same shape.
        iterations: How many proximal steps were taken.
    """

    objective: Tensor
    residual: Tensor
    iterations: int

    def converged(self, tolerance: float = 1e-4) -> Tensor:
        """Returns which samples ended with a residual of at most ``tolerance``."""
        return self.residual[-1] <= tolerance


@dataclass(frozen=True)
class Solution:
    """The end of a solve.

    Attributes:
        solver: Who solved.
        problem: What was solved.
        state: The solver's last state.
        diagnostics: How it went, where that was asked for.
        first: The argument of the first iterate, where that was asked for: the plain block's.
    """

    solver: Solver
    problem: BlockProblem
    state: Any
    diagnostics: Diagnostics | None = None
    first: Tensor | None = None

    @property
    def argument(self) -> Tensor:
        """``v`` with ``activation(v) = x``."""
        return self.solver.argument(self.problem, self.state)

    @property
    def value(self) -> Tensor:
        """The last iterate ``x``."""
        return self.solver.value(self.problem, self.state)


def solve(
    solver: Solver,
    problem: BlockProblem,
    *,
    draws: Draws | None = None,
    diagnose: bool = False,
    keep_first: bool = False,
) -> Solution:
    """Runs ``solver.config.iters`` iterations from ``x_0 = 0``.

    The number of iterations is fixed: a stopping rule would make a sample's result depend on its batch.

    Args:
        solver: The solver.
        problem: The problem.
        draws: Randomness for a sampling solver; None runs it with full gradients and the same steps.
        diagnose: Record objective and residual of every iterate (about doubles the cost).
        keep_first: Also return the argument of the first iterate.
    """
    state = solver.init(problem)
    first = None
    objectives, residuals = [], []
    for iteration in range(solver.config.iters):
        state = solver.step(problem, state, iteration, draws)
        if problem.gate is not None and iteration:
            state = solver.gated(problem, state)
        elif problem.gate is not None:
            problem.start = state.v
        if keep_first and iteration == 0:
            first = solver.argument(problem, state)
        if diagnose:
            with torch.no_grad():
                x = solver.value(problem, state)
                objectives.append(problem.objective(x))
                residuals.append(problem.residual(x))
    diagnostics = None
    if diagnose:
        diagnostics = Diagnostics(torch.stack(objectives), torch.stack(residuals), solver.config.iters)
    return Solution(solver, problem, state, diagnostics, first)
