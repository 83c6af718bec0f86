"""The iteration shared by mS2GD, S2GD and SVRG (Prop. 2, eq. 28-31)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import pydantic
import torch
from torch import Tensor

from solver_plugins.operators import LinearOperator
from solver_plugins.solve.base import Draws, SamplingConfig, SamplingSolver, State
from solver_plugins.solve.problem import BlockProblem
from solver_plugins.solve.recursion import Recursion, Samples
from solver_plugins.solve.steps import full_smoothness, sampled_smoothness


class VarianceReducedConfig(SamplingConfig):
    """Options of the variance-reduced solvers.

    The step is constant by default: variance reduction needs no decay, and the guarded expected smoothness keeps the
    sampled steps from overshooting.
    """

    hints: ClassVar[Mapping[str, str]] = {
        **SamplingConfig.hints,
        "p": "This solver draws one feature per step, whatever the dropout rate; ms2gd draws (1 - p) n of them.",
    }

    inner: int = pydantic.Field(
        5, ge=1, description="Inner steps per full gradient; 5 makes two outer loops of the default ten iterations."
    )


@dataclass(frozen=True)
class OuterState(State):
    """A :class:`State` within an outer loop.

    Attributes:
        snapshot: ``y``, where the full gradient was taken; None is zero.
        full_gradient: ``grad F(y)``.
        iterates: The inner iterates of this loop so far.
    """

    snapshot: Tensor | None
    full_gradient: Tensor
    iterates: tuple[Tensor, ...]


class VarianceReduced(SamplingSolver):
    """Outer loops of one full gradient and ``inner`` proximal steps.

        x <- prox_{t g}(x - t (grad F(y) + grad F_S(x) - grad F_S(y)))                                        (eq. 28)

    The sampled correction ``s (A diag(w) A^T + lam)(x - y)`` does not contain the input, and vanishes at the first
    inner step, where ``x = y`` (Proposition 2 corrected). The next ``y`` is a mean of a loop's iterates.
    """

    samples = "inputs"
    mixes: ClassVar[bool] = True
    """Whether :meth:`picks` takes more than the last iterate into account."""

    def picks(self, problem: BlockProblem, draws: Draws) -> Tensor:
        """Returns the shares of a loop's iterates in the next ``y``, shape ``(inner, *batch, 1, ...)``."""
        raise NotImplementedError

    @property
    def recursion(self) -> Recursion:
        return Recursion(self.factor if self.decays else None, reference=self.config.inner)

    def thins(self, operator: LinearOperator) -> bool:
        # The next reference point may be drawn even where no feature is left out.
        return self.mixes or super().thins(operator)

    def draw(self, problem: BlockProblem, draws: Draws, *, indices: bool) -> Samples:
        inner, again, features = self.config.inner, self.config.iters - 1, problem.operator.in_features
        tau, picks = self.tau(features), []
        masks = [self.masks(problem, draws, min(inner - 1, again))]
        for start in range(inner, again + 1, inner):
            if self.mixes:
                picks.append(self.picks(problem, draws))
            masks.append(self.masks(problem, draws, min(inner - 1, again - start)))
        return Samples(torch.cat(masks), features / tau, picks=torch.stack(picks) if picks else None)

    def smoothness(self, operator: LinearOperator, lipschitz: Tensor) -> Tensor:
        tau = self.tau(operator.in_features)
        if self.config.step != "expected_smoothness" or tau == operator.in_features:
            return full_smoothness(lipschitz, self.lam(lipschitz))
        return sampled_smoothness(lipschitz, self.lam(lipschitz), operator.column_norms_sq(), tau)

    def init(self, problem: BlockProblem) -> None:
        return None

    def step(self, problem: BlockProblem, state: OuterState | None, iteration: int, draws: Draws | None) -> OuterState:
        step = self.step_at(problem, iteration)
        if state is None:
            gradient = problem.gradient(None)
            return OuterState(problem.descend(None, gradient, step), step, None, gradient, ())
        x = self.value(problem, state)
        iterates = (*state.iterates, x) if self.mixes and draws is not None else ()
        if iteration % self.config.inner == 0:
            y = x
            if self.mixes and draws is not None:
                y = (torch.stack(iterates) * self.picks(problem, draws)).sum(0)
            gradient = problem.gradient(y)
            return OuterState(problem.descend(y, gradient, step), step, y, gradient, ())
        tau = self.tau(problem.operator.in_features)
        if draws is None or tau == problem.operator.in_features:
            gradient = problem.gradient(x)
        else:
            mask = self.masks(problem, draws, 1)[0]
            difference = x if state.snapshot is None else x - state.snapshot
            weights = mask.to(x.dtype) * (problem.operator.in_features / tau)
            gradient = state.full_gradient + problem.sampled_hessian(difference, weights)
        return OuterState(problem.descend(x, gradient, step), step, state.snapshot, state.full_gradient, iterates)
