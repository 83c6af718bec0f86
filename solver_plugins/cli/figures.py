"""The figure of a report."""

import math
from pathlib import Path

from solver_plugins.errors import OptionError
from solver_plugins.integrations.folder import new_file
from solver_plugins.surgery import Report

COLOURS = {
    "dropout-linear-act": "#0072b2",
    "dropout-linear": "#56b4e9",
    "linear-act": "#e69f00",
    "linear-dropout-act": "#cc79a7",
    "linear-norm-act": "#009e73",
    "linear-norm-skip-act": "#d55e00",
    "linear-skip-act": "#7a3e9d",
    "linear": "#444444",
}
"""One colour per pattern, the same in every figure, distinguishable without colour vision (Okabe and Ito)."""
FORMATS = (".png", ".pdf", ".svg")
_MOST_NAMES = 40


def check_figure(path: Path) -> None:
    """Raises OptionError if a figure cannot be written there, before anything is computed."""
    if path.suffix.lower() not in FORMATS:
        raise OptionError(f"Expected a figure as {', '.join(FORMATS)}; found {str(path)!r}.")
    if not path.parent.is_dir():
        raise OptionError(f"Expected an existing folder for the figure; {str(path.parent)!r} is not one.")


def draw_report(report: Report, path: Path, title: str | None = None) -> None:
    """Draws the layers along the depth of the network, and the ``L`` of each block on a logarithmic axis.

    Args:
        report: A report with Lipschitz constants.
        path: The file; its ending says the format.
        title: What the network is called; its class by default.

    Raises:
        OptionError: If the report has no constants, or the path is of another format.
    """
    check_figure(path)
    shown = [row for row in report.converted if row.L is not None and row.L > 0]
    if report.converted and not shown:
        raise OptionError(
            "A figure shows the Lipschitz constants, and this report has none; leave out lipschitz=False."
        )
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    names = [row.name for row in report.rows]
    figure = Figure(figsize=(min(16.0, max(7.0, 3 + 0.16 * len(names))), 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    places = {name: place for place, name in enumerate(names)}
    for pattern in dict.fromkeys(row.pattern for row in shown):
        rows = [row for row in shown if row.pattern == pattern]
        axes.plot(
            [places[row.name] for row in rows],
            [row.L or 0.0 for row in rows],
            "o",
            color=COLOURS.get(pattern, "#000000"),
            label=f"{pattern} ({len(rows)})",
            markersize=6,
        )
    left = [row for row in report.rows if not row.converted]
    values = [row.L for row in shown if row.L is not None]
    low, high = (min(values), max(values)) if values else (1.0, 1.0)
    # At least a decade, so that equal constants look equal.
    middle, half = math.sqrt(low * high), max(0.6, 0.6 * math.log10(high / low))
    low, high = middle * 10**-half, middle * 10**half
    if left:
        # They have no L, and stand in a row of their own at the bottom.
        axes.plot(
            [places[row.name] for row in left],
            [low * 10 ** (0.05 * half)] * len(left),
            "o",
            markerfacecolor="none",
            markeredgecolor="#999999",
            markersize=5,
            label=f"left alone ({len(left)})",
        )
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    # Within two decades there is room to name steps between the powers of ten as well.
    named = (1, 2, 3, 5) if high / low < 100 else (1,)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}" if _leading(value) in named else ""))
    axes.tick_params(axis="y", which="both", labelsize=9)
    axes.set_xlim(-1, max(1, len(names)))
    every = max(1, math.ceil(len(names) / _MOST_NAMES))
    axes.set_xticks(range(0, len(names), every), [_short(name) for name in names[::every]], rotation=90, fontsize=7)
    axes.set_xlabel(f"layer, in the order of the network{f' (every {_ordinal(every)} named)' if every > 1 else ''}")
    axes.set_ylabel(r"$L = \lambda_{\max}(A A^\top)$, certified")
    what = f"{title or report.model}: {len(report.converted)} of {len(report.rows)} layers become {report.solver}"
    axes.set_title(f"{what}, iters={report.options['iters']}", loc="left", fontsize=11)
    axes.grid(axis="y", which="major", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)
    with new_file(path) as made:
        figure.savefig(made, dpi=150)


def _leading(value: float) -> int:
    return round(value / 10 ** math.floor(math.log10(value) + 1e-9))


def _short(name: str, most: int = 32) -> str:
    return name if len(name) <= most else f"…{name[-most + 1 :]}"


def _ordinal(number: int) -> str:
    return f"{number}{ {2: 'nd', 3: 'rd'}.get(number, 'th') }"
