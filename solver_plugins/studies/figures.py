"""Figures of studies: one style, and colours that work without colour vision."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#444444", "#8c564b")
"""The colours of Okabe and Ito, those that show best on white first."""
STYLES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
"""Line styles, to tell lines apart in print without colour."""


def new_figure(rows: int, columns: int, *, width: float = 4.2, height: float = 3.0) -> tuple["Figure", list[list[Any]]]:
    """Returns a figure and its axes, row by row; width and height are those of one panel, in inches."""
    # Imported late: matplotlib is slow to import, and most commands draw nothing.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(5.0, width * columns), height * rows), layout="constrained")
    # pyplot would need a display and keep the figure in memory.
    FigureCanvasAgg(figure)
    axes = [
        [figure.add_subplot(rows, columns, row * columns + one + 1) for one in range(columns)] for row in range(rows)
    ]
    for one in (panel for line in axes for panel in line):
        one.grid(color="#dddddd", linewidth=0.8)
        one.set_axisbelow(True)
        one.tick_params(labelsize=9)
        for side in ("top", "right"):
            one.spines[side].set_visible(False)
    return figure, axes


def line(index: int, **more: Any) -> dict[str, Any]:
    """Returns the colour and style of a numbered line, together with other arguments of ``plot``."""
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": STYLES[index % len(STYLES)], **more}


def draw_by(
    axes: Any, places: Sequence[float], found: Mapping[str, Sequence[Sequence[float | None]]], x: str, y: str, *,
    log: str = "",
) -> None:  # fmt: skip
    """Draws values by a setting: a line through the means over seeds for each name, and a dot for each seed.

    The setting's values, ``places``, name the horizontal axis, on a logarithmic scale. ``found`` has for each name the
    values of all seeds at each place; None and nothing leave gaps. ``log="y"`` makes the vertical axis logarithmic.
    """
    for index, (name, values) in enumerate(found.items()):
        known = [[one for one in at if one is not None] for at in values]
        means = [sum(at) / len(at) if at else math.nan for at in known]
        style = line(index, marker="o", markersize=7 - min(index, 4), fillstyle="none", label=name)
        axes.plot(places, means, **style)
        dots = [(place, one) for place, at in zip(places, known, strict=True) if len(at) > 1 for one in at]
        axes.plot([place for place, _ in dots], [one for _, one in dots], ".", color=style["color"], alpha=0.4)
    name_each(axes, places)
    label(axes, x, y, log=log)


def label(axes: Any, x: str | None = None, y: str | None = None, title: str | None = None, *, log: str = "") -> None:
    """Sets the labels and the title; ``log`` names the logarithmic axes, such as "xy"."""
    for name, text in (("x", x), ("y", y)):
        if text is not None:
            getattr(axes, f"set_{name}label")(text, fontsize=9)
        if name in log:
            getattr(axes, f"set_{name}scale")("log")
    if title is not None:
        axes.set_title(title, fontsize=11)


def legend(axes: Any, *, outside: bool = False) -> None:
    """Adds a small legend without a frame, inside the axes or to their right."""
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)} if outside else {}
    axes.legend(frameon=False, fontsize=8, **place)


def whole_numbers(axes: Any) -> None:
    """Labels only whole numbers on the horizontal axis."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def name_each(axes: Any, values: Sequence[float]) -> None:
    """Makes the horizontal axis logarithmic and labels exactly these values."""
    axes.set_xscale("log")
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.set_xticks([], minor=True)


def save_figure(figure: "Figure", path: Path) -> None:
    """Writes the figure in the format of the path's ending."""
    figure.savefig(path, dpi=150)


def nan_for_none(values: Sequence[float | None]) -> list[float]:
    """Returns the values with NaN for None, so that lines have gaps there."""
    return [math.nan if value is None else value for value in values]
