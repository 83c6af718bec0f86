"""Semi-stochastic gradient descent (S2GD): mS2GD with a single feature per inner step."""

import torch
from torch import Tensor

from solver_plugins.operators import uniform
from solver_plugins.registry import register_solver
from solver_plugins.solve.base import Draws
from solver_plugins.solve.problem import BlockProblem
from solver_plugins.solve.variance_reduced import VarianceReduced, VarianceReducedConfig


@register_solver
class S2GD(VarianceReduced):
    """Semi-stochastic gradient: one feature per inner step, next outer loop from a random inner iterate.

    The iterate ``x_j``, ``1 <= j <= m``, is taken with a probability proportional to ``(1 - t lam)^(m-j)``. All ``m``
    inner steps are run and one is picked, which has the same law as stopping at a random step but no data-dependent
    length. There is no ``p``: ``tau = 1`` whatever the dropout rate of the layer that is replaced.
    """

    name = "s2gd"
    tags = ("sampling", "variance-reduced", "serial")
    Config = VarianceReducedConfig

    def picks(self, problem: BlockProblem, draws: Draws) -> Tensor:
        inner, u, operator = self.config.inner, problem.input, problem.operator
        # t lam is lam/L in both formulations.
        keep = (1 - problem.lam / problem.smoothness).to(problem.dtype)
        law = torch.cumsum(keep ** torch.arange(inner - 1, -1, -1, device=u.device, dtype=problem.dtype), 0)
        shape = self.batch_shape(u, operator)
        position = uniform(shape, u.device, problem.dtype, draws.generator)
        chosen = torch.searchsorted(law / law[-1], position.unsqueeze(-1)).clamp_max(inner - 1)
        places = torch.arange(inner, device=u.device).reshape(-1, *(1,) * u.dim())
        if not shape:
            chosen = chosen.reshape((1,) * u.dim())
        return (places == chosen.reshape(shape + (1,) * (u.dim() - len(shape)))).to(problem.dtype)
