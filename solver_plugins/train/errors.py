"""What can go wrong in a finetuning run."""

from solver_plugins.errors import SolverPluginsError


def summary_of(error: Exception) -> str:
    """Returns the type of an error and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


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
