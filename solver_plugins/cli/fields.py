"""Options of a command, made from the fields of a config."""

import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

import pydantic
import typer

from solver_plugins.config import StrictConfig
from solver_plugins.errors import OptionError
from solver_plugins.integrations.models import read_value

F = TypeVar("F", bound=Callable[..., Any])


def takes_fields(config: type[StrictConfig], parameter: str, flags: Mapping[str, str]) -> Callable[[F], F]:
    """Decorates a command: one of its parameters, a dict, becomes one option for each field of a config.

    A field's name is the option's (unless ``flags`` has another one), its description the help text. A field that may
    hold several texts is repeatable; a mapping is given as key=value, repeatable, too. The dict holds the options that
    were given, so that all others have the config's own defaults.
    """
    options = {name: _Option(name, field, flags.get(name)) for name, field in config.model_fields.items()}

    def decorate(command: F) -> F:
        @functools.wraps(command)
        def run(**given: Any) -> Any:
            texts = {name: given.pop(name) for name in options}
            read = {name: options[name].read(text) for name, text in texts.items() if text is not None}
            return command(**given, **{parameter: read})

        made: list[inspect.Parameter] = []
        for one in inspect.signature(command).parameters.values():
            made += [option.parameter() for option in options.values()] if one.name == parameter else [one]
        signature = inspect.Signature([one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in made])
        # typer reads the signature, and the annotations beside it.
        run.__signature__ = signature  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in made}
        return typing.cast(F, run)

    return decorate


class _Option:
    """One field as an option of the command line."""

    def __init__(self, name: str, field: pydantic.fields.FieldInfo, flag: str | None):
        self.name, self.field = name, field
        self.kinds = {typing.get_origin(part) or part for part in _branches(field.annotation)}
        self.flag = flag or f"--{name.replace('_', '-')}"

    def parameter(self) -> inspect.Parameter:
        several = bool(self.kinds & {tuple, list, dict})
        kind: Any = list[str] if several else next((one for one in (bool, int, float) if one in self.kinds), str)
        flag = f"{self.flag}/--no-{self.flag[2:]}" if kind is bool else self.flag
        default = None if several or self.field.default is None else str(self.field.default)
        form = " As key=value." if dict in self.kinds else ""
        text = f"{self.field.description}{form}{' Repeatable.' if several else ''}"
        shown = typer.Option(flag, help=text, show_default=default or False)
        return inspect.Parameter(
            self.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, shown]
        )

    def read(self, given: Any) -> Any:
        if dict in self.kinds:
            return read_pairs(given, self.flag)
        # One text with a character that no name has is not a list of names, but a regular expression.
        alone = isinstance(given, list) and str in self.kinds and len(given) == 1
        return given[0] if alone and re.search(r"[^\w.\-]|\.\*|\.\+", given[0]) else given


def _branches(annotation: Any) -> list[Any]:
    """Returns what a union is made of; else the annotation alone."""
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return [one for part in typing.get_args(annotation) for one in _branches(part)] if union else [annotation]


def read_pairs(given: list[str] | None, option: str) -> dict[str, Any]:
    """Reads ``key=value`` texts; OptionError if one is of another form, or a key is given twice."""
    pairs: dict[str, Any] = {}
    for text in given or ():
        key, equals, value = text.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key.isidentifier():
            raise OptionError(f"Expected {option} as key=value; found {text!r}.")
        if key in pairs:
            raise OptionError(f"Expected {option} {key} once; found it twice.")
        pairs[key] = read_value(value.strip())
    return pairs
