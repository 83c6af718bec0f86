"""Lists all options of a run: names, defaults and meanings, from the fields of the config."""

from typing import Any

import pydantic
import yaml

from solver_plugins.config import StrictConfig, YamlDumper, models_in
from solver_plugins.train.config import FinetuneConfig


def list_options() -> str:
    """Returns every option with its default as commented YAML, marking sections that are off by default."""
    return "\n".join(_lines(FinetuneConfig, "")) + "\n"


def _lines(model: type[pydantic.BaseModel], indent: str) -> list[str]:
    lines = []
    for name, field in model.model_fields.items():
        inner = [one for one in models_in(field.annotation) if issubclass(one, StrictConfig)]
        if inner:
            about = (inner[0].__doc__ or "").strip().splitlines()[0].replace("``", "")
            off = field.default is None
            lines += [f"{indent}{name}:  # {about}{' Off by default (null).' if off else ''}"]
            lines += _lines(inner[0], indent + "  ")
        else:
            lines.append(f"{indent}{name}: {_default(field)}  # {field.description}")
    return lines


def _default(field: Any) -> str:
    if field.is_required():
        return "..."
    default = field.get_default(call_default_factory=True)
    text: str = yaml.dump(default, Dumper=YamlDumper, default_flow_style=True)
    return text.replace("\n...\n", "").strip()
