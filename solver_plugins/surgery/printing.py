"""How reports are shown: one layout for terminals, pipes and notebooks of any width."""

import html
import io
import json
import math
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

# rich is imported where something is shown: `import solver_plugins` does not wait for it.
if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, Group, RenderableType
    from rich.table import Table

WIDEST = 160
PIPE = 100
"""Columns if there is no terminal: in a notebook, or a log file."""
ROOMY = 110
"""A table of at least this width has all columns."""
FIRST = 24
"""The least width of the first column."""


class Printable:
    """Mixin of reports, which can be printed, given to rich, shown in a notebook, or taken as data."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain data."""
        raise NotImplementedError

    def parts(self, width: int) -> "list[RenderableType]":
        """Returns what is shown, from top to bottom, in this many columns."""
        raise NotImplementedError

    def headline(self) -> str:
        """Returns the report in one line."""
        raise NotImplementedError

    def to_json(self) -> str:
        """Returns the report as JSON text; numbers that are not finite become null."""
        return json.dumps(_finite(self.to_dict()), indent=2, allow_nan=False)

    def table(self, width: int | None = None) -> "Group":
        """Returns what ``print`` shows as something that rich can print, ``width`` columns wide."""
        from rich.console import Group

        return Group(*self.parts(_width() if width is None else width))

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "Iterator[RenderableType]":
        yield from self.parts(options.max_width)

    def __str__(self) -> str:
        from rich.console import Console

        width = _width()
        console = Console(file=io.StringIO(), width=width, color_system=None)
        console.print(self.table(width))
        text: str = console.file.getvalue()  # type: ignore[attr-defined]
        return "\n".join(line.rstrip() for line in text.rstrip().splitlines())

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.headline()}>"

    def _repr_html_(self) -> str:
        return f"<pre style='white-space: pre'>{html.escape(str(self))}</pre>"


def plain_table(headings: Sequence[str], right: Iterable[str]) -> "Table":
    """Returns an empty table: a line under the headings, numbers on the right, long names folded."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for place, heading in enumerate(headings):
        table.add_column(
            heading,
            justify="right" if heading in right else "left",
            overflow="fold",
            no_wrap=place > 0,
            # rich takes from the first column alone what a terminal lacks: a name must not vanish.
            min_width=None if place else FIRST,
        )
    return table


def sentence(text: str, style: str = "", indent: int = 0) -> "RenderableType":
    """Returns a paragraph; square brackets in names are not markup."""
    from rich.padding import Padding
    from rich.text import Text

    return Padding(Text(text, style=style), (0, 0, 0, indent)) if indent else Text(text, style=style)


def number(value: float | None, digits: int = 3) -> str:
    """Returns a number with few digits; nothing for None."""
    return "" if value is None else f"{value:.{digits}g}"


def rate(p: float | None, tau: int | None) -> str:
    """Returns a dropout rate and the number of features that are drawn at it; nothing for a deterministic solver."""
    if tau is None:
        return ""
    return str(tau) if p is None else f"{number(p)}, {tau}"


def amount(value: float, unit: str = "") -> str:
    """Returns a large number with a prefix: 1.2G, 340k."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 0.9995 * size:
            return f"{value / size:.3g}{prefix}{unit}"
    return f"{value:.3g}{unit}"


def size(shape: tuple[int, ...]) -> str:
    """Returns a shape without its batch dimension."""
    return "x".join(str(n) for n in shape[1:])


def spread(values: Iterable[float | None]) -> str:
    """Returns the range of some numbers, or the number itself if all are equal."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    low, high = number(min(known)), number(max(known))
    return low if low == high else f"{low}-{high}"


def without_numbers(name: str) -> str:
    """Returns a name with a star for each part that is a number, so that layers that repeat share one name."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def common_name(names: Sequence[str]) -> str:
    """Returns several names of the same form as one, with a star for each part in which they differ."""
    return ".".join(
        part if len({part, *rest}) == 1 else "*" for part, *rest in zip(*(n.split(".") for n in names), strict=True)
    )


def _width() -> int:
    return min(WIDEST, max(60, shutil.get_terminal_size((PIPE, 24)).columns))


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
