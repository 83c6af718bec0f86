"""Strict, frozen configuration models that read and write JSON and YAML.

An unknown option raises an error that names the nearest valid one. A value of the wrong type also raises, even if it
could be converted: ``"10"`` is not 10 and ``True`` is not 1. An integer may stand for a float, and a list for a tuple.
"""

import json
import numbers
import re
import reprlib
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import pydantic
import pydantic_core
import yaml

from solver_plugins.errors import OptionError, SolverPluginsError, did_you_mean


class OptionProblem(typing.NamedTuple):
    """What is wrong with one option: its dotted name ("" for the whole config), and the rest of the sentence."""

    name: str
    text: str
    unknown: bool = False

    def sentence(self, owner: str) -> str:
        """Returns the problem as a sentence about the owner of the options."""
        if self.unknown:
            return f"{owner} has no option {self.name!r}.{self.text}"
        return f"{owner}, option {self.name!r}{self.text}" if self.name else f"{owner}{self.text}"


class InvalidOptionsError(OptionError):
    """Options that do not fit. A config whose validator raises it tells the problems as its own, with dotted names."""

    def __init__(self, owner: str, problems: Iterable[OptionProblem]):
        self.problems = tuple(problems)
        super().__init__("\n".join(problem.sentence(owner) for problem in self.problems))


class StrictConfig(pydantic.BaseModel):
    """Base of all configuration models: frozen, no unknown fields, errors as :class:`OptionError`.

    ``MyConfig(**options)`` raises pydantic's own error; :meth:`parse` raises ours, which names similar options.

    Attributes:
        hints: Messages about options that this model does not have, but that a user may expect.
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    hints: ClassVar[Mapping[str, str]] = {}

    @pydantic.field_validator("*", mode="wrap")
    @classmethod
    def _refuse_coercion(cls, value: Any, validate: pydantic.ValidatorFunctionWrapHandler) -> Any:
        # Not pydantic's strict mode, which refuses the lists and mappings that JSON uses for tuples and nested models.
        result = validate(value)
        expected = _coerced_to(value, result)
        if expected is not None:
            raise pydantic_core.PydanticCustomError("coerced", "Input should be {expected}", {"expected": expected})
        return result

    @classmethod
    def parse(cls, options: Mapping[str, Any], *, owner: str | None = None, context: Any = None) -> Self:
        """Builds the config from a mapping; OptionError says what was expected and found.

        ``owner`` is whose options these are ("solver 'proxsg'"), ``context`` what validators find as ``info.context``.
        """
        owner = owner or cls.__name__
        if not isinstance(options, Mapping):
            raise OptionError(f"{owner} takes a mapping of options; found {type(options).__name__}.")
        try:
            return cls.model_validate({str(name): value for name, value in options.items()}, context=context)
        except pydantic.ValidationError as error:
            raise _error(owner, cls, error) from None

    def options(self) -> dict[str, Any]:
        """Returns the fields as plain JSON-ready values."""
        return self.model_dump(mode="json")

    def to_json(self) -> str:
        """Returns the config as JSON text."""
        return json.dumps(self.options(), indent=2, sort_keys=True)

    def to_yaml(self) -> str:
        """Returns the config as YAML text."""
        return yaml.dump(self.options(), Dumper=YamlDumper, sort_keys=True)

    @classmethod
    def from_json(cls, text: str, *, owner: str | None = None) -> Self:
        """Reads the config from JSON text; raises like :meth:`parse`."""
        return cls._read("JSON", load_json, text, owner)

    @classmethod
    def from_yaml(cls, text: str, *, owner: str | None = None) -> Self:
        """Reads the config from YAML text with the safe loader, which runs no code; raises like :meth:`parse`."""
        return cls._read("YAML", load_yaml, text, owner)

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Reads the config from a ``.json``, ``.yaml`` or ``.yml`` file; raises like :meth:`parse`."""
        path = Path(path)
        readers = {".json": cls.from_json, ".yaml": cls.from_yaml, ".yml": cls.from_yaml}
        reader = readers.get(path.suffix.lower())
        if reader is None:
            raise OptionError(f"Expected a file ending in {', '.join(readers)}; found {path.name!r}.")
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise OptionError(f"Cannot read {path.name!r}: {error.strerror}.") from None
        except UnicodeDecodeError as error:
            raise OptionError(f"Cannot read {path.name!r}: expected UTF-8 text ({error}).") from None
        return reader(text, owner=f"{cls.__name__} in {path.name!r}")

    @classmethod
    def _read(cls, form: str, load: Callable[[str], Any], text: str, owner: str | None) -> Self:
        try:
            options = load(text)
        # YAML's constructors let some ValueErrors through, such as that of a date that does not exist.
        except (ValueError, yaml.YAMLError, RecursionError) as error:
            raise OptionError(f"{owner or cls.__name__}: not valid {form} ({one_line(error)}).") from None
        return cls.parse(options, owner=owner)


def _coerced_to(value: Any, result: Any) -> str | None:
    """Returns the expected type if validation converted ``value`` or one of its elements; otherwise None."""
    # By exact type, because an enumeration that derives from str or int may be given by its value.
    if type(result) is bool:
        return None if isinstance(value, bool) else "True or False"
    if type(result) is int:
        return None if isinstance(value, numbers.Integral) and not isinstance(value, bool) else "an integer"
    if type(result) is float:
        return None if isinstance(value, numbers.Real) and not isinstance(value, bool) else "a number"
    if type(result) is str:
        return None if isinstance(value, str) else "a string"
    pairs: Iterable[tuple[Any, Any]] = ()
    if isinstance(result, (list, tuple)) and isinstance(value, (list, tuple)):
        pairs = zip(value, result, strict=False)
    elif isinstance(result, dict) and isinstance(value, Mapping):
        # Only the values, because JSON turns every key into a string.
        pairs = zip(value.values(), result.values(), strict=False)
    return next((f"{kind} in each place" for pair in pairs if (kind := _coerced_to(*pair)) is not None), None)


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 80


def unknown_option(name: str, models: list[type[pydantic.BaseModel]], near: Iterable[str] = ()) -> OptionProblem:
    """Says that none of ``models`` has the option, and which ones there are; ``near`` may have been meant, too."""
    last = name.rpartition(".")[2]
    hints = [hint for model in models if (hint := getattr(model, "hints", {}).get(last))]
    fields = {field for model in models for field in model.model_fields}.union(near)
    return OptionProblem(name, f"{''.join(f' {hint}' for hint in hints)}{did_you_mean(last, fields)}", unknown=True)


def _error(owner: str, model: type[pydantic.BaseModel], error: pydantic.ValidationError) -> SolverPluginsError:
    """Turns a pydantic error into lines of "owner, option 'name': expected ..., found ...", one for each option."""
    groups: dict[_Place, list[Any]] = {}
    for item in error.errors(include_url=False):
        groups.setdefault(_locate(model, item), []).append(item)
    problems = [problem for place, items in groups.items() for problem in _problems(place, items)]
    made = InvalidOptionsError(owner, problems)
    raised = [_raised(items) for items in groups.values()]
    if len(raised) == 1 and isinstance(raised[0], SolverPluginsError) and not isinstance(raised[0], OptionError):
        # A validator's own kind of error (TargetError) is what a caller waits for.
        return type(raised[0])(str(made))
    return made


def _raised(items: list[Any]) -> Exception | None:
    """Returns the exception that a validator raised about an option."""
    return items[0].get("ctx", {}).get("error")


def _problems(place: "_Place", items: list[Any]) -> list[OptionProblem]:
    """Says what is wrong with one option; the branches of a union fail one by one and become "expected a or b"."""
    kind, value, raised = items[0]["type"], items[0]["input"], _raised(items)
    if isinstance(raised, InvalidOptionsError):
        return [one._replace(name=".".join(filter(None, (place.name, one.name)))) for one in raised.problems]
    if isinstance(raised, SolverPluginsError):
        return [OptionProblem(place.name, f": {raised}")]
    if kind == "extra_forbidden":
        return [unknown_option(place.name, list(place.models))]
    hint = f" {place.description}" if place.description else ""
    if kind == "missing":
        return [OptionProblem(place.name, f" is required.{hint}")]
    found = f"found {_REPR.repr(value)} ({type(value).__name__}).{hint}"
    if kind in ("value_error", "assertion_error"):
        # A validator's own sentence. One about a whole model says itself what it found.
        sentence = items[0]["msg"].partition(", ")[2]
        return [OptionProblem(place.name, f": {sentence}" if place.models else f": {sentence}; {found}")]
    reasons = [item["msg"].removeprefix("Input should be ") for item in items]
    reasons = [f"a value {reason}" if reason.startswith(("greater", "less")) else reason for reason in reasons]
    return [OptionProblem(place.name, f": expected {' or '.join(dict.fromkeys(reasons))}, {found}")]


class _Place(typing.NamedTuple):
    """The dotted name of an option, the models that it may hold, and its description."""

    name: str
    models: tuple[type[pydantic.BaseModel], ...]
    description: str | None


def _locate(model: type[pydantic.BaseModel], item: Any) -> _Place:
    """Returns the place of a pydantic error, without the branches of unions ("float"), which no user types."""
    path: list[str] = []
    models, description = [model], None
    for part in item["loc"]:
        field = next((m.model_fields[str(part)] for m in models if part in m.model_fields), None)
        if field is not None:
            models, description = models_in(field.annotation), field.description
        if field is not None or isinstance(part, int):
            path.append(str(part))
    if item["type"] == "extra_forbidden":
        path.append(str(item["loc"][-1]))
    return _Place(".".join(path), tuple(models), description)


def models_in(annotation: Any) -> list[type[pydantic.BaseModel]]:
    """Returns the models that an annotation mentions, including those inside containers and unions."""
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return [annotation]
    return [model for part in typing.get_args(annotation) for model in models_in(part)]


def one_line(error: Exception) -> str:
    """Returns the message of an error in one line; YAML's own draws a picture of the place."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem} (line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1})"
    return " ".join(str(error).split())


def load_json(text: str) -> Any:
    """Reads JSON; a duplicate key is an error, and so is NaN."""
    return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} is given twice")
    return result


def _refuse_constant(name: str) -> typing.NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def load_yaml(text: str) -> Any:
    """Reads YAML with the safe loader; a duplicate key is an error, and ``1e-3`` is a number."""
    options = yaml.load(text, Loader=_Loader)
    # An empty file means all defaults; an empty list or a lone zero is a mistake.
    return {} if options is None else options


class _Loader(yaml.SafeLoader):
    """The safe loader, except that it refuses duplicate keys and reads ``1e-3`` as a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        # Checked before "<<" is merged in, because keys from a merge may be overridden.
        there: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in there:
                told = f"the key {key.value!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, told, key.start_mark)
            there.add(key.value)
        return super().construct_mapping(node, deep)


class YamlDumper(yaml.SafeDumper):
    """The safe dumper, except that it quotes strings which :class:`_Loader` would read as numbers."""


# PyYAML follows YAML 1.1, which requires a dot in every number with an exponent and reads 1e-3 as a string.
_EXPONENT = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$|[-+]?\.[0-9]+[eE][-+]?[0-9]+$")
for _class in (_Loader, YamlDumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))
