"""All options of a run, from the fields of the config: as a commented list, as names, and as a JSON schema."""

import json
import textwrap
from typing import Any

import pydantic
import yaml
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticOmit

from solver_plugins.config import StrictConfig, YamlDumper, models_in
from solver_plugins.registry import SOLVERS
from solver_plugins.surgery import ConversionSpec
from solver_plugins.train.config import FinetuneConfig
from solver_plugins.train.sections import PeftSection


def list_options() -> str:
    """Returns every option with its default as commented YAML, marking sections that are off by default."""
    return "\n".join(_lines(FinetuneConfig, "")) + "\n"


def option_names(model: type[pydantic.BaseModel] = FinetuneConfig, place: str = "") -> list[str]:
    """Returns the dotted names of all options."""
    found = []
    for name, field in model.model_fields.items():
        inner = [one for one in models_in(field.annotation) if issubclass(one, StrictConfig)]
        found += option_names(inner[0], f"{place}{name}.") if inner else [f"{place}{name}"]
    return found


def json_schema() -> str:
    """Returns the JSON schema of a config, with which an editor completes and checks it."""
    made = FinetuneConfig.model_json_schema(schema_generator=_Schema)
    made = {"$schema": _Schema.schema_dialect, **made, "title": "A finetuning run of solver_plugins"}
    section = made["$defs"][ConversionSpec.__name__]
    # The solver's own options, and those of proxprop, stand beside the fields; plug-ins may add more.
    section["additionalProperties"] = True
    section["properties"]["name"] = {"type": "string", "examples": [*SOLVERS.names(), "proxprop"]}
    made["$defs"][PeftSection.__name__]["additionalProperties"] = True
    return json.dumps(made, indent=1) + "\n"


class _Schema(GenerateJsonSchema):
    """A schema without what no file can hold: functions."""

    def callable_schema(self, schema: Any) -> Any:
        raise PydanticOmit


def _lines(model: type[pydantic.BaseModel], indent: str) -> list[str]:
    lines = []
    for name, field in model.model_fields.items():
        inner = [one for one in models_in(field.annotation) if issubclass(one, StrictConfig)]
        if inner:
            about = (inner[0].__doc__ or "").strip().splitlines()[0].replace("``", "")
            off = field.default is None
            lines += _commented(f"{indent}{name}:", f"{about}{' Off by default (null).' if off else ''}")
            lines += _lines(inner[0], indent + "  ")
        else:
            lines += _commented(f"{indent}{name}: {_default(field)}", str(field.description))
    return lines


def _commented(text: str, about: str) -> list[str]:
    """Returns a line with its comment behind it, or above it where that is too long for a narrow column."""
    line = f"{text}  # {about}"
    indent = " " * (len(text) - len(text.lstrip()))
    return [line] if len(line) <= 88 else [f"{indent}# {part}" for part in textwrap.wrap(about, 86)] + [text]


def _default(field: Any) -> str:
    if field.is_required():
        return "..."
    default = field.get_default(call_default_factory=True)
    text: str = yaml.dump(default, Dumper=YamlDumper, default_flow_style=True)
    return text.replace("\n...\n", "").strip()
