"""Proximal stochastic variance-reduced gradient (Prox-SVRG, Xiao & Zhang 2014)."""

import torch
from torch import Tensor

from solver_plugins.registry import register_solver
from solver_plugins.solve.base import Draws
from solver_plugins.solve.problem import BlockProblem
from solver_plugins.solve.variance_reduced import VarianceReduced, VarianceReducedConfig


@register_solver
class SVRG(VarianceReduced):
    """Proximal SVRG: one feature per inner step, next outer loop from the mean of the inner iterates.

    There is no ``p``: ``tau = 1`` whatever the dropout rate of the layer that is replaced.
    """

    name = "svrg"
    tags = ("sampling", "variance-reduced", "serial")
    Config = VarianceReducedConfig

    def next_snapshot(
        self, problem: BlockProblem, last: Tensor, iterates: tuple[Tensor, ...], draws: Draws | None
    ) -> Tensor:
        return last if draws is None else torch.stack(iterates).mean(0)
