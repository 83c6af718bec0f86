"""What a conversion of dropout would do or did, as a table and as data."""

import io
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class DropoutRow:
    """One dropout of the report.

    Attributes:
        name: The module's name; of a function, the module that calls it.
        kind: The module's class, or the function.
        converted: Whether a conversion takes it.
        reason: Why not.
        input_shape: What it sees in the recorded pass, () if it is never called.
        p: Its own rate.
        dims: Over how many of the last dimensions blocks reach; None if not known.
        scheme: What it becomes.
    """

    name: str
    kind: str
    converted: bool
    reason: str
    input_shape: tuple[int, ...]
    p: float
    dims: int | None
    scheme: str


@dataclass(frozen=True)
class DropoutReport:
    """What :func:`inspect_dropout` found; ``print`` it, or take ``to_dict()``.

    Attributes:
        model: The model's class.
        scheme: The scheme that was asked for.
        rows: One per dropout, in the order of the model.
    """

    model: str
    scheme: str
    rows: tuple[DropoutRow, ...]

    @property
    def converted(self) -> list[DropoutRow]:
        """The rows of dropouts that are converted."""
        return [row for row in self.rows if row.converted]

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain data."""
        return {"model": self.model, "scheme": self.scheme, "dropouts": [asdict(row) for row in self.rows]}

    def to_json(self) -> str:
        """Returns the report as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(file=io.StringIO(), width=150)
        console.print(self.table())
        return console.file.getvalue().rstrip()  # type: ignore[attr-defined]

    def table(self) -> "Table":
        """Returns the report as a rich table; dropouts left alone for one reason share a line."""
        from rich.table import Table

        title = f"{self.model}: {len(self.converted)} of {len(self.rows)} dropouts become {self.scheme}"
        table = Table(title=title, title_justify="left")
        for heading in ("dropout", "class", "sees", "p", "blocks over", "becomes"):
            table.add_column(heading)
        for row in self.converted:
            over = "maps" if row.dims == 2 else "features"
            shape = "x".join(map(str, row.input_shape))
            table.add_row(row.name, row.kind, shape, f"{row.p:g}", over, row.scheme)
        left: dict[tuple[str, str], list[str]] = {}
        for row in self.rows:
            if not row.converted:
                left.setdefault((row.kind, row.reason), []).append(row.name)
        if left:
            table.add_section()
        for (kind, reason), names in left.items():
            more = f" (+{len(names) - 1})" if len(names) > 1 else ""
            table.add_row(f"[dim]{names[0]}{more}", f"[dim]{kind}", "", "", "", f"[dim]left alone: {reason}")
        return table
