"""The settings of a study: one YAML file with a part for each scale, and ``key=value`` on top of it.

common: {...}      # what the scales share
scales:
  smoke: {...}     # seconds: does it run?
  short: {...}     # minutes on two cores: does the effect show?
  paper: {...}     # the paper's own sizes and schedules
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from solver_plugins.errors import OptionError, did_you_mean
from solver_plugins.shipped import shipped_file, shipped_folders
from solver_plugins.studies.study import STUDIES, StudyConfig
from solver_plugins.train.reading import apply_change, read_options

SCALES = ("smoke", "short", "paper")


def read_study_config(name: str, scale: str = "short", changes: Sequence[str] = ()) -> StudyConfig:
    """Returns the settings of a study at a scale, changed by ``key=value`` texts, which its note mentions.

    Raises:
        UnknownNameError: If there is no such study.
        OptionError: If there is no such scale, or an option is unknown or does not fit.
    """
    study = STUDIES.get(name)
    if scale not in SCALES:
        raise OptionError(f"Unknown scale {scale!r}.{did_you_mean(scale, SCALES)}")
    options = _at_scale(study.settings or _settings_file(name), scale)
    written = options.get("note")
    for text in changes:
        apply_change(options, text)
    if changes and written and options["note"] == written:
        # The note describes the settings in the file, which have been changed.
        options["note"] = f"{written} Changed for this run: {', '.join(changes)}."
    return study.Config.parse(options, owner=f"The study {name!r} at scale {scale!r}")


def _settings_file(name: str) -> Path:
    found = shipped_file("studies", f"{name}.yaml")
    if found is None:
        places = " or ".join(map(str, shipped_folders("studies")))
        raise OptionError(
            f"Expected {name}.yaml in {places}; found none. Install solver_plugins again; a study of another package "
            "says where its file is by its attribute 'settings'."
        )
    return found


def _at_scale(path: Path, scale: str) -> dict[str, Any]:
    found = read_options(path, "settings")
    scales = found.get("scales") if isinstance(found, dict) else None
    if not isinstance(scales, dict) or set(scales) != set(SCALES) or not set(found) <= {"common", "scales"}:
        raise OptionError(
            f"Expected the settings {str(path)!r} to have 'scales' with {', '.join(SCALES)}, and perhaps 'common', and "
            "nothing else."
        )
    parts = {"common": found.get("common") or {}, **{key: value or {} for key, value in scales.items()}}
    if not all(isinstance(part, dict) for part in parts.values()):
        raise OptionError(f"Expected options in every part of the settings {str(path)!r}.")
    return _merged(parts["common"], parts[scale])


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merges two mappings section by section; values of ``above`` take precedence."""
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        result[key] = _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result
