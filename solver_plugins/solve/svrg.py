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

    def picks(self, problem: BlockProblem, draws: Draws) -> Tensor:
        inner, u = self.config.inner, problem.input
        return torch.full((inner, *(1,) * u.dim()), 1 / inner, dtype=problem.dtype, device=u.device)
