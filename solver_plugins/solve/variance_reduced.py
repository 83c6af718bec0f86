"""The iteration shared by mS2GD, S2GD and SVRG (Prop. 2, eq. 28-31)."""

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import pydantic
from torch import Tensor

from solver_plugins.operators import LinearOperator
from solver_plugins.solve.base import Draws, SamplingConfig, SamplingSolver, State
from solver_plugins.solve.problem import BlockProblem
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
        iterates: The inner iterates of this loop so far, where the next snapshot needs them.
    """

    snapshot: Tensor | None
    full_gradient: Tensor
    iterates: tuple[Tensor, ...]


class VarianceReduced(SamplingSolver):
    """Outer loops of one full gradient and ``inner`` proximal steps.

        x <- prox_{t g}(x - t (grad F(y) + grad F_S(x) - grad F_S(y)))                                        (eq. 28)

    The sampled correction ``s (A diag(w) A^T + lam)(x - y)`` does not contain the input, and vanishes at the first
    inner step, where ``x = y`` (Proposition 2 corrected).
    """

    samples = "inputs"

    @abc.abstractmethod
    def next_snapshot(
        self, problem: BlockProblem, last: Tensor, iterates: tuple[Tensor, ...], draws: Draws | None
    ) -> Tensor:
        """Chooses the next ``y`` from the inner iterates, of which ``last`` is the last."""

    def keeps_iterates(self) -> bool:
        """Whether :meth:`next_snapshot` looks at more than the last iterate."""
        return True

    def smoothness(self, operator: LinearOperator, lipschitz: Tensor) -> Tensor:
        tau = self.tau(operator.in_features)
        if self.config.step != "expected_smoothness" or tau == operator.in_features:
            return full_smoothness(lipschitz, self.config.lam)
        return sampled_smoothness(lipschitz, self.config.lam, operator.column_norms_sq(), tau)

    def init(self, problem: BlockProblem) -> None:
        return None

    def step(self, problem: BlockProblem, state: OuterState | None, iteration: int, draws: Draws | None) -> OuterState:
        step = self.step_at(problem, iteration)
        if state is None:
            gradient = problem.gradient(None)
            return OuterState(problem.descend(None, gradient, step), step, None, gradient, ())
        x = self.value(problem, state)
        iterates = (*state.iterates, x) if self.keeps_iterates() else ()
        if iteration % self.config.inner == 0:
            y = self.next_snapshot(problem, x, iterates, draws)
            gradient = problem.gradient(y)
            return OuterState(problem.descend(y, gradient, step), step, y, gradient, ())
        tau = self.tau(problem.operator.in_features)
        if draws is None or tau == problem.operator.in_features:
            gradient = problem.gradient(x)
        else:
            mask = self.uniform_mask(problem.input, problem.operator.in_features, tau, problem.operator, draws)
            difference = x if state.snapshot is None else x - state.snapshot
            weights = mask.to(x.dtype) * (problem.operator.in_features / tau)
            gradient = state.full_gradient + problem.sampled_hessian(difference, weights)
        return OuterState(problem.descend(x, gradient, step), step, state.snapshot, state.full_gradient, iterates)
