"""The output folder of a run: its files, and the checks before anything is written to it."""

import contextlib
import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from solver_plugins.train.config import FinetuneConfig
from solver_plugins.train.errors import OutputError

CONFIG = "config.yaml"
DATA = "data.json"
RESULTS = "results.json"
REPORT = "report.html"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
MODEL = "model"
BASE = "base"
ADAPTER = "adapter"
RESULT = "result.json"
BEST = "best.safetensors"
LOCK = "run.lock"
ARMS = ("solver", "baseline", "plain")
"""The folders of the models that a run trains."""
_FREE = {"output", "trackers", "checkpoints", "seeds"}
"""What may differ between a run and its continuation."""


def check_output(config: FinetuneConfig, resume: bool, overwrite: bool) -> None:
    """Raises OutputError unless the output folder is free, may be replaced, or holds the run to continue."""
    place = Path(config.output).expanduser()
    if not holds_run(place, CONFIG, "finetune", "output="):
        return
    check_unlocked(place / LOCK)
    if not (resume or overwrite):
        raise OutputError(
            f"The output folder {str(place)!r} already holds a run: continue it with --resume, replace it with "
            "--overwrite, or choose another output=."
        )
    if resume:
        before, now = FinetuneConfig.from_file(place / CONFIG).options(), config.options()
        if config.epochs > before["epochs"]:
            # A run may go on for longer than it was planned for.
            before["epochs"] = config.epochs
        kept = [key for key in now if key not in _FREE]
        advice = "use the config it was started with, or replace the run with --overwrite"
        check_same(place, {key: before[key] for key in kept}, {key: now[key] for key in kept}, advice)


def holds_run(place: Path, marker: str, command: str, option: str) -> bool:
    """Whether a folder holds a run of a command (recognised by a marker file); OutputError if it holds other things."""
    if place.exists() and not place.is_dir():
        raise OutputError(f"Expected a folder for the output; {str(place)!r} is a file.")
    held = sorted(path.name for path in place.iterdir() if path.name != LOCK) if place.is_dir() else []
    if held and marker not in held:
        raise OutputError(
            f"The output folder {str(place)!r} holds {', '.join(held[:5])}, which is not a run of {command}: choose "
            f"another {option}."
        )
    return bool(held)


def check_same(place: Path, before: dict[str, Any], now: dict[str, Any], advice: str) -> None:
    """Raises OutputError, with this advice, unless the run in a folder has the options of the one to continue it."""
    different = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    if different:
        told = "; ".join(f"{key} was {_short(before.get(key))} and is now {_short(now.get(key))}" for key in different)
        raise OutputError(f"The run in {str(place)!r} was started with other options ({told}), so it cannot be "
                          f"continued: {advice}.")  # fmt: skip


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def remove_run(place: Path, *names: str) -> None:
    """Removes files of a run. Name the marker last: if the removal is interrupted, the rest still counts as a run."""
    for path in (place / name for name in names):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def check_data(config: FinetuneConfig, data: dict[str, Any]) -> None:
    """Raises OutputError unless a continued run has the examples that it began with."""
    place = Path(config.output).expanduser()
    try:
        before = json.loads((place / DATA).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        # The run had not begun.
        return
    different = [key for key in data if data[key] != before.get(key)]
    if different:
        told = ", ".join(f"{key} {before.get(key)} there, {data[key]} now" for key in different if key != "labels")
        raise OutputError(
            f"The run in {str(place)!r} was begun with other examples ({told or 'their labels differ'}), so it cannot "
            "be continued; restore the data, or use --overwrite."
        )


def start_output(config: FinetuneConfig, resume: bool, data: dict[str, Any]) -> None:
    """Makes and locks the output folder, with the config and the data's identity; keeps a run to continue."""
    place = Path(config.output).expanduser()
    try:
        place.mkdir(parents=True, exist_ok=True)
        lock(place / LOCK)
    except OSError as error:
        raise OutputError(f"Cannot write to the output folder {str(place)!r}: {error.strerror}.") from None
    if (place / CONFIG).is_file():
        if resume:
            write_whole(place / CONFIG, config.to_yaml())
            if not (place / DATA).is_file():
                # The run was killed between writing the two files.
                write_whole(place / DATA, json.dumps(data))
            return
        remove_run(place, *ARMS, "logs", RESULTS, REPORT, DATA, CONFIG)
    write_whole(place / CONFIG, config.to_yaml())
    write_whole(place / DATA, json.dumps(data))


def check_unlocked(path: Path) -> None:
    """Raises OutputError if a living process holds a lock, or one on another machine may."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        pid, host, started = int(held["pid"]), str(held["host"]), float(held["started"])
    except (OSError, ValueError, KeyError, TypeError):
        return
    if host != socket.gethostname():
        raise OutputError(
            f"Process {pid} on {host!r} is working in {str(path.parent)!r}. If it has ended, remove {str(path)!r}."
        )
    # A number that was given to a newer process does not hold the lock.
    alive = psutil.pid_exists(pid) and abs(psutil.Process(pid).create_time() - started) < 1
    if alive and pid != os.getpid():
        raise OutputError(
            f"Process {pid} is working in {str(path.parent)!r}: wait until it has ended, stop it, or choose another "
            "output=."
        )


def lock(path: Path) -> None:
    """Writes down that this process works in a folder; raises as :func:`check_unlocked`."""
    check_unlocked(path)
    own = {"pid": os.getpid(), "host": socket.gethostname(), "started": psutil.Process().create_time()}
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    try:
        with path.open("x", encoding="utf-8") as file:
            json.dump(own, file)
    except FileExistsError:
        check_unlocked(path)
        raise OutputError(f"Another process has just begun to work in {str(path.parent)!r}.") from None


def unlock(path: Path) -> None:
    """Removes the lock of this process, if it holds it."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        if json.loads(path.read_text(encoding="utf-8"))["pid"] == os.getpid():
            path.unlink()


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yields a temporary path that replaces the file once it is written, so the file is complete or unchanged."""
    # With the same ending, which tells some writers the format.
    partial = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Writes a text file so that it is complete or unchanged, even if the machine stops."""
    with whole_file(path) as partial, partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes measurements, one JSON object per line."""
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))
