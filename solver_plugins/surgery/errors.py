"""What can go wrong between a model and its blocks."""

import contextlib
from collections.abc import Iterator

from solver_plugins.errors import SolverPluginsError, WeightError


class RecordError(SolverPluginsError, RuntimeError):
    """A model could not be run once to see what it computes."""


class TargetError(SolverPluginsError, ValueError):
    """A target names nothing that can be converted."""


class ConversionError(SolverPluginsError, ValueError):
    """A model cannot be converted or reverted; it is as it was."""


@contextlib.contextmanager
def naming(layer: str) -> Iterator[None]:
    """Puts the name of a layer before what is wrong with its weights."""
    try:
        yield
    except WeightError as error:
        raise WeightError(f"{layer}: {error}") from error
