"""What solver blocks cost, against the plain layer and the obvious loop: Markdown tables of ratios.

python -m tests.benchmarks.solver_blocks --threads 2 --repeats 9 --output bench.json --figure bench.png
python -m tests.benchmarks.solver_blocks --suite torchdeq     # beside torchdeq's fixed-point iteration of the map
"""

import argparse
import functools
import json
import math
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter
from torch import Tensor, nn
from torch.nn import functional
from torchdeq import get_deq

from solver_plugins.cli.figures import check_figure
from solver_plugins.errors import OptionError
from solver_plugins.operators import operator_for
from solver_plugins.studies.figures import COLOURS, legend, new_figure, save_figure
from tests.arguments import at_least
from tests.benchmarks import measure as m

SUITES = ("linear", "conv", "sampled", "evaluation", "iterations", "sweep", "torchdeq")
USUAL = SUITES[:4]
HATCHES = ("", "//", "xx")
"""Once all colours are taken."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the suites in one run and prints their tables."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        _run(options)
    except OptionError as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", action="append", choices=SUITES, help="what to measure (repeatable)")
    parser.add_argument("--iters", type=at_least(2), default=10, help="proximal steps")
    parser.add_argument("--repeats", type=at_least(1), default=7, help="rounds in which all ways take turns")
    parser.add_argument("--threads", type=at_least(1), default=2, help="threads of torch")
    parser.add_argument("--filter", default="", help="only layers whose title contains this")
    parser.add_argument(
        "--variant", action="append", help="only this way (repeatable), beside the plain layer and the loop: auto, ..."
    )
    parser.add_argument("--compile", action="store_true", help="also torch.compile the loop and the block")
    parser.add_argument("--cpu-time", action="store_true", help="seconds of the processor, for a busy machine")
    parser.add_argument("--output", type=Path, help="also write all numbers as JSON")
    parser.add_argument("--figure", type=Path, help="also draw the ratios (.png, .pdf, .svg)")
    return parser


def _run(options: argparse.Namespace) -> None:
    wanted = options.suite or USUAL
    if options.figure is not None:
        check_figure(options.figure)
    if options.output is not None and not options.output.parent.is_dir():
        raise OptionError(
            f"Expected an existing folder for the numbers; {str(options.output.parent)!r} does not exist."
        )
    known: dict[str, tuple[Sequence[m.Case], Any]] = {
        "linear": (m.CASES, functools.partial(m.variants, compiled=options.compile)),
        "conv": (m.CONVOLUTIONS, functools.partial(m.variants, compiled=options.compile)),
        "sampled": (m.CASES[:4], m.sampled_variants),
        "evaluation": (m.CASES[:4], None),
        "iterations": (m.CASES[:1], m.variants),
        "sweep": (m.SWEEP, m.two_variants),
        "torchdeq": (m.CASES, with_torchdeq),
    }
    chosen = {name: [case for case in known[name][0] if options.filter in case.title] for name in wanted}
    if not any(chosen.values()):
        raise OptionError(f"No layer of {', '.join(wanted)} has {options.filter!r} in its title.")
    timing = {"repeats": options.repeats, "clock": time.process_time if options.cpu_time else time.perf_counter}
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    found: dict[str, list[m.Row]] = {}
    try:
        for name, cases in chosen.items():
            make, found[name] = known[name][1], []
            for count in (3, 10, 30) if name == "iterations" else (options.iters,):
                if make is None:
                    found[name] += m.measure_evaluation(cases, iterations=count, **timing)
                else:
                    found[name] += m.measure(cases, make, iterations=count, only=options.variant, **timing)
            if found[name]:
                print(f"### {name}\n\n{m.table(found[name])}\n")
    finally:
        torch.set_num_threads(before)
    if options.output is not None:
        about = {
            "date": datetime.now(UTC).date().isoformat(),
            "torch": torch.__version__,
            "threads": options.threads,
            "repeats": options.repeats,
            "clock": "processor" if options.cpu_time else "wall",
        }
        data = {**about, "suites": {name: [row.as_dict() for row in rows] for name, rows in found.items()}}
        options.output.write_text(json.dumps(data, indent=1).replace("NaN", "null"), encoding="utf-8")
    if options.figure is not None:
        draw(found, options.figure)


def with_torchdeq(case: m.Case, layer: nn.Module, shape: torch.Size, iterations: int) -> dict[str, m.Call]:
    """Adds ``v <- relu(v) - H relu(v) + c`` by torchdeq, with its implicit gradient of as many steps."""
    constant = m.constant_of(layer)
    deq = get_deq(
        f_solver="fixed_point_iter", b_solver="fixed_point_iter", f_max_iter=iterations - 1, b_max_iter=iterations - 1,
        f_tol=0.0, b_tol=0.0, ift=True, no_stat=True,
    )  # fmt: skip

    def solve(u: Tensor) -> Tensor:
        A, c = operator_for(layer, shape), layer(u)

        def image(v: Tensor) -> Tensor:
            x = functional.relu(v)
            return x - (A.apply(A.adjoint(x)) + m.LAM * x) / constant + c

        return deq(image, c)[0][-1]

    calls = m.variants(case, layer, shape, iterations)
    return {"plain": calls.pop("plain"), "loop": calls.pop("loop"), "torchdeq": solve, **calls}


def draw(found: dict[str, list[m.Row]], path: Path) -> None:
    """Draws forward and backward of every layer and way in units of the plain layer, on a logarithmic axis."""
    groups: dict[str, list[m.Row]] = {}
    for suite, rows in found.items():
        for row in (row for row in rows if not math.isnan(row.both)):
            title = f"{row.case}\nbatch {row.batch}, T = {row.iterations}{f', {suite}' if len(found) > 1 else ''}"
            groups.setdefault(title, []).append(row)
    names = list(dict.fromkeys(row.variant for members in groups.values() for row in members[1:]))
    figure, ((axes,),) = new_figure(1, 1, width=max(7.0, 2 + 1.6 * len(groups)), height=5)
    width = 0.8 / max(1, len(names))
    for place, name in enumerate(names):
        points = [
            (group + (place - (len(names) - 1) / 2) * width, row.both / members[0].both)
            for group, members in enumerate(groups.values())
            for row in members[1:]
            if row.variant == name
        ]
        places, heights = zip(*points, strict=True)
        axes.bar(
            places,
            heights,
            width=width,
            label=name,
            color=COLOURS[place % len(COLOURS)],
            hatch=HATCHES[place // len(COLOURS)],
        )
    for at, members in enumerate(groups.values()):
        axes.plot([at - 0.45, at + 0.45], [members[0].counted] * 2, color="#000000", linewidth=1, linestyle=":")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(axis="x", visible=False)
    axes.set_xticks(range(len(groups)), list(groups), fontsize=8)
    axes.set_ylabel("forward + backward, in units of the plain layer")
    axes.set_title("Solver blocks; dotted: multiply-adds of the cheapest exact path", loc="left", fontsize=11)
    legend(axes, outside=True)
    save_figure(figure, path)


if __name__ == "__main__":
    main()
