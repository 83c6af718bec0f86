"""Solvers of the block problem: one iteration rule per file, all registered."""

from solver_plugins.registry import import_all
from solver_plugins.solvers.anderson import Anderson
from solver_plugins.solvers.base import (
    DeterministicConfig,
    Draws,
    RateConfig,
    SamplingConfig,
    SamplingSolver,
    Solver,
    SolverConfig,
    State,
)
from solver_plugins.solvers.fista import FISTA
from solver_plugins.solvers.loop import Diagnostics, Solution, solve
from solver_plugins.solvers.ms2gd import MS2GD
from solver_plugins.solvers.problem import BlockProblem, working_dtype
from solver_plugins.solvers.proxgd import ProxGD
from solver_plugins.solvers.proxsg import ProxSG
from solver_plugins.solvers.rcd import RCD
from solver_plugins.solvers.s2gd import S2GD
from solver_plugins.solvers.svrg import SVRG

__all__ = [
    "FISTA",
    "MS2GD",
    "RCD",
    "S2GD",
    "SVRG",
    "Anderson",
    "BlockProblem",
    "DeterministicConfig",
    "Diagnostics",
    "Draws",
    "ProxGD",
    "ProxSG",
    "RateConfig",
    "SamplingConfig",
    "SamplingSolver",
    "Solution",
    "Solver",
    "SolverConfig",
    "State",
    "solve",
    "working_dtype",
]

import_all(__name__, __path__)
