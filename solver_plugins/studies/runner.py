"""Runs a study: measures every cell that is not done yet, then writes tables, figure and ``metrics.json``.

A cell's file appears, complete, when the cell is done; a killed run continues with the next cell. Several processes
take cells from the same folder: a process claims a cell by a file that only one process can create.
"""

import contextlib
import json
import platform
import shlex
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from tqdm.auto import tqdm

from solver_plugins.config import load_yaml
from solver_plugins.errors import OptionError, SolverPluginsError
from solver_plugins.studies.figures import save_figure
from solver_plugins.studies.study import STUDIES, Cell, Context, Measured, Results, Study, StudyConfig, Table
from solver_plugins.studies.team import Team
from solver_plugins.train.errors import OutputError
from solver_plugins.train.outputs import check_same, holds_run, remove_run, whole_file, write_whole
from solver_plugins.train.randomness import seeded

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
    """The results of one study with one config, in a folder."""

    def __init__(self, place: Path):
        self.place = place

    def open(self, study: str, scale: str, config: StudyConfig, overwrite: bool) -> None:
        """Makes the folder, or checks that it holds a run of the same study and config; call it in one process."""
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
        """Writes the result of a cell; CellError if JSON cannot hold it (NaN, for instance)."""
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
        """Reads the result of a cell; CellError if it is missing or damaged."""
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
        write_whole(self.place / name, text)

    def write_file(self, name: str, make: Callable[[Path], None]) -> None:
        """Lets ``make`` write a file of the report, whole or not at all."""
        with whole_file(self.place / name) as partial:
            make(partial)

    def _claim(self, cell: Cell) -> Path:
        return self.place / CELLS / f".{cell.name}.claim"

    def _file(self, cell: Cell) -> Path:
        return self.place / CELLS / f"{cell.name}.json"


@dataclass(frozen=True)
class StudyOutcome:
    """What a run leaves behind: the folder with all of its files, the tables, and what is in ``metrics.json``."""

    folder: Path
    tables: list[Table]
    metrics: dict[str, Any]


def run_study(
    name: str,
    config: StudyConfig,
    output: str | Path,
    *,
    scale: str = "own",
    overwrite: bool = False,
    command: str | None = None,
) -> StudyOutcome:
    """Runs a study, or the rest of it; call it in every process of a launch.

    Args:
        name: The study.
        config: Its settings; see :func:`read_study_config`.
        output: The folder. A run of the same study and config in it is continued.
        scale: The name of the settings in the report.
        overwrite: Whether to replace another run in that folder.
        command: How the study was started, for the report.
    """
    study = STUDIES.get(name)(config)
    stages = study.stages()
    _check_cells(study, stages)
    folder = RunFolder(Path(output).expanduser())
    with Team() as team:
        # Before the folder is made, so that a mistake in the config leaves nothing behind.
        team.every(study.prepare)
        team.first(lambda: folder.open(name, scale, config, overwrite))
        results = Results()
        for stage in stages:
            team.every(partial(_measure, study, stage, results, folder, team))
            results = Results([*results, *(folder.load(cell) for cell in stage)])
        metrics = _metrics(study, scale, results, team)
        tables = study.tables(results)

        def report() -> None:
            figure = study.draw(results)
            folder.write_file(FIGURE, lambda path: save_figure(figure, path))
            folder.write(TABLE, page(study, tables, metrics, command))
            # Written last: if it exists, so do the others.
            folder.write(METRICS, json.dumps(metrics, indent=2, allow_nan=False) + "\n")

        team.first(report)
    return StudyOutcome(folder.place, tables, metrics)


def _check_cells(study: Study[Any], stages: list[list[Cell]]) -> None:
    names = [cell.name for stage in stages for cell in stage]
    if not names:
        raise OptionError(f"The study {study.name!r} has nothing to measure with these settings.")
    twice = sorted({one for one in names if names.count(one) > 1})
    if twice:
        raise OptionError(f"The study {study.name!r} would measure {twice[0]} twice; give each value once.")


def _measure(study: Study[Any], stage: list[Cell], earlier: Results, folder: RunFolder, team: Team) -> None:
    """Measures the cells of a stage that are not done yet."""
    talks = team.index == 0
    everything = [cell for one in study.stages() for cell in one]
    with tqdm(total=len(everything), desc=study.name, unit="cell", disable=None if talks else True) as bar:
        for cell in (*stage, None):
            bar.update(sum(folder.is_done(one) for one in everything) - bar.n if talks else 0)
            if cell is None or not folder.claim(cell):
                continue
            try:
                folder.save(_run_cell(study, cell, team.device, talks, earlier, folder.cells))
            except BaseException:
                # Also if interrupted: no process should begin another cell.
                folder.stop()
                raise


def _run_cell(
    study: Study[Any], cell: Cell, device: torch.device, talks: bool, earlier: Results, place: Path
) -> Measured:
    def steps(count: int) -> Iterable[int]:
        shown: Iterable[int] = tqdm(range(count), desc=cell.name, leave=False, disable=None if talks else True)
        return shown

    start, cpu = time.perf_counter(), time.process_time()
    with seeded(study.name, cell.seed, devices=device.type == "cuda"):
        values = study.run(cell, Context(steps, device, earlier, place, talks))
    return Measured(cell, values, time.perf_counter() - start, time.process_time() - cpu)


def _metrics(study: Study[Any], scale: str, results: Results, team: Team) -> dict[str, Any]:
    cells = []
    for one in results:
        values = {key: value for key, value in one.values.items() if key != "curves"}
        cells.append({"arm": one.cell.arm, "seed": one.cell.seed, **dict(one.cell.setting), **values})
    return {
        "study": study.name,
        "reference": study.reference,
        "scale": scale,
        "config": study.config.options(),
        "summary": study.summary(results),
        "cells": cells,
        "made": {
            "date": datetime.now(UTC).date().isoformat(),
            "torch": torch.__version__,
            "machine": _processor(),
            "device": team.device.type,
            "threads": torch.get_num_threads(),
            "seconds": {one.cell.name: one.seconds for one in results},
            "cpu_seconds": {one.cell.name: one.cpu_seconds for one in results},
        },
    }


def _processor() -> str:
    """Returns the processor's name, if the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def page(study: Study[Any], tables: list[Table], metrics: dict[str, Any], command: str | None) -> str:
    """Returns the report as Markdown."""
    made = metrics["made"]
    minutes = sum(made["seconds"].values()) / 60
    how = command or f"solver-plugins study run {shlex.quote(study.name)} --scale {metrics['scale']}"
    seeds = ", ".join(str(seed) for seed in study.config.seeds)
    return (
        f"# {study.name}\n\n{study.reference}\n\n"
        + "\n".join(table.markdown() for table in tables)
        + (f"\nOf the settings: {study.config.note}\n" if study.config.note else "")
        + f"\n![{study.name}]({FIGURE})\n\n"
        f"`{how}`, {made['date']}, seeds {seeds}, {minutes:.1f} minutes of cells on {made['threads']} threads "
        f"({made['machine']}, {made['device']}), torch {made['torch']}.\n"
    )
