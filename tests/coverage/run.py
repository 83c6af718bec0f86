"""Runs checks in worker processes, and writes each result down as it comes.

A worker that crashes, runs out of memory or takes too long leaves one row with a failure and is replaced. Results are
lines of JSON, appended one at a time; a later line about a model replaces an earlier one.
"""

import contextlib
import datetime
import fcntl
import importlib
import importlib.metadata
import json
import multiprocessing
import os
import pathlib
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from tqdm import tqdm

from tests.coverage.checks import check
from tests.coverage.result import Row

RECYCLE = 3 << 30
"""A worker that holds more memory than this between two models is replaced."""
_POLL = 0.5


class Task(NamedTuple):
    """A model to check: library, name and family."""

    library: str
    name: str
    family: str


@dataclass(frozen=True)
class Limits:
    """What a model may take.

    Attributes:
        seconds: Until its worker is stopped.
        memory: Bytes of a worker, likewise.
    """

    seconds: float = 1800.0
    memory: int = 9 << 30


def run_task(task: Task, known: Mapping[str, str] | None = None) -> Row:
    """Checks one model in this process; ``known`` are names of checked models by their network."""
    # Only the library that is needed: each takes seconds to import.
    cases = importlib.import_module(f"tests.coverage.{task.library}_models")
    return check(lambda: cases.case(task.name, task.family), *task, known)


def done(path: pathlib.Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Returns the results that a file holds, the latest of each model."""
    rows = {}
    if path.exists():
        for line in path.read_text().splitlines():
            # A crash may have cut a line off.
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                rows[row["library"], row["name"]] = row
    return rows


def append(path: pathlib.Path, row: dict[str, Any]) -> None:
    """Appends one result as a line of its own, also if the last line was cut off."""
    with path.open("ab+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 1, 0))
        whole = file.read() in (b"", b"\n")
        file.write((b"" if whole else b"\n") + json.dumps(row).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def versions() -> dict[str, str]:
    """Returns the versions of the libraries that results depend on."""
    return {name: importlib.metadata.version(name) for name in ("torch", "timm", "transformers")}


def when_and_with_what(rows: Sequence[dict[str, Any]]) -> tuple[dict[str, str], str]:
    """Returns the versions and the dates of results, all of them if they differ."""
    used: dict[str, set[str]] = {}
    for row in rows:
        for name, version in row.get("versions", {}).items():
            used.setdefault(name, set()).add(version)
    dates = sorted({row["date"] for row in rows if "date" in row})
    span = " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else ""
    return {name: " and ".join(sorted(found)) for name, found in used.items()}, span


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)


def failed(row: dict[str, Any]) -> bool:
    """Whether a result needs another look."""
    return bool(row["failures"] or row["foreign"])


def run(tasks: Sequence[Task], path: pathlib.Path, workers: int, limits: Limits | None = None) -> None:
    """Checks models and appends the results to a file, with a progress bar.

    Args:
        tasks: The models, in order.
        path: Where results are appended.
        workers: How many processes.
        limits: What one model may take.
    """
    limits, made_with = limits or Limits(), versions()
    queue, lock = iter(tasks), threading.Lock()
    originals = {row["network"]: row for row in done(path).values() if _serves_others(row)}
    with tqdm(total=len(tasks), unit="model", smoothing=0.05) as bar:
        bad = 0
        errors: list[BaseException] = []

        def serve() -> None:
            nonlocal bad
            worker = _Worker()
            try:
                while True:
                    with lock:
                        task = next(queue, None)
                    if task is None:
                        return
                    row = _checked(worker, task, limits, originals)
                    row |= {"date": datetime.date.today().isoformat(), "versions": made_with}
                    with lock:
                        append(path, row)
                        if _serves_others(row):
                            originals[row["network"]] = row
                        bad += failed(row)
                        bar.set_postfix_str(f"{bad} to look at, last {task.name}")
                        bar.update()
            except BaseException as error:
                # An error of the run itself, such as a full disk: raised once all threads have stopped.
                errors.append(error)
            finally:
                worker.stop()

        threads = [threading.Thread(target=serve, daemon=True) for _ in range(min(workers, len(tasks)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(1.0)
    if errors:
        raise errors[0]


def _serves_others(row: dict[str, Any]) -> bool:
    """Whether the results of a model also serve for other models that are the same network."""
    return bool(row.get("network")) and not row.get("same_as") and not failed(row)


def _checked(worker: "_Worker", task: Task, limits: Limits, originals: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Checks one model, or walks it and takes over the results of a model that is the same network."""
    row = worker.check(task, limits, {network: one["name"] for network, one in list(originals.items())})
    if row["same_as"] is None:
        return row
    original = originals[row["network"]]
    if failed(row) or any(row[key] != original[key] for key in ("parameters", "input", "layers", "blocks", "left")):
        # Then they are not the same, whatever the hash says.
        return worker.check(task, limits, {})
    return row | {"passed": original["passed"], "errors": original["errors"]}


class _Worker:
    """A process that checks models one after the other."""

    def __init__(self) -> None:
        self.process: Any = None
        self.pipe: Connection | None = None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other,), daemon=True)
        self.process.start()
        other.close()

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
        self.process = None

    def check(self, task: Task, limits: Limits, known: Mapping[str, str]) -> dict[str, Any]:
        if self.process is None or not self.process.is_alive() or _memory(self.process.pid) > RECYCLE:
            self.stop()
            self._start()
        assert self.pipe is not None
        row = Row(*task)
        start = time.perf_counter()
        why, sent = "", False
        while not why:
            try:
                if not sent:
                    self.pipe.send((task, known))
                    sent = True
                if self.pipe.poll(_POLL):
                    made: dict[str, Any] = self.pipe.recv()
                    return made
            except (EOFError, ConnectionError):
                self.process.join()
                why = f"the worker ended with exit code {self.process.exitcode}"
                if self.process.exitcode == -9:
                    why += ": killed, as when the machine is out of memory"
            if not why and time.perf_counter() - start > limits.seconds:
                why = f"took more than {limits.seconds:g} seconds"
            memory = 0 if why else _memory(self.process.pid)
            if memory > limits.memory:
                why = f"took {memory / 2**30:.1f} GB, above the limit of {limits.memory / 2**30:g} GB"
        self.stop()
        row.failures["worker"] = why
        row.wall_seconds = round(time.perf_counter() - start, 2)
        return row.to_dict()


def _memory(pid: int | None) -> int:
    """Returns the resident memory of a process in bytes, or zero if the system does not tell."""
    try:
        return int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _serve(pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            task, known = pipe.recv()
        except EOFError:
            return
        pipe.send(run_task(Task(*task), known).to_dict())


def still_to_do(tasks: Iterable[Task], path: pathlib.Path, retry_failed: bool) -> list[Task]:
    """Returns the tasks without a result, and with ``retry_failed`` those that failed."""
    rows = done(path)
    return [
        task for task in tasks if (row := rows.get((task.library, task.name))) is None or (retry_failed and failed(row))
    ]
