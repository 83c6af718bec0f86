"""``solver-plugins bench``: what solver blocks cost, against the plain layer and the obvious loop."""

import functools
import json
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from solver_plugins.cli.figures import check_figure
from solver_plugins.errors import OptionError

SUITES = ("linear", "conv", "sampled", "evaluation", "iterations", "sweep")


def bench(
    suite: Annotated[list[str] | None, typer.Option(help=f"What to measure (repeatable): {', '.join(SUITES)}.")] = None,
    iters: Annotated[int, typer.Option(min=2, help="Proximal steps.")] = 10,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds in which all ways take turns; the best counts.")] = 7,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch.")] = 2,
    filter: Annotated[str | None, typer.Option(help="Only layers whose title contains this.")] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(help="Only this way (repeatable), beside the plain layer and the loop: auto, masked, ..."),
    ] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="Also torch.compile the loop and the block.")] = False,
    cpu_time: Annotated[
        bool, typer.Option("--cpu-time", help="Seconds of the processor, not of the wall: for a busy machine.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Also write all numbers as JSON.")] = None,
    figure: Annotated[Path | None, typer.Option(help="Also draw the ratios (.png, .pdf, .svg).")] = None,
) -> None:
    """Measures solver blocks in one run and prints Markdown tables of ratios to the plain layer."""
    wanted = tuple(suite or SUITES[:4])
    unknown = [name for name in wanted if name not in SUITES]
    if unknown:
        raise OptionError(f"Expected --suite to be one of {', '.join(SUITES)}; found {unknown[0]!r}.")
    if figure is not None:
        check_figure(figure)
    if output is not None and not output.parent.is_dir():
        raise OptionError(f"Expected an existing folder for the numbers; {str(output.parent)!r} is none.")

    import torch

    from solver_plugins.cli import measure as m

    known: dict[str, tuple[Any, Any]] = {
        "linear": (m.CASES, functools.partial(m.variants, compiled=compiled)),
        "conv": (m.CONVOLUTIONS, functools.partial(m.variants, compiled=compiled)),
        "sampled": (m.CASES[:4], m.sampled_variants),
        "evaluation": (m.CASES[:4], None),
        "iterations": (m.CASES[:1], m.variants),
        "sweep": (m.SWEEP, m.two_variants),
    }
    clock = time.process_time if cpu_time else time.perf_counter
    chosen = {name: [case for case in known[name][0] if filter is None or filter in case.title] for name in wanted}
    if not any(chosen.values()):
        raise OptionError(f"No layer of {', '.join(wanted)} has {filter!r} in its title.")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    found: dict[str, list[m.Row]] = {}
    try:
        for name, cases in chosen.items():
            rounds = (3, 10, 30) if name == "iterations" else (iters,)
            found[name] = []
            for count in rounds:
                given: dict[str, Any] = {"iterations": count, "repeats": repeats, "clock": clock}
                given |= {} if known[name][1] is None else {"only": variant}
                make = known[name][1]
                rows = m.measure_evaluation(cases, **given) if make is None else m.measure(cases, make, **given)
                found[name] += rows
            if found[name]:
                typer.echo(f"### {name}\n\n{m.table(found[name])}\n")
    finally:
        torch.set_num_threads(before)
    about = {
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "threads": threads,
        "repeats": repeats,
        "clock": "processor" if cpu_time else "wall",
    }
    if output is not None:
        data = {**about, "suites": {name: [row.as_dict() for row in rows] for name, rows in found.items()}}
        partial = output.with_name(f".{output.name}.{os.getpid()}")
        partial.write_text(json.dumps(data, indent=1).replace("NaN", "null"), encoding="utf-8")
        partial.replace(output)
    if figure is not None:
        from solver_plugins.cli.figures import draw_bench

        draw_bench([row for rows in found.values() for row in rows], figure)
