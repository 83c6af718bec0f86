"""Mini-batch semi-stochastic gradient descent (mS2GD, Prop. 2)."""

from solver_plugins.registry import register_solver
from solver_plugins.solve.base import RateConfig
from solver_plugins.solve.variance_reduced import VarianceReduced, VarianceReducedConfig


class MS2GDConfig(RateConfig, VarianceReducedConfig):
    """Options of ``ms2gd``."""


@register_solver
class MS2GD(VarianceReduced):
    """Mini-batch semi-stochastic gradient: additive dropout, seen from the second inner step on.

    Each inner step draws a tau-nice sample; the next outer loop starts from the last inner iterate.
    """

    name = "ms2gd"
    tags = ("sampling", "variance-reduced")
    Config = MS2GDConfig
    mixes = False
