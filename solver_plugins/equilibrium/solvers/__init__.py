"""Solvers of fixed-point problems, one iteration rule per file, registered."""

from solver_plugins.equilibrium.solvers.anderson import Anderson
from solver_plugins.equilibrium.solvers.fista import Fista
from solver_plugins.equilibrium.solvers.fixed_point import FixedPoint
from solver_plugins.equilibrium.solvers.loop import Run, settle, unroll
from solver_plugins.equilibrium.solvers.sam import Sam
from solver_plugins.equilibrium.solvers.solver import (
    EQUILIBRIUM_SOLVERS,
    EquilibriumConfig,
    EquilibriumSolver,
    State,
    list_equilibrium_solvers,
    register_equilibrium_solver,
)

__all__ = [
    "EQUILIBRIUM_SOLVERS",
    "Anderson",
    "EquilibriumConfig",
    "EquilibriumSolver",
    "Fista",
    "FixedPoint",
    "Run",
    "Sam",
    "State",
    "list_equilibrium_solvers",
    "register_equilibrium_solver",
    "settle",
    "unroll",
]
