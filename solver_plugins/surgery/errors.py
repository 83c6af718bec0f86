"""The errors of recording, choosing and converting."""

import contextlib
from collections.abc import Iterator

from solver_plugins.errors import SolverPluginsError, WeightError


class RecordError(SolverPluginsError, RuntimeError):
    """The forward pass of a model could not be recorded."""


class TargetError(SolverPluginsError, ValueError):
    """A target names nothing that can be converted."""


class ConversionError(SolverPluginsError, ValueError):
    """A model cannot be converted or reverted; it is as it was."""


@contextlib.contextmanager
def naming(layer: str) -> Iterator[None]:
    """Puts the name of a layer in front of an error about its weights."""
    try:
        yield
    except WeightError as error:
        raise WeightError(f"{layer}: {error}") from error
