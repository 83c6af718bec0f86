"""The errors and warnings of the package; packages add their own in their ``errors.py``.

Each error derives from :class:`SolverPluginsError` *and* from the built-in exception that a caller would expect, so
both ``except SolverPluginsError`` and ``except ValueError`` work. Messages say what was expected, what was found and
what to do.
"""

import difflib
import sys
import types
import warnings
from collections.abc import Iterable, Sequence


class SolverPluginsError(Exception):
    """Base class of all errors raised by ``solver_plugins``."""


class UnknownNameError(SolverPluginsError, LookupError):
    """A name is not registered."""


class DuplicateNameError(SolverPluginsError, ValueError):
    """A name is registered already."""


class RegistrationError(SolverPluginsError, TypeError):
    """An object lacks what its registry requires."""


class OptionError(SolverPluginsError, ValueError):
    """An option is unknown, out of range, or incompatible with another one."""


class ShapeError(SolverPluginsError, ValueError):
    """A tensor does not have the shape that a layer, operator or prior needs."""


class InputError(SolverPluginsError, TypeError):
    """An input has another dtype than the layer's weights."""


class WeightError(SolverPluginsError, ValueError):
    """No step size can be computed from the weights: they are not floating point, or not finite."""


class UnsupportedLayerError(SolverPluginsError, TypeError):
    """The package cannot read a layer as a linear operator."""


class NotProximalError(SolverPluginsError, ValueError):
    """An activation is not the proximal map of any function."""


class NoMinimizerError(SolverPluginsError, ValueError):
    """A solve to convergence was requested for a problem without a minimiser."""


class DoubleBackwardError(SolverPluginsError, RuntimeError):
    """A second derivative was requested from a gradient that only has a first one."""


class SolverPluginsWarning(UserWarning):
    """Base class of all warnings issued by ``solver_plugins``."""


class NoMinimizerWarning(SolverPluginsWarning):
    """The block problem may have no minimiser, so its iterates can grow without bound."""


class NotConvergedWarning(SolverPluginsWarning):
    """A solve did not reach the tolerance that an implicit gradient needs."""


class PluginWarning(SolverPluginsWarning):
    """An installed third-party plugin could not be loaded."""


def did_you_mean(found: str, options: Iterable[str]) -> str:
    """Returns ``" Did you mean 'a' or 'b'? Options: ..."`` for an error message about an unknown name."""
    options = sorted(options)
    # Compared without case: "FISTA" shares no letter with "fista".
    folded = [name.casefold() for name in options]
    near = dict.fromkeys(difflib.get_close_matches(found.casefold(), folded, n=3, cutoff=0.5))
    names = [name for match in near for name, fold in zip(options, folded, strict=True) if fold == match]
    question = f" Did you mean {' or '.join(repr(name) for name in names)}?" if names else ""
    return f"{question} Options: {', '.join(options) if options else 'none'}."


def some(names: Sequence[str], most: int = 3) -> str:
    """Returns the first names for a message, and how many more there are: ``"a, b, c and 4 more"``."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def warn(message: str, category: type[Warning]) -> None:
    """Warns at the line of the caller's own code: the first frame outside this package and torch."""
    level = 1
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("solver_plugins", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
