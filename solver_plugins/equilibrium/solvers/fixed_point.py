"""Plain fixed-point iteration."""

from typing import final

from torch import Tensor

from solver_plugins.equilibrium.problem import EquilibriumProblem
from solver_plugins.equilibrium.solvers.solver import EquilibriumSolver, EquilibriumState, register_equilibrium_solver


@register_equilibrium_solver
@final
class FixedPoint(EquilibriumSolver):
    """z <- T(z); for one layer, gradient descent on ``h`` with step ``a``."""

    name = "fixed_point"
    tags = ("paper",)

    def step(
        self, problem: EquilibriumProblem, state: EquilibriumState, image: Tensor, iteration: int
    ) -> EquilibriumState:
        return EquilibriumState(image)
