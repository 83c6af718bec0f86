"""What can go wrong in a finetuning run."""

from solver_plugins.errors import SolverPluginsError


class DataError(SolverPluginsError, ValueError):
    """A data set that is missing, empty, unreadable, or does not fit the model."""


class OutputError(SolverPluginsError, ValueError):
    """An output folder that already holds something else."""


class CheckpointError(SolverPluginsError, RuntimeError):
    """A checkpoint that cannot be written, or no checkpoint to continue from."""


class DivergedError(SolverPluginsError, ArithmeticError):
    """A loss or a weight is no longer finite."""


class LaunchError(SolverPluginsError, RuntimeError):
    """Processes that do not know about each other."""
