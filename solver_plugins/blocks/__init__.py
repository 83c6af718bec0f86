"""Layers as solvers: functions of their weights, and modules that stay the layers they were."""

from solver_plugins.blocks.base import SolverBlock, install_block, remove_block
from solver_plugins.blocks.calibration import calibrate, set_blend
from solver_plugins.blocks.chain import ChainBlock, Outlet, Partner, install_chain, partner_of, remove_chain, scope_of
from solver_plugins.blocks.classes import SolverConv1d, SolverConv2d, SolverConv3d, SolverLinear
from solver_plugins.blocks.find import blocks_of
from solver_plugins.blocks.functional import solve_layer, solver_conv1d, solver_conv2d, solver_conv3d, solver_linear
from solver_plugins.blocks.layer import LayerBlock
from solver_plugins.blocks.made import take_off
from solver_plugins.blocks.passthrough import PassThrough, RoutedDropout, install_pass_through, install_route
from solver_plugins.blocks.refresh import cache_gram, refresh_steps
from solver_plugins.blocks.stepsize import TrackedStep

__all__ = [
    "ChainBlock",
    "LayerBlock",
    "Outlet",
    "Partner",
    "PassThrough",
    "RoutedDropout",
    "SolverBlock",
    "SolverConv1d",
    "SolverConv2d",
    "SolverConv3d",
    "SolverLinear",
    "TrackedStep",
    "blocks_of",
    "cache_gram",
    "calibrate",
    "install_block",
    "install_chain",
    "install_pass_through",
    "install_route",
    "partner_of",
    "refresh_steps",
    "remove_block",
    "remove_chain",
    "scope_of",
    "set_blend",
    "solve_layer",
    "solver_conv1d",
    "solver_conv2d",
    "solver_conv3d",
    "solver_linear",
    "take_off",
]
