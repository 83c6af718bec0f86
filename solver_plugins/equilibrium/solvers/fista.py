"""Accelerated gradient with adaptive restart, for a single layer."""

from dataclasses import dataclass
from typing import final

from torch import Tensor

from solver_plugins.equilibrium.problem import EquilibriumProblem
from solver_plugins.equilibrium.solvers.solver import EquilibriumSolver, EquilibriumState, register_equilibrium_solver
from solver_plugins.solve.fista import Nesterov

MOMENTUM = Nesterov(restart=True)


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
        y_{k+1} = x_{k+1} + b_{k+1} (x_{k+1} - x_k)

    with the weights ``b_k`` and the restart of the solver of blocks (:class:`solver_plugins.solve.fista.Nesterov`).
    """

    name = "fista"
    tags = ("accelerated",)
    one_layer_only = True

    def init(self) -> AcceleratedState:
        return AcceleratedState(None)

    def step(
        self, problem: EquilibriumProblem, state: AcceleratedState, image: Tensor, iteration: int
    ) -> AcceleratedState:
        def inner(a: Tensor, b: Tensor) -> Tensor:
            return (a * b).sum(problem.dims, keepdim=True)

        momentum, theta = MOMENTUM.weight(image, state.previous, state.z, state.theta, inner)
        ahead = image if momentum is None or state.previous is None else image + momentum * (image - state.previous)
        return AcceleratedState(ahead, image, image, theta)
