"""Equilibrium networks whose state minimises a convex function (OptEq).

From "Optimization Induced Equilibrium Networks" (Xie et al., 2021).
"""

from solver_plugins.equilibrium.constructions import deep_opteq_of, universal_weights
from solver_plugins.equilibrium.deep import DeepOptEq, Equilibrium, project_weights
from solver_plugins.equilibrium.errors import DivergenceError, HeadError
from solver_plugins.equilibrium.head import HeadConfig, OptEqHead
from solver_plugins.equilibrium.layer import OptEqLayer
from solver_plugins.equilibrium.problem import objective
from solver_plugins.equilibrium.regularizers import (
    FEATURE_REGULARIZERS,
    FeatureRegularizer,
    list_regularizers,
    make_regularizer,
    register_regularizer,
)
from solver_plugins.equilibrium.solvers import (
    EQUILIBRIUM_SOLVERS,
    EquilibriumConfig,
    EquilibriumSolver,
    EquilibriumState,
    list_equilibrium_solvers,
    register_equilibrium_solver,
)

__all__ = [
    "EQUILIBRIUM_SOLVERS",
    "FEATURE_REGULARIZERS",
    "DeepOptEq",
    "DivergenceError",
    "Equilibrium",
    "EquilibriumConfig",
    "EquilibriumSolver",
    "EquilibriumState",
    "FeatureRegularizer",
    "HeadConfig",
    "HeadError",
    "OptEqHead",
    "OptEqLayer",
    "deep_opteq_of",
    "list_equilibrium_solvers",
    "list_regularizers",
    "make_regularizer",
    "objective",
    "project_weights",
    "register_equilibrium_solver",
    "register_regularizer",
    "universal_weights",
]
