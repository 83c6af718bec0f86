"""Reads the config of a run from a file or a recipe, changed by ``key=value`` texts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from solver_plugins.config import YamlDumper, load_json, load_yaml, one_line
from solver_plugins.errors import OptionError, did_you_mean
from solver_plugins.integrations.models import read_value
from solver_plugins.shipped import shipped_file, shipped_names
from solver_plugins.train.config import FinetuneConfig

_READERS = {".json": load_json, ".yaml": load_yaml, ".yml": load_yaml}


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> FinetuneConfig:
    """Reads the config from a YAML or JSON file, and changes it by ``key=value`` texts.

    A key may lead into sections, ``optimizer.lr=1e-4``; a value is read as YAML.

    Args:
        path: The file, or the name of a recipe that comes with the package ("quickstart").
        overrides: The changes.

    Raises:
        OptionError: If the file cannot be read, or an option is unknown or does not fit.
    """
    path = _recipe(str(path)) or Path(path)
    if path.suffix.lower() not in _READERS:
        raise OptionError(
            f"Expected a config file ending in {', '.join(_READERS)}, or the name of a recipe; found {path.name!r}."
            + did_you_mean(path.name, shipped_names("recipes", ".yaml"))
        )
    options = read_options(path, "config")
    if not isinstance(options, dict):
        raise OptionError(f"Expected sections and options in {str(path)!r}; found {type(options).__name__}.")
    for text in overrides:
        apply_change(options, text)
    return FinetuneConfig.parse(options, owner=f"The config {path.name!r}")


def given_options(config: FinetuneConfig) -> str:
    """Returns the options that differ from their defaults, as YAML."""
    given = config.model_dump(mode="json", exclude_defaults=True)
    return yaml.dump(given, Dumper=YamlDumper, sort_keys=False)


def read_options(path: Path, what: str) -> Any:
    """Returns the content of a YAML or JSON file; raises OptionError, which calls the file ``what``, if it cannot."""
    try:
        return _READERS.get(path.suffix.lower(), load_yaml)(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"Cannot read the {what} {str(path)!r}: {error.strerror}.") from None
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise OptionError(
            f"The {what} {str(path)!r} is not valid {path.suffix[1:].upper()}: {one_line(error)}."
        ) from None


def _recipe(name: str) -> Path | None:
    """Returns the shipped recipe of this name; a name with a folder or an ending is a config file."""
    return shipped_file("recipes", f"{name}.yaml") if Path(name).name == name and not Path(name).suffix else None


def apply_change(options: dict[str, Any], text: str) -> None:
    """Changes options in place by a ``key=value`` text; raises OptionError if the text has another form."""
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise OptionError(f"Expected a change of the config as key=value, such as optimizer.lr=1e-4; found {text!r}.")
    place = options
    for part in parts[:-1]:
        # The first option of a section that is null or absent creates it.
        if place.get(part) is None:
            place[part] = {}
        place = place[part]
        if not isinstance(place, dict):
            raise OptionError(f"{text!r}: {part!r} is not a section; it holds {place!r}.")
    place[parts[-1]] = _value(value.strip())


def _value(text: str) -> Any:
    if text in ("True", "False", "None"):
        return read_value(text)
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    try:
        return load_yaml(text)
    except (ValueError, yaml.YAMLError):
        return text
