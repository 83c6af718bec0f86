"""What can go wrong in a study, besides what its parts raise."""

from solver_plugins.errors import SolverPluginsError


class CellError(SolverPluginsError, RuntimeError):
    """A cell whose result cannot be written down or read back."""


class OtherProcessError(SolverPluginsError, RuntimeError):
    """Another process of the same launch has failed."""
