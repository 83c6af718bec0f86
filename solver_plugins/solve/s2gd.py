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

    def next_snapshot(
        self, problem: BlockProblem, last: Tensor, iterates: tuple[Tensor, ...], draws: Draws | None
    ) -> Tensor:
        if draws is None:
            return last
        operator = problem.operator
        # t lam is lam/L in both formulations.
        keep = 1 - problem.lam / problem.smoothness
        powers = torch.arange(len(iterates) - 1, -1, -1, device=last.device, dtype=last.dtype)
        law = torch.cumsum(keep.to(last.dtype) ** powers, 0)
        shape = self.batch_shape(last, operator)
        position = uniform(shape, last.device, last.dtype, draws.generator)
        chosen = torch.searchsorted(law / law[-1], position.unsqueeze(-1)).clamp_max(len(iterates) - 1)
        chosen = chosen.reshape(shape + (1,) * len(operator.problem_dims))
        snapshot = iterates[0]
        for index, iterate in enumerate(iterates[1:], start=1):
            snapshot = torch.where(chosen == index, iterate, snapshot)
        return snapshot
