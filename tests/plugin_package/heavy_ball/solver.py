"""Proximal gradient with a fixed momentum."""

from dataclasses import dataclass

import pydantic
from torch import Tensor

from solver_plugins.solve import BlockProblem, DeterministicConfig, Draws, Recursion, Solver, State


class HeavyBallConfig(DeterministicConfig):
    """Options of ``heavy_ball``."""

    momentum: float = pydantic.Field(
        0.4, ge=0, lt=0.5, description="Share of the last move; below one half, 1/L is a safe step."
    )


@dataclass(frozen=True)
class MovingState(State):
    """A state that remembers where it came from.

    Attributes:
        x: The iterate before; None is zero.
    """

    x: Tensor | None


class HeavyBall(Solver):
    """Proximal gradient with a fixed momentum: one iteration is linear -> activation.

    x_{k+1} = prox_{t g}(x_k - t grad F(x_k) + m (x_k - x_{k-1})),     x_0 = x_{-1} = 0
    """

    name = "heavy_ball"
    tags = ("deterministic", "accelerated", "third_party")
    Config = HeavyBallConfig
    samples = "nothing"
    stays_at_step = True

    @property
    def recursion(self) -> Recursion:
        return Recursion(inertia=self.config.momentum)

    def init(self, problem: BlockProblem) -> None:
        return None

    def step(
        self, problem: BlockProblem, state: MovingState | None, iteration: int, draws: Draws | None
    ) -> MovingState:
        step = problem.step
        if state is None:
            return MovingState(problem.first(step), step, None)
        x = self.value(problem, state)
        move = x if state.x is None else x - state.x
        v = problem.descend(x, problem.gradient(x), step) + self.config.momentum * move
        return MovingState(v, step, x)
