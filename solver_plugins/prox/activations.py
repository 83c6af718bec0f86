"""From an activation, as a model holds it, to its prior."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from solver_plugins.errors import DuplicateNameError, NotProximalError, OptionError
from solver_plugins.prox.boxes import IdentityPrior
from solver_plugins.prox.prior import PRIORS, Prior, make_prior
from solver_plugins.prox.rejections import (
    REJECTED_CLASSES,
    REJECTED_FUNCTIONS,
    REJECTED_LIBRARY_FUNCTIONS,
    REJECTED_NAMES,
)
from solver_plugins.prox.table import ALIASES, CLASSES, FUNCTIONS, LIBRARY_FUNCTIONS, bind

Activation = None | str | Prior | nn.Module | Callable[..., Any]

_DECLARED: dict[Any, Prior | Callable[..., Prior]] = {}


def prox_for(activation: Activation, *args: Any, **kwargs: Any) -> Prior:
    """Returns the prior whose proximal map at the unit step is ``activation``.

    Args:
        activation: None (no activation), a module, a function of torch or timm (also as ``functools.partial``), the
            name of a registered prior, or a prior, which is returned unchanged.
        *args: For a function: the parameters after its input, as in the call ``F.hardtanh(x, -2.0, 2.0)``.
        **kwargs: The same by name; for the name of a prior, its parameters.

    Raises:
        NotProximalError: If it is not a proximal map, with the reason (GELU, SELU, a slope out of range), or if it is
            unknown, with how to declare it. A subclass with its own ``forward`` is unknown.
        UnknownNameError: If it is a string that is not registered.
        OptionError: If the parameters do not fit.
    """
    if isinstance(activation, functools.partial):
        if activation.args:
            raise NotProximalError(f"{activation!r} binds its input; bind parameters by name.")
        return prox_for(activation.func, *args, **{**activation.keywords, **kwargs})
    if isinstance(activation, str):
        if args:
            raise OptionError(f"Give the parameters of prior {activation!r} by name; found {list(args)}.")
        return _of_name(activation, kwargs)
    if activation is None or isinstance(activation, Prior | nn.Module):
        if args or kwargs:
            raise OptionError(f"{activation!r} takes no further parameters; found {[*args, *kwargs]}.")
        if activation is None:
            return IdentityPrior()
        return activation if isinstance(activation, Prior) else _of_module(activation)
    if inspect.isclass(activation):
        raise NotProximalError(f"Expected an activation; found the class {_qualified(activation)}: pass an instance.")
    if callable(activation):
        return _of_function(activation, args, kwargs)
    raise NotProximalError(f"Expected a module, function, name, prior or None; found {activation!r}.")


def declare_activation(activation: type[nn.Module] | Callable[..., Any], prior: Prior | Callable[..., Prior]) -> None:
    """Declares that an activation (a module class or a function) is the proximal map of a prior at the unit step.

    Args:
        activation: A module class, or a function.
        prior: The prior. If it depends on parameters: a function that builds it, from the module for a class, and from
            the parameters after the input for a function. :class:`~solver_plugins.prox.Monotone` is the prior of any
            monotone function with slopes in [0, 1]; :func:`~solver_plugins.prox.check_monotone` tests that.

    Raises:
        DuplicateNameError: If it is known already whether the activation is a proximal map.
        OptionError: If the arguments are of another kind.
    """
    is_class = inspect.isclass(activation) and issubclass(activation, nn.Module)
    if not is_class and (inspect.isclass(activation) or isinstance(activation, nn.Module) or not callable(activation)):
        raise OptionError(f"Declare a module class or a function; found {activation!r}.")
    if not isinstance(prior, Prior) and not callable(prior):
        raise OptionError(f"Expected a prior or a function that builds one; found {prior!r}.")
    name = _qualified(activation)
    tables = (CLASSES, REJECTED_CLASSES) if is_class else (LIBRARY_FUNCTIONS, REJECTED_LIBRARY_FUNCTIONS)
    known = any(name in table for table in tables) or activation in FUNCTIONS or activation in REJECTED_FUNCTIONS
    if known or _DECLARED.get(activation, prior) is not prior:
        raise DuplicateNameError(f"{name} is known already; it cannot be declared again.")
    _DECLARED[activation] = prior


def _of_name(name: str, parameters: dict[str, Any]) -> Prior:
    name = ALIASES.get(name, name)
    if name in REJECTED_NAMES and name not in PRIORS:
        raise _rejection(name, REJECTED_NAMES[name])
    return make_prior(name, **parameters)


def _of_module(module: nn.Module) -> Prior:
    cls = type(module)
    for base in cls.__mro__:
        name = _qualified(base)
        if not (base in _DECLARED or name in CLASSES or name in REJECTED_CLASSES):
            continue
        # The tables describe the forward of that class. A subclass, or a hook that replaced the forward of this
        # instance, may compute anything.
        if "forward" in vars(module):
            raise _unknown(f"{_qualified(cls)} with its own forward on the instance", "its class")
        if cls.forward is not base.forward:  # type: ignore[attr-defined]
            raise _unknown(f"{_qualified(cls)}, which overrides the forward of {name},", cls.__name__)
        if base in _DECLARED:
            declared = _DECLARED[base]
            return declared if isinstance(declared, Prior) else declared(module)
        if name in REJECTED_CLASSES:
            raise _rejection(name, REJECTED_CLASSES[name])
        return CLASSES[name](module)
    raise _unknown(_qualified(cls), cls.__name__)


def _of_function(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Prior:
    name = _qualified(function)
    try:
        hash(function)
    except TypeError:
        raise _unknown(name, "it") from None
    if function in _DECLARED:
        declared = _DECLARED[function]
        return declared if isinstance(declared, Prior) else bind(declared, name, args, kwargs)
    reason = REJECTED_FUNCTIONS.get(function) or REJECTED_LIBRARY_FUNCTIONS.get(name)
    if reason is not None:
        raise _rejection(name, reason)
    factory = FUNCTIONS.get(function) or LIBRARY_FUNCTIONS.get(name)
    if factory is None:
        raise _unknown(name, getattr(function, "__name__", "it"))
    return bind(factory, name, args, kwargs)


def _rejection(name: str, reason: str) -> NotProximalError:
    return NotProximalError(f"{name} is not the proximal map of any function: {reason}.")


def _unknown(what: str, declare: str) -> NotProximalError:
    return NotProximalError(
        f"{what} is not known to be a proximal map. If it is monotone with slopes in [0, 1], say so with "
        f"declare_activation({declare}, Monotone(function)) or with another prior; otherwise keep it out of the solver."
    )


def _qualified(thing: Any) -> str:
    """Returns the module and qualified name of a class or function, as far as it has them."""
    name = getattr(thing, "__qualname__", None) or getattr(thing, "__name__", None) or repr(thing)
    module = getattr(thing, "__module__", None)
    return f"{module}.{name}" if module else str(name)
