"""Solving the block problem: one iteration rule per file, and how gradients pass through a solve."""

from solver_plugins.registry import import_all
from solver_plugins.solve.anderson import Anderson
from solver_plugins.solve.base import (
    DeterministicConfig,
    Draws,
    RateConfig,
    SamplingConfig,
    SamplingSolver,
    Solver,
    SolverConfig,
    State,
)
from solver_plugins.solve.block import Constants, affine_map, fresh_gram, pose_problem, solve_block
from solver_plugins.solve.checks import Activation, OutputKind, check_combination, check_gate, check_rank, make_solver
from solver_plugins.solve.collapse import Affine, Collapsed
from solver_plugins.solve.conjugate import conjugate_gradients
from solver_plugins.solve.fista import FISTA
from solver_plugins.solve.implicit import refuse_second_derivative, solve_implicit, with_adjoint
from solver_plugins.solve.ms2gd import MS2GD
from solver_plugins.solve.paths import Path
from solver_plugins.solve.problem import BlockProblem, GateKind, Observer, Scale, working_dtype
from solver_plugins.solve.proxgd import ProxGD
from solver_plugins.solve.proxsg import ProxSG
from solver_plugins.solve.rcd import RCD
from solver_plugins.solve.recursion import Momentum, Recursion, Samples
from solver_plugins.solve.run import Diagnostics, Solution, solve
from solver_plugins.solve.s2gd import S2GD
from solver_plugins.solve.svrg import SVRG

__all__ = [
    "FISTA",
    "MS2GD",
    "RCD",
    "S2GD",
    "SVRG",
    "Activation",
    "Affine",
    "Anderson",
    "BlockProblem",
    "Collapsed",
    "Constants",
    "DeterministicConfig",
    "Diagnostics",
    "Draws",
    "GateKind",
    "Momentum",
    "Observer",
    "OutputKind",
    "Path",
    "ProxGD",
    "ProxSG",
    "RateConfig",
    "Recursion",
    "Samples",
    "SamplingConfig",
    "SamplingSolver",
    "Scale",
    "Solution",
    "Solver",
    "SolverConfig",
    "State",
    "affine_map",
    "check_combination",
    "check_gate",
    "check_rank",
    "conjugate_gradients",
    "fresh_gram",
    "make_solver",
    "pose_problem",
    "refuse_second_derivative",
    "solve",
    "solve_block",
    "solve_implicit",
    "with_adjoint",
    "working_dtype",
]

# A solver's file registers it: a new file in this folder is all that a new solver needs.
import_all(__name__, __path__)
