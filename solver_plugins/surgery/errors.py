"""The errors and warnings of recording, choosing and converting, and how they name a user's options."""

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Literal

from solver_plugins.errors import SolverPluginsError, SolverPluginsWarning, WeightError

Place = Literal["python", "command line", "config"]
"""Where a user writes the options of a conversion."""
_PLACE: ContextVar[Place] = ContextVar("place", default="python")


class RecordError(SolverPluginsError, RuntimeError):
    """The forward pass of a model could not be recorded."""


class TargetError(SolverPluginsError, ValueError):
    """A target names nothing that can be converted."""


class ConversionError(SolverPluginsError, ValueError):
    """A model cannot be converted or reverted; it is as it was."""


class DefaultsWarning(SolverPluginsWarning):
    """A model has none of the blocks that a solver takes by default, so its classifier is converted."""


@contextlib.contextmanager
def speaking(place: Place) -> Iterator[None]:
    """Makes messages inside of the context name options as users write them there."""
    token = _PLACE.set(place)
    try:
        yield
    finally:
        _PLACE.reset(token)


def option(name: str, value: object = None) -> str:
    """Returns an option as the user writes it: ``p=0.5``, ``--p 0.5`` or ``solver.p=0.5``."""
    place, values = _PLACE.get(), value if isinstance(value, list) else [value]
    if place == "command line":
        name = name.replace("_", "-")
        if isinstance(value, bool):
            return f"--{'' if value else 'no-'}{name}"
        return " ".join(f"--{name}" if one is None else f"--{name} {one}" for one in values)
    if place == "config":
        text = f"[{', '.join(map(str, values))}]" if isinstance(value, list) else str(value)
        return f"solver.{name}" if value is None else f"solver.{name}={text}"
    return f"{name}=" if value is None else f"{name}={value!r}"


def listed(options: Mapping[str, object]) -> str:
    """Returns several options in a form that can be pasted."""
    between = ", " if _PLACE.get() == "python" else " "
    return between.join(option(name, value) for name, value in options.items())


def listing() -> str:
    """Returns how a user lists the layers of a model that are worth converting."""
    return {
        "python": "print(inspect_model(model, suggest=True)) lists them",
        "command line": "--suggest lists them",
        "config": "solver-plugins inspect MODEL --suggest lists them",
    }[_PLACE.get()]


def changes_scale() -> str:
    """Returns the advice about norm and skip patterns, where every further iteration makes activations larger."""
    python = _PLACE.get() == "python"
    calibrate = "calibrate(model, batches)" if python else option("calibrate")
    ways = f"{option('gate', 'channel')}, {calibrate} or {option('blend')}"
    return f"changes the network's scale: use {ways}"


@contextlib.contextmanager
def naming(layer: str) -> Iterator[None]:
    """Puts the name of a layer in front of an error about its weights."""
    try:
        yield
    except WeightError as error:
        raise WeightError(f"{layer}: {error}") from error
