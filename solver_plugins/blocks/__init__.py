"""Layers as solvers: functions of their weights, and modules that stay the layers they were."""

from solver_plugins.blocks.base import SolverBlock, block_class
from solver_plugins.blocks.classes import SolverConv1d, SolverConv2d, SolverConv3d, SolverLinear
from solver_plugins.blocks.functional import solve_layer, solver_conv1d, solver_conv2d, solver_conv3d, solver_linear
from solver_plugins.blocks.refresh import refresh_steps

__all__ = [
    "SolverBlock",
    "SolverConv1d",
    "SolverConv2d",
    "SolverConv3d",
    "SolverLinear",
    "block_class",
    "refresh_steps",
    "solve_layer",
    "solver_conv1d",
    "solver_conv2d",
    "solver_conv3d",
    "solver_linear",
]
