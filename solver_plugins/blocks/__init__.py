"""Layers as solvers: functions of their weights, and modules that stay the layers they were."""

from solver_plugins.blocks.base import SolverBlock, install_block, remove_block
from solver_plugins.blocks.chain import ChainBlock, Partner, install_chain, remove_chain
from solver_plugins.blocks.classes import SolverConv1d, SolverConv2d, SolverConv3d, SolverLinear
from solver_plugins.blocks.functional import solve_layer, solver_conv1d, solver_conv2d, solver_conv3d, solver_linear
from solver_plugins.blocks.made import take_off
from solver_plugins.blocks.passthrough import PassThrough, install_pass_through
from solver_plugins.blocks.refresh import refresh_steps
from solver_plugins.blocks.stepsize import TrackedStep

__all__ = [
    "ChainBlock",
    "Partner",
    "PassThrough",
    "SolverBlock",
    "SolverConv1d",
    "SolverConv2d",
    "SolverConv3d",
    "SolverLinear",
    "TrackedStep",
    "install_block",
    "install_chain",
    "install_pass_through",
    "refresh_steps",
    "remove_block",
    "remove_chain",
    "solve_layer",
    "solver_conv1d",
    "solver_conv2d",
    "solver_conv3d",
    "solver_linear",
    "take_off",
]
