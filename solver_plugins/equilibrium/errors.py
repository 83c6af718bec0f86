"""Errors of this room."""

from solver_plugins.errors import SolverPluginsError


class DivergenceError(SolverPluginsError, ArithmeticError):
    """An equilibrium iteration grew instead of settling, or met numbers that are not finite."""


class HeadError(SolverPluginsError, ValueError):
    """A model that an equilibrium head cannot be attached to, or removed from."""
