"""Layers as solvers: functions of their weights, and modules that stay the layers they were."""

from solver_plugins.blocks.block import SolverBlock
from solver_plugins.blocks.calibration import calibrate
from solver_plugins.blocks.classes import SolverConv1d, SolverConv2d, SolverConv3d, SolverLinear
from solver_plugins.blocks.dropout import PassThrough, RoutedDropout, pass_through, route
from solver_plugins.blocks.functional import solve_layer, solver_conv1d, solver_conv2d, solver_conv3d, solver_linear
from solver_plugins.blocks.gate import GATE, gates_of, param_groups, separate_gates
from solver_plugins.blocks.install import blocks_of, guard, install_block, link_between, restore
from solver_plugins.blocks.link import Link
from solver_plugins.blocks.noise import effective_rate
from solver_plugins.blocks.outlet import Outlet
from solver_plugins.blocks.settings import cache_gram, refresh_steps, set_blend, set_eval_mode, set_iters
from solver_plugins.blocks.stepsize import TrackedStep

__all__ = [
    "GATE",
    "Link",
    "Outlet",
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
    "effective_rate",
    "gates_of",
    "guard",
    "install_block",
    "link_between",
    "param_groups",
    "pass_through",
    "refresh_steps",
    "restore",
    "route",
    "separate_gates",
    "set_blend",
    "set_eval_mode",
    "set_iters",
    "solve_layer",
    "solver_conv1d",
    "solver_conv2d",
    "solver_conv3d",
    "solver_linear",
]
