"""Checkpoints that are complete or absent: written to the side, checksummed, flushed, renamed; checked when loaded."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from solver_plugins.train.errors import CheckpointError, summary_of
from solver_plugins.train.pickles import check_is_data

MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{8})")


class Checkpoints:
    """The checkpoints of one arm."""

    def __init__(self, folder: Path, keep: int, accelerator: Accelerator):
        self.folder, self.keep, self.accelerator = folder, keep, accelerator

    def found(self) -> list[Path]:
        """Returns all checkpoints, newest first, intact or not."""
        if not self.folder.is_dir():
            return []
        return sorted((path for path in self.folder.iterdir() if _NAME.fullmatch(path.name)), reverse=True)

    def save(self, step: int) -> Path:
        """Saves the state of all processes; call it in all of them.

        Raises:
            CheckpointError: If it cannot be written. Earlier checkpoints stay as they were.
        """
        place = self.folder / f"step-{step:08d}"
        aside = self.folder / f".{place.name}.new"
        main = self.accelerator.is_main_process
        try:
            if main:
                self.sweep()
                aside.mkdir(parents=True)
            self.accelerator.wait_for_everyone()
            self.accelerator.save_state(str(aside))
            self.accelerator.wait_for_everyone()
            if main:
                self._finish(aside, place, step)
        except Exception as error:
            shutil.rmtree(aside, ignore_errors=True)
            kept = next((f"The one before is kept: {path}." for path in self.found()), "There is none before it.")
            raise CheckpointError(
                f"Cannot write the checkpoint of step {step} to {str(self.folder)!r}: {summary_of(error)} {kept} Make "
                "room, then continue with --resume."
            ) from error
        self.accelerator.wait_for_everyone()
        return place

    def _finish(self, aside: Path, place: Path, step: int) -> None:
        sums = {
            str(path.relative_to(aside)): {"size": path.stat().st_size, "sha256": _sum(path)} for path in _files(aside)
        }
        data = {"step": step, "processes": self.accelerator.num_processes, "files": sums}
        (aside / MANIFEST).write_text(json.dumps(data, indent=1), encoding="utf-8")
        for path in _files(aside):
            _flush(path)
        _flush(aside)
        if place.exists():
            # A damaged checkpoint of the same step, which this run did not continue from.
            _remove(place)
        os.rename(aside, place)
        _flush(self.folder)
        for old in self.found()[self.keep :]:
            _remove(old)

    def sweep(self) -> None:
        """Removes what interrupted saves and removals left behind."""
        if self.folder.is_dir():
            for path in self.folder.glob(".step-*"):
                shutil.rmtree(path)

    def newest_whole(self) -> tuple[Path | None, list[str]]:
        """Returns the newest intact checkpoint, and what is wrong with any newer ones."""
        wrong: list[str] = []
        for path in self.found():
            try:
                check(path, self.accelerator.num_processes)
            except DamagedError as error:
                wrong.append(f"{path.name} is damaged ({error})")
            else:
                return path, wrong
        if wrong:
            raise CheckpointError(
                f"No checkpoint in {str(self.folder)!r} can be continued from: {'; '.join(wrong)}. Start over with "
                "--overwrite."
            )
        return None, wrong

    def load(self, path: Path) -> None:
        """Loads a checkpoint that has been checked; call it in all processes.

        Raises:
            CheckpointError: If it belongs to another model or optimiser.
        """
        try:
            self.accelerator.load_state(str(path))
        except (RuntimeError, KeyError, ValueError) as error:
            raise CheckpointError(f"{str(path)!r} is not a checkpoint of this run: {summary_of(error)}") from error


class DamagedError(Exception):
    """A checkpoint that is not as it was written; the message says why."""


def check(path: Path, processes: int) -> None:
    """Checks every file of a checkpoint against its manifest, and that none would run code when it is loaded."""
    try:
        data: Any = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        expected = {str(name): (int(one["size"]), str(one["sha256"])) for name, one in data["files"].items()}
        written_by = int(data["processes"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"its {MANIFEST} cannot be read: {type(error).__name__}") from None
    there = {str(file.relative_to(path)): file for file in _files(path) if file.name != MANIFEST}
    if there.keys() != expected.keys():
        odd = sorted(there.keys() ^ expected.keys())[0]
        raise DamagedError(f"{odd} is {'missing' if odd in expected else 'not part of it'}")
    for name, file in there.items():
        size, total = expected[name]
        if file.stat().st_size != size:
            raise DamagedError(f"{name} has {file.stat().st_size} bytes instead of {size}")
        if _sum(file) != total:
            raise DamagedError(f"the checksum of {name} differs")
        try:
            check_is_data(file)
        except Exception as error:
            raise DamagedError(f"{name} does not load as data alone: {type(error).__name__}") from None
    if written_by != processes:
        raise CheckpointError(
            f"{path.name} was written by {written_by} processes, and there are {processes} now: continue with the same "
            "number."
        )


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    """Removes a checkpoint; a half-removed one no longer looks like a checkpoint."""
    gone = path.with_name(f".{path.name}.old")
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(path, gone)
    shutil.rmtree(gone)
