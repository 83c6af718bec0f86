"""The figure of a report."""

import math
from pathlib import Path
from typing import Any

from solver_plugins.errors import OptionError
from solver_plugins.integrations.folder import new_file
from solver_plugins.surgery import LayerRow, Report

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

    The network is called by its class, unless there is a title; the ending of the path says the format.
    """
    check_figure(path)
    shown = [row for row in report.converted if row.L is not None and row.L > 0]
    if report.converted and not shown:
        raise OptionError(
            "A figure shows the Lipschitz constants, and this report has none; leave out lipschitz=False."
        )
    from matplotlib.ticker import FuncFormatter

    from solver_plugins.studies.figures import label, legend, new_figure, save_figure

    names = [row.name for row in report.rows]
    figure, [[axes]] = new_figure(1, 1, width=min(16.0, max(7.0, 3 + 0.16 * len(names))), height=5.0)
    places = {name: place for place, name in enumerate(names)}

    def dots(rows: list[LayerRow], heights: list[float], what: str, **style: Any) -> None:
        axes.plot([places[row.name] for row in rows], heights, "o", label=f"{what} ({len(rows)})", **style)

    for pattern in dict.fromkeys(row.pattern for row in shown):
        rows = [row for row in shown if row.pattern == pattern]
        dots(rows, [row.L or 0.0 for row in rows], pattern, color=COLOURS.get(pattern, "#000000"), markersize=6)
    left = [row for row in report.rows if not row.converted]
    values = [row.L for row in shown if row.L is not None]
    low, high = (min(values), max(values)) if values else (1.0, 1.0)
    # At least a decade, so that equal constants look equal.
    middle, half = math.sqrt(low * high), max(0.6, 0.6 * math.log10(high / low))
    low, high = middle * 10**-half, middle * 10**half
    if left:
        # They have no L, and stand in a row of their own at the bottom.
        style = {"markerfacecolor": "none", "markeredgecolor": "#999999", "markersize": 5}
        dots(left, [low * 10 ** (0.05 * half)] * len(left), "left alone", **style)
    what = f"{title or report.model}: {len(report.converted)} of {len(report.rows)} layers become {report.solver}"
    every = max(1, math.ceil(len(names) / _MOST_NAMES))
    where = f"layer, in the order of the network{f' (every {_ordinal(every)} named)' if every > 1 else ''}"
    constant = r"$L = \lambda_{\max}(A A^\top)$, certified"
    label(axes, where, constant, f"{what}, iters={report.options['iters']}", log="y")
    axes.set_ylim(low, high)
    # Within two decades there is room to name steps between the powers of ten as well.
    named = (1, 2, 3, 5) if high / low < 100 else (1,)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}" if _leading(value) in named else ""))
    axes.tick_params(axis="y", which="both", labelsize=9)
    axes.set_xlim(-1, max(1, len(names)))
    axes.set_xticks(range(0, len(names), every), [_short(name) for name in names[::every]], rotation=90, fontsize=7)
    legend(axes, outside=True)
    with new_file(path) as made:
        save_figure(figure, made)


def _leading(value: float) -> int:
    return round(value / 10 ** math.floor(math.log10(value) + 1e-9))


def _short(name: str, most: int = 32) -> str:
    return name if len(name) <= most else f"…{name[-most + 1 :]}"


def _ordinal(number: int) -> str:
    return f"{number}{ {2: 'nd', 3: 'rd'}.get(number, 'th') }"
