"""The registry of priors.

A third-party distribution adds one by an entry point of the group ``solver_plugins.priors``.
"""

import inspect
from collections.abc import Iterable
from typing import Any, TypeVar

from solver_plugins.errors import OptionError, did_you_mean
from solver_plugins.prox.base import Prior
from solver_plugins.registry import Registry, subclasses_of

P = TypeVar("P", bound=type[Prior])


PRIORS: Registry[type[Prior]] = Registry(
    "prior", entry_point_group="solver_plugins.priors", check=subclasses_of(Prior, "solver_plugins.prox.Prior")
)


def register_prior(prior: P) -> P:
    """Class decorator: registers a prior under its ``name``; the first line of its docstring is the description."""
    return PRIORS.register_class(prior)


def list_priors(filter: str | Iterable[str] | None = None) -> list[str]:
    """Lists the registered priors; ``filter`` is a glob on the name or a tag ("activation", "paper", "indicator")."""
    return PRIORS.names(filter)


def make_prior(name: str, **parameters: Any) -> Prior:
    """Builds a registered prior.

    Args:
        name: A registered name.
        **parameters: The parameters of that prior (``gamma``, ``negative_slope``, ...).

    Raises:
        UnknownNameError: If there is no such prior; the message lists near names.
        OptionError: If a parameter is unknown or a required one is missing; the message lists the valid ones.
        NotProximalError: If a parameter is out of the range in which the activation is a proximal map.
    """
    prior = PRIORS.get(name)
    # A class without fields inherits object.__init__, whose signature claims to take anything.
    own = "__init__" in vars(prior) and prior.__init__ is not object.__init__
    valid = dict(inspect.signature(prior).parameters) if own else {}
    for parameter in parameters:
        if parameter not in valid:
            raise OptionError(f"Prior {name!r} has no parameter {parameter!r}.{did_you_mean(parameter, valid)}")
    missing = [key for key, value in valid.items() if value.default is value.empty and key not in parameters]
    if missing:
        raise OptionError(f"Prior {name!r} needs {', '.join(missing)}; parameters: {', '.join(valid)}.")
    return prior(**parameters)
