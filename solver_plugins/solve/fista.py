"""Accelerated proximal gradient with adaptive restart (FISTA)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from solver_plugins.registry import register_solver
from solver_plugins.solve.base import Draws, KernelConfig, Solver, State
from solver_plugins.solve.problem import BlockProblem


@dataclass(frozen=True)
class MomentumState(State):
    """A :class:`State` with momentum.

    Attributes:
        previous: ``x_{k-1}``; None is zero.
        extrapolated: ``y_k``, where the gradient was taken; None is zero.
        theta: The momentum sequence, one number per sample; None is one.
    """

    previous: Tensor | None
    extrapolated: Tensor | None
    theta: Tensor | None


@register_solver
class FISTA(Solver):
    """Accelerated proximal gradient (Beck & Teboulle 2009) with the gradient restart of O'Donoghue & Candes.

        y_k = x_k + (theta_{k-1} - 1)/theta_k (x_k - x_{k-1}),     theta_k = (1 + sqrt(1 + 4 theta_{k-1}^2))/2
        x_{k+1} = prox_{t g}(y_k - t grad F(y_k))

    Momentum is dropped (``theta = 1``) where ``<y_{k-1} - x_k, x_k - x_{k-1}> > 0``, for each sample by itself.
    """

    name = "fista"
    tags = ("deterministic", "accelerated")
    Config = KernelConfig
    samples = "nothing"
    stays_at_step = True

    def init(self, problem: BlockProblem) -> None:
        return None

    def step(
        self, problem: BlockProblem, state: MomentumState | None, iteration: int, draws: Draws | None
    ) -> MomentumState:
        step = problem.step
        if state is None:
            return MomentumState(problem.first(step), step, None, None, None)
        x = self.value(problem, state)
        moved = x if state.previous is None else x - state.previous
        if state.theta is None:
            # The first momentum weight is (1 - 1)/theta_1 = 0.
            theta = torch.full_like(problem.operator.inner(x, x), (1 + 5**0.5) / 2)
            y = x
        else:
            ahead = -x if state.extrapolated is None else state.extrapolated - x
            with torch.no_grad():
                restart = problem.operator.inner(ahead, moved) > 0
                before = torch.where(restart, 1.0, state.theta)
                theta = (1 + (1 + 4 * before.square()).sqrt()) / 2
            y = x + (before - 1) / theta * moved
        return MomentumState(problem.descend(y, problem.gradient(y), step), step, x, y, theta)
