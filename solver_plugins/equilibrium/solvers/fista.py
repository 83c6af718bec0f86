"""Accelerated gradient with adaptive restart, for a single layer."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from solver_plugins.equilibrium.problem import EquilibriumProblem
from solver_plugins.equilibrium.solvers.solver import EquilibriumSolver, EquilibriumState, register_equilibrium_solver


@dataclass(frozen=True)
class AcceleratedState(EquilibriumState):
    """The state of an accelerated gradient method.

    Attributes:
        previous: ``x_k``; None is zero.
        theta: The momentum sequence, one number per sample; None is one.
    """

    previous: Tensor | None = None
    theta: Tensor | None = None


@register_equilibrium_solver
@final
class Fista(EquilibriumSolver):
    """Accelerated gradient descent on ``h`` with restart (Beck & Teboulle 2009, O'Donoghue & Candes 2015).

        x_{k+1} = T(y_k) = prox_R(y_k - a grad h(y_k))
        y_{k+1} = x_{k+1} + (theta_k - 1)/theta_{k+1} (x_{k+1} - x_k)

    A sample drops its momentum if ``<y_k - x_{k+1}, x_{k+1} - x_k> > 0``.
    """

    name = "fista"
    tags = ("accelerated",)
    one_layer_only = True

    def init(self) -> AcceleratedState:
        return AcceleratedState(None)

    def step(
        self, problem: EquilibriumProblem, state: AcceleratedState, image: Tensor, iteration: int
    ) -> AcceleratedState:
        moved = image if state.previous is None else image - state.previous
        with torch.no_grad():
            behind = -image if state.z is None else state.z - image
            restart = (behind * moved).sum(problem.dims, keepdim=True) > 0
            before = torch.ones_like(restart, dtype=image.dtype) if state.theta is None else state.theta
            before = torch.where(restart, 1.0, before)
            theta = (1 + (1 + 4 * before.square()).sqrt()) / 2
        return AcceleratedState(image + (before - 1) / theta * moved, image, image, theta)
