"""Runs a study: measures every cell that is not done yet, then writes tables, figure and ``metrics.json``."""

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
from tqdm.auto import tqdm

from solver_plugins.errors import OptionError
from solver_plugins.studies.cells import FIGURE, METRICS, TABLE, RunFolder
from solver_plugins.studies.figures import save_figure
from solver_plugins.studies.study import STUDIES, Cell, Context, Measured, Results, Study, StudyConfig, Table
from solver_plugins.studies.team import Team
from solver_plugins.train.randomness import seeded


@dataclass(frozen=True)
class StudyOutcome:
    """What a run leaves behind.

    Attributes:
        folder: Where ``metrics.json``, ``table.md``, ``figure.png`` and the cells are.
        tables: The tables.
        metrics: What is in ``metrics.json``.
    """

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

    Raises:
        SolverPluginsError: For every mistake that the user can fix; finished cells are kept.
    """
    study = STUDIES.get(name)(config)
    stages = study.stages()
    _check_cells(study, stages)
    folder = RunFolder(Path(output).expanduser())
    with Team() as team:
        # Before the folder is made, so that a mistake in the config leaves nothing behind.
        team.agree(_attempt(study.prepare))
        team.first(lambda: folder.open(name, scale, config, overwrite))
        results = Results()
        for stage in stages:
            team.agree(_attempt(partial(_measure, study, stage, results, folder, team)))
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


def _attempt(do: Callable[[], None]) -> Exception | None:
    """Returns the error instead of raising it, so that the other processes can be told first."""
    try:
        do()
    except Exception as error:
        return error
    return None


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
