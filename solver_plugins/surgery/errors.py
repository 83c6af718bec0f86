"""What can go wrong between a model and its blocks."""

from solver_plugins.errors import SolverPluginsError


class RecordError(SolverPluginsError, RuntimeError):
    """A model could not be run once to see what it computes."""


class TargetError(SolverPluginsError, ValueError):
    """A target names nothing that can be converted."""


class ConversionError(SolverPluginsError, ValueError):
    """A model cannot be converted or reverted; it is as it was."""
