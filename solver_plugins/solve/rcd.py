"""Randomised (block) coordinate descent (RCD, Prop. 6)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from solver_plugins.errors import OptionError
from solver_plugins.prox import Prior
from solver_plugins.registry import register_solver
from solver_plugins.solve.base import Draws, RateConfig, SamplingSolver, State
from solver_plugins.solve.problem import BlockProblem
from solver_plugins.solve.recursion import Samples


class RCDConfig(RateConfig):
    """Options of ``rcd``.

    ``step="expected_smoothness"`` and ``"constant"`` are the same here: a principal block of the Hessian is never
    larger than the whole, so ``1/L`` is safe for every sample.
    """


@dataclass(frozen=True)
class CoordinateState(State):
    """A :class:`State` in which coordinates that were not drawn keep an older iterate.

    Attributes:
        x: The iterate.
        unit_argument: ``v`` with ``prox_g(v) = x``, or None where a coordinate of value zero has none (sigmoid).
    """

    x: Tensor
    unit_argument: Tensor | None


@register_solver
class RCD(SamplingSolver):
    """Randomised coordinate descent: one iteration is mask * activation(linear), not rescaled.

        x_i <- prox_{t g}(x - t grad F(x))_i  for i in S,     x_i unchanged elsewhere,     |S| = round((1-p) n2)

    The proximal map acts on the drawn coordinates only (Proposition 6 corrected); for a convolution a
    coordinate is an output channel.
    """

    name = "rcd"
    tags = ("sampling", "coordinate")
    Config = RCDConfig
    samples = "outputs"

    def check_prior(self, prior: Prior) -> None:
        super().check_prior(prior)
        if not prior.separable:
            raise OptionError(
                f"rcd updates single coordinates, and the prior {prior.name!r} couples them; use another solver."
            )

    recursion = SamplingSolver.recursion

    def draw(self, problem: BlockProblem, draws: Draws, *, indices: bool) -> Samples:
        return Samples(outputs=self.masks(problem, draws, self.config.iters))

    def init(self, problem: BlockProblem) -> CoordinateState:
        zero = torch.zeros_like(problem.output)
        argument = problem.prior.zero_argument
        return CoordinateState(zero, problem.step, zero, None if argument is None else torch.full_like(zero, argument))

    def step(
        self, problem: BlockProblem, state: CoordinateState, iteration: int, draws: Draws | None
    ) -> CoordinateState:
        step = self.step_at(problem, iteration)
        start = None if iteration == 0 else state.x
        v = problem.descend(start, problem.gradient(start), step)
        # Here: what was not drawn keeps an iterate that is gated already.
        v = v if start is None else problem.gated(v)
        x = problem.prior.prox(v, step)
        argument = problem.prior.argument(v, step)
        features = problem.operator.out_features
        tau = self.tau(features)
        if draws is None or tau == features:
            return CoordinateState(v, step, x, argument)
        drawn = self.masks(problem, draws, 1)[0] > 0
        kept = None if state.unit_argument is None else torch.where(drawn, argument, state.unit_argument)
        return CoordinateState(v, step, torch.where(drawn, x, state.x), kept)

    def gated(self, problem: BlockProblem, state: CoordinateState) -> CoordinateState:
        return state

    def value(self, problem: BlockProblem, state: State) -> Tensor:
        return state.x if isinstance(state, CoordinateState) else super().value(problem, state)

    def argument(self, problem: BlockProblem, state: State) -> Tensor:
        if not isinstance(state, CoordinateState):
            return super().argument(problem, state)
        if state.unit_argument is None:
            raise OptionError(
                f"rcd leaves coordinates at zero, and the activation {problem.prior.name!r} never is zero, so there is "
                "nothing to hand to an activation outside of the block; use output='value'."
            )
        return state.unit_argument
