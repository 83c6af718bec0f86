"""Proximal gradient with momentum, a sparse ReLU, and a study: a plug-in for solver_plugins."""

from heavy_ball.prior import SparseReLU, SparseReluPrior
from heavy_ball.solver import HeavyBall

__all__ = ["HeavyBall", "SparseReLU", "SparseReluPrior"]
