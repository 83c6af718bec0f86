"""What a conversion of dropout does, as a table and as data."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from solver_plugins.surgery.printing import Printable, plain_table, sentence

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class DropoutRow:
    """One dropout of the report: a module by its name and class, or a function by the module that calls it.

    ``input_shape`` is () if it is never called; blocks reach over the last ``dims`` dimensions (None if not known);
    ``scheme`` is what it becomes, and ``reason`` says why it is not converted.
    """

    name: str
    kind: str
    converted: bool
    reason: str
    input_shape: tuple[int, ...]
    p: float
    dims: int | None
    scheme: str


@dataclass(frozen=True, repr=False)
class DropoutReport(Printable):
    """The result of :func:`inspect_dropout`; ``print`` it, or take ``to_dict()``."""

    model: str
    scheme: str
    rows: tuple[DropoutRow, ...]

    @property
    def converted(self) -> list[DropoutRow]:
        """The rows of the modules that are, or would be, converted."""
        return [row for row in self.rows if row.converted]

    def to_dict(self) -> dict[str, Any]:
        return {"model": self.model, "scheme": self.scheme, "dropouts": [asdict(row) for row in self.rows]}

    def headline(self) -> str:
        return f"{self.model}: {len(self.converted)} of {len(self.rows)} dropouts become {self.scheme}"

    def parts(self, width: int) -> "list[RenderableType]":
        parts = [sentence(self.headline(), style="bold")]
        if self.converted:
            table = plain_table(("dropout", "class", "sees", "p", "blocks over", "becomes"), right=("p",))
            for row in self.converted:
                over = "maps" if row.dims == 2 else "features"
                shape = "x".join(map(str, row.input_shape))
                table.add_row(row.name, row.kind, shape, f"{row.p:g}", over, row.scheme)
            parts.append(table)
        left: dict[tuple[str, str], list[str]] = {}
        for row in self.rows:
            if not row.converted:
                left.setdefault((row.kind, row.reason), []).append(row.name)
        for (kind, reason), names in left.items():
            more = f" (+{len(names) - 1})" if len(names) > 1 else ""
            parts.append(sentence(f"{names[0]}{more}, {kind}, left alone: {reason}", style="dim"))
        return parts
