"""Strict, frozen configuration models that read and write JSON and YAML.

An unknown option raises and names the nearest valid one; nothing is coerced from a wrong type without saying so.
"""

import json
import types
import typing
from pathlib import Path
from typing import Any, Self

import pydantic
import yaml

from solver_plugins.errors import OptionError, did_you_mean


class StrictConfig(pydantic.BaseModel):
    """Base of all configuration models: frozen, no unknown fields, errors as :class:`OptionError`.

    ``MyConfig(**options)`` raises pydantic's own error; :meth:`parse` raises ours, which names near options.
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=False, allow_inf_nan=False)

    @classmethod
    def parse(cls, options: dict[str, Any], *, owner: str | None = None) -> Self:
        """Builds the config from a mapping.

        Args:
            options: Field values.
            owner: Whose options these are, for the message ("solver 'proxsg'").

        Raises:
            OptionError: For an unknown option or a value that does not fit, saying what was expected and found.
        """
        owner = owner or cls.__name__
        if not isinstance(options, dict):
            raise OptionError(f"{owner} takes a mapping of options; found {type(options).__name__}.")
        for name in options:
            if name not in cls.model_fields:
                raise OptionError(f"{owner} has no option {name!r}.{did_you_mean(str(name), cls.model_fields)}")
        try:
            return cls(**options)
        except pydantic.ValidationError as error:
            raise OptionError("\n".join(_explain(owner, cls, item) for item in error.errors())) from None

    def options(self) -> dict[str, Any]:
        """Returns the fields as plain JSON-ready values."""
        return self.model_dump(mode="json")

    def to_json(self) -> str:
        """Returns the config as JSON text."""
        return json.dumps(self.options(), indent=2, sort_keys=True)

    def to_yaml(self) -> str:
        """Returns the config as YAML text."""
        return yaml.safe_dump(self.options(), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads the config from JSON text."""
        try:
            return cls.parse(json.loads(text))
        except json.JSONDecodeError as error:
            raise OptionError(f"{cls.__name__}: not valid JSON ({error}).") from None

    @classmethod
    def from_yaml(cls, text: str) -> Self:
        """Reads the config from YAML text (safe loader: no code is ever run)."""
        try:
            return cls.parse(yaml.safe_load(text) or {})
        except yaml.YAMLError as error:
            raise OptionError(f"{cls.__name__}: not valid YAML ({error}).") from None

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Reads the config from a ``.json``, ``.yaml`` or ``.yml`` file."""
        path = Path(path)
        readers = {".json": cls.from_json, ".yaml": cls.from_yaml, ".yml": cls.from_yaml}
        if path.suffix not in readers:
            raise OptionError(f"Expected a file ending in {', '.join(readers)}; found {path.name!r}.")
        try:
            return readers[path.suffix](path.read_text(encoding="utf-8"))
        except OSError as error:
            raise OptionError(f"Cannot read {path.name!r}: {error.strerror}.") from None


def _explain(owner: str, model: type[pydantic.BaseModel], item: Any) -> str:
    """Turns one pydantic error into "owner: option: expected ..., found ..."."""
    name = ".".join(str(part) for part in item["loc"])
    where = f"{owner}, option {name!r}" if name else owner
    reason = item["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    field = model.model_fields.get(str(item["loc"][0])) if item["loc"] else None
    hint = f" {field.description}" if field is not None and field.description else ""
    found = "" if item["type"] == "value_error" and not name else f", found {item['input']!r}"
    return f"{where}: expected {reason}{found}.{hint}" if name else f"{where}: {reason}{found}"


def choices(annotation: Any) -> list[str]:
    """Returns the options of a ``Literal`` annotation, also inside a union."""
    if typing.get_origin(annotation) is typing.Literal:
        return [str(option) for option in typing.get_args(annotation)]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [option for part in typing.get_args(annotation) for option in choices(part)]
    return []
