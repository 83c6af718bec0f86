"""Errors of saving and loading converted models."""

from solver_plugins.errors import SolverPluginsError


class SavingError(SolverPluginsError, ValueError):
    """A model cannot be saved so that it could be loaded again; nothing was written."""


class LoadingError(SolverPluginsError, ValueError):
    """A folder does not give back the converted model that was saved."""
