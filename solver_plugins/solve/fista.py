"""Accelerated proximal gradient with adaptive restart (FISTA)."""

from collections.abc import Callable
from dataclasses import dataclass

import pydantic
import torch
from torch import Tensor

from solver_plugins.prox import Step
from solver_plugins.registry import register_solver
from solver_plugins.solve.base import ACCELERATED_LAM, Draws, KernelConfig, Solver, State
from solver_plugins.solve.problem import BlockProblem
from solver_plugins.solve.recursion import Recursion

UNTESTED = 3
"""Up to this many iterations no test for a restart can succeed: ``y_1 = x_1``, so that it sees ``-|x_2 - x_1|^2``."""


class FISTAConfig(KernelConfig):
    """Options of ``fista``."""

    lam: float | None = ACCELERATED_LAM
    restart: bool = pydantic.Field(
        True, description="Drop the momentum of a sample that overshoots; False is the plain method of 2009."
    )


@dataclass(frozen=True)
class Nesterov:
    """The momentum of FISTA.

        b_k = (theta_{k-1} - 1)/theta_k,      theta_k = (1 + sqrt(1 + 4 theta_{k-1}^2))/2,      theta_0 = 1

    Attributes:
        restart: Whether ``theta_{k-1}`` is one again where ``<y_{k-1} - x_k, x_k - x_{k-1}> > 0``.
    """

    restart: bool

    @torch.no_grad()
    def weight(
        self,
        x: Tensor,
        before: Tensor | None,
        ahead: Tensor | None,
        memory: Tensor | None,
        inner: Callable[..., Tensor],
    ) -> tuple[Step | None, Tensor]:
        if memory is None or before is None or ahead is None:
            # The first weight is (1 - 1)/theta_1 = 0.
            return None, torch.full_like(inner(x, x), (1 + 5**0.5) / 2)
        theta = memory
        if self.restart:
            theta = torch.where(inner(ahead - x, x - before) > 0, 1.0, memory)
        following = (1 + (1 + 4 * theta.square()).sqrt()) / 2
        return (theta - 1) / following, following

    def numbers(self, iterations: int) -> tuple[float, ...] | None:
        if self.restart and iterations > UNTESTED:
            return None
        theta, found = 1.0, []
        for _ in range(iterations - 1):
            following = (1 + (1 + 4 * theta**2) ** 0.5) / 2
            found.append((theta - 1) / following)
            theta = following
        return tuple(found)


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

        y_k = x_k + b_k (x_k - x_{k-1}),     x_{k+1} = prox_{t g}(y_k - t grad F(y_k)),     b_k of :class:`Nesterov`

    Momentum is dropped where ``<y_{k-1} - x_k, x_k - x_{k-1}> > 0``, for each sample by itself.
    """

    name = "fista"
    tags = ("deterministic", "accelerated")
    Config = FISTAConfig
    samples = "nothing"
    stays_at_step = True

    @property
    def recursion(self) -> Recursion:
        return Recursion(momentum=Nesterov(self.config.restart))

    def init(self, problem: BlockProblem) -> None:
        return None

    def step(
        self, problem: BlockProblem, state: MomentumState | None, iteration: int, draws: Draws | None
    ) -> MomentumState:
        step = problem.step
        if state is None:
            return MomentumState(problem.first(step), step, None, None, None)
        x, before = self.value(problem, state), state.previous
        rule = Nesterov(self.config.restart)
        momentum, theta = rule.weight(x, before, state.extrapolated, state.theta, problem.operator.inner)
        y = x if momentum is None or before is None else x + momentum * (x - before)
        return MomentumState(problem.descend(y, problem.gradient(y), step), step, x, y, theta)
