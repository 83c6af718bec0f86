"""The folder of a run: what it holds, and whose it is."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from solver_plugins.train.config import FinetuneConfig
from solver_plugins.train.errors import OutputError

CONFIG = "config.yaml"
RESULTS = "results.json"
REPORT = "report.html"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
MODEL = "model"
RESULT = "result.json"
ARMS = ("solver", "baseline", "plain")
_FREE = ("output", "trackers", "checkpoints")
"""What may differ between a run and its continuation."""


def check_output(config: FinetuneConfig, resume: bool, overwrite: bool) -> None:
    """Checks that the folder of a run is free, may be replaced, or is the one to continue; writes nothing.

    Raises:
        OutputError: If it holds something else, another run, or none to continue.
    """
    place = Path(config.output).expanduser()
    if place.exists() and not place.is_dir():
        raise OutputError(f"Expected a folder for output; {str(place)!r} is a file.")
    held = sorted(path.name for path in place.iterdir()) if place.is_dir() else []
    is_run = CONFIG in held
    if held and not is_run:
        raise OutputError(
            f"The output folder {str(place)!r} holds {', '.join(held[:5])}, which is no run of finetune: choose "
            "another output=."
        )
    if is_run and not (resume or overwrite):
        raise OutputError(
            f"The output folder {str(place)!r} already holds a run: continue it with --resume, replace it with "
            "--overwrite, or choose another output=."
        )
    if is_run and resume:
        _check_same(config, place)


def start_output(config: FinetuneConfig, resume: bool) -> None:
    """Makes the folder of a checked run, empty but for its config; one that is continued stays as it is."""
    place = Path(config.output).expanduser()
    if (place / CONFIG).is_file():
        if resume:
            return
        # The config last: what is left of an interrupted removal is a run still.
        for name in (*ARMS, "logs", RESULTS, REPORT, CONFIG):
            path = place / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    place.mkdir(parents=True, exist_ok=True)
    write_whole(place / CONFIG, config.to_yaml())


def _check_same(config: FinetuneConfig, place: Path) -> None:
    before = FinetuneConfig.from_file(place / CONFIG).options()
    now = config.options()
    different = [key for key in now if key not in _FREE and now[key] != before[key]]
    if different:
        key = different[0]
        raise OutputError(
            f"The run in {str(place)!r} has another {', '.join(different)} (there {key}: {before[key]!r}, now "
            f"{now[key]!r}), so it cannot be continued; use the same config, or --overwrite."
        )


def write_whole(path: Path, text: str) -> None:
    """Writes a text file so that it is whole or as it was."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes measurements, one JSON object per line."""
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))
