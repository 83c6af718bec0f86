"""Solvers of fixed-point problems, one iteration rule per file, registered."""

from solver_plugins.equilibrium.solvers.anderson import EquilibriumAnderson
from solver_plugins.equilibrium.solvers.fista import Fista
from solver_plugins.equilibrium.solvers.fixed_point import FixedPoint
from solver_plugins.equilibrium.solvers.loop import Run, settle, unroll
from solver_plugins.equilibrium.solvers.sam import Sam
from solver_plugins.equilibrium.solvers.solver import (
    EQUILIBRIUM_SOLVERS,
    EquilibriumConfig,
    EquilibriumSolver,
    EquilibriumState,
    list_equilibrium_solvers,
    register_equilibrium_solver,
)

__all__ = [
    "EQUILIBRIUM_SOLVERS",
    "EquilibriumAnderson",
    "EquilibriumConfig",
    "EquilibriumSolver",
    "EquilibriumState",
    "Fista",
    "FixedPoint",
    "Run",
    "Sam",
    "list_equilibrium_solvers",
    "register_equilibrium_solver",
    "settle",
    "unroll",
]
