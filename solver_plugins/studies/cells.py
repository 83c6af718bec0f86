"""The folder of a study's run: its identity, and the results of its cells, one file each.

A cell's file appears, complete, when the cell is done; a killed run continues with the next cell. Several processes
take cells from the same folder: a process claims a cell by a file that only one process can create.
"""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from solver_plugins.config import load_yaml
from solver_plugins.errors import SolverPluginsError
from solver_plugins.studies.study import Cell, Measured, StudyConfig
from solver_plugins.train.errors import OutputError
from solver_plugins.train.outputs import check_same, holds_run, remove_run, whole_file, write_whole

STUDY = "study.yaml"
CELLS = "cells"
METRICS = "metrics.json"
TABLE = "table.md"
FIGURE = "figure.png"
_STOP = ".stop"
_ADVICE = "choose another --output, or replace it with --overwrite"


class CellError(SolverPluginsError, RuntimeError):
    """A cell whose result cannot be written down or read back."""


class RunFolder:
    """The results of one study with one config.

    Args:
        place: The folder.
    """

    def __init__(self, place: Path):
        self.place = place

    def open(self, study: str, scale: str, config: StudyConfig, overwrite: bool) -> None:
        """Makes the folder, or checks that it holds a run of the same study and config; call it in one process.

        Raises:
            OutputError: If it holds something else, or cannot be created, read or written.
        """
        try:
            self._open(study, scale, config, overwrite)
        except OSError as error:
            raise OutputError(
                f"Expected an output folder that can be made and written to; found {str(self.place)!r} "
                f"({error.strerror or error}): choose another with --output."
            ) from error

    def _open(self, study: str, scale: str, config: StudyConfig, overwrite: bool) -> None:
        place = self.place
        if holds_run(place, STUDY, "a study", "with --output"):
            if overwrite:
                remove_run(place, CELLS, METRICS, TABLE, FIGURE, STUDY)
            else:
                self._check_same(study, config)
        (place / CELLS).mkdir(parents=True, exist_ok=True)
        # Claims of processes that were killed.
        for path in (place / CELLS).glob(".*"):
            path.unlink()
        identity = {"study": study, "scale": scale, "config": config.options()}
        if not (place / STUDY).is_file():
            write_whole(place / STUDY, yaml.safe_dump(identity, sort_keys=False))

    def _check_same(self, study: str, config: StudyConfig) -> None:
        try:
            before = load_yaml((self.place / STUDY).read_text(encoding="utf-8"))
            other, options = before["study"], dict(before["config"])
        except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
            found = f"{type(error).__name__}: {error}"
            raise OutputError(f"Cannot read {str(self.place / STUDY)!r} ({found}): {_ADVICE}.") from None
        if other != study:
            raise OutputError(f"The output folder {str(self.place)!r} holds a run of the study {other!r}: {_ADVICE}.")
        check_same(self.place, options, config.options(), _ADVICE)

    @property
    def cells(self) -> Path:
        """The folder of the cells' results, and of files that they keep for later stages."""
        return self.place / CELLS

    def is_done(self, cell: Cell) -> bool:
        """Whether a cell has been measured."""
        return self._file(cell).is_file()

    def claim(self, cell: Cell) -> bool:
        """Claims a cell for this process; False if it is done, claimed by another process, or the run has stopped."""
        if self.is_done(cell) or (self.place / CELLS / _STOP).exists():
            return False
        try:
            self._claim(cell).open("x").close()
        except FileExistsError:
            return False
        if self.is_done(cell):
            # Another process finished it between the first check and the claim.
            self._claim(cell).unlink()
            return False
        return True

    def stop(self) -> None:
        """Keeps all processes from beginning another cell."""
        with contextlib.suppress(OSError):
            (self.place / CELLS / _STOP).touch()

    def save(self, measured: Measured) -> None:
        """Writes the result of a cell.

        Raises:
            CellError: If JSON cannot hold it; NaN, for instance.
        """
        cell = measured.cell
        content = {
            "arm": cell.arm, "seed": cell.seed, "setting": dict(cell.setting), "values": measured.values,
            "seconds": round(measured.seconds, 3), "cpu_seconds": round(measured.cpu_seconds, 3),
        }  # fmt: skip
        try:
            text = json.dumps(content, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise CellError(f"The result of the cell {cell.name} cannot be written as JSON: {error}.") from error
        write_whole(self._file(cell), text)
        self._claim(cell).unlink(missing_ok=True)

    def load(self, cell: Cell) -> Measured:
        """Reads the result of a cell.

        Raises:
            CellError: If it is missing or damaged.
        """
        path = self._file(cell)
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return Measured(cell, found["values"], found["seconds"], found["cpu_seconds"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CellError(
                f"Cannot read the result {str(path)!r} ({type(error).__name__}: {error}). Delete it and run the study "
                "again; processes on several machines need a folder that all of them see."
            ) from None

    def write(self, name: str, text: str) -> None:
        """Writes a text file of the report."""
        write_whole(self.place / name, text)

    def write_file(self, name: str, make: Callable[[Path], None]) -> None:
        """Lets ``make`` write a file of the report, whole or not at all."""
        with whole_file(self.place / name) as partial:
            make(partial)

    def _claim(self, cell: Cell) -> Path:
        return self.place / CELLS / f".{cell.name}.claim"

    def _file(self, cell: Cell) -> Path:
        return self.place / CELLS / f"{cell.name}.json"
