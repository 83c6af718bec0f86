"""Proximal gradient descent (Prox-GD, eq. 3)."""

from solver_plugins.registry import register_solver
from solver_plugins.solve.base import Draws, KernelConfig, Solver, State
from solver_plugins.solve.problem import BlockProblem
from solver_plugins.solve.recursion import Recursion


@register_solver
class ProxGD(Solver):
    """Proximal gradient descent: one iteration is linear -> activation.

        x_{k+1} = prox_{t g}(x_k - t grad F(x_k)),     x_0 = 0

    The objective never increases while ``L`` is not below ``lambda_max(A A^T) + lam``.
    """

    name = "proxgd"
    tags = ("deterministic",)
    Config = KernelConfig
    samples = "nothing"
    stays_at_step = True

    recursion = Recursion()

    def init(self, problem: BlockProblem) -> None:
        return None

    def step(self, problem: BlockProblem, state: State | None, iteration: int, draws: Draws | None) -> State:
        if state is None:
            return State(problem.first(problem.step), problem.step)
        x = self.value(problem, state)
        return State(problem.descend(x, problem.gradient(x), problem.step), problem.step)
