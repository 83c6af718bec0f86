"""Solving the block problem: one iteration rule per file, and how gradients pass through a solve."""

# Importing a solver's file registers it.
from solver_plugins.solve.anderson import Anderson
from solver_plugins.solve.attach import refuse_second_derivative, with_adjoint
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
from solver_plugins.solve.conjugate import conjugate_gradients
from solver_plugins.solve.differentiate import differentiable_solve
from solver_plugins.solve.fista import FISTA
from solver_plugins.solve.implicit import solve_implicit
from solver_plugins.solve.loop import Diagnostics, Solution, solve
from solver_plugins.solve.ms2gd import MS2GD
from solver_plugins.solve.problem import BlockProblem, working_dtype
from solver_plugins.solve.proxgd import ProxGD
from solver_plugins.solve.proxsg import ProxSG
from solver_plugins.solve.rcd import RCD
from solver_plugins.solve.s2gd import S2GD
from solver_plugins.solve.svrg import SVRG
from solver_plugins.solve.unrolled import fresh_gram

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
    "conjugate_gradients",
    "differentiable_solve",
    "fresh_gram",
    "refuse_second_derivative",
    "solve",
    "solve_implicit",
    "with_adjoint",
    "working_dtype",
]
