"""Errors of equilibria and their heads."""

from solver_plugins.errors import SolverPluginsError


class DivergenceError(SolverPluginsError, ArithmeticError):
    """An equilibrium iteration grew instead of settling, or produced numbers that are not finite."""


class HeadError(SolverPluginsError, ValueError):
    """An equilibrium head cannot be attached to a model, or removed from it."""
