"""What a study is: a config, a list of independent cells, and how their results become tables and a figure."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

import pydantic
import torch
from pydantic import Field

from solver_plugins.config import StrictConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Value = str | int | float


class StudyConfig(StrictConfig):
    """What every study has."""

    seeds: list[int] = Field(
        [0], min_length=1, description="One repetition for each; arms share data and first weights."
    )

    note: str = Field(
        "",
        description="What readers of the report should know: how settings were chosen, which images were seen before.",
    )

    @pydantic.field_validator("seeds")
    @classmethod
    def _distinct(cls, seeds: list[int]) -> list[int]:
        if len(set(seeds)) < len(seeds) or min(seeds) < 0:
            raise ValueError("expected seeds that differ and are not negative")
        return seeds


@dataclass(frozen=True)
class Cell:
    """One measurement: an arm with a seed in a setting. It depends on these, the config and earlier stages alone.

    Attributes:
        arm: What is compared ("backprop", "cg3").
        seed: Of data, weights and sampling.
        setting: What else varies, as pairs of name and value.
    """

    arm: str
    seed: int
    setting: tuple[tuple[str, Value], ...] = ()

    @property
    def name(self) -> str:
        """A name for files and progress bars, such as ``cg3_lr=0.5_seed=0``."""
        parts = [self.arm, *(f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in
                             self.setting), f"seed={self.seed}"]  # fmt: skip
        return re.sub(r"[^\w.=+-]", "-", "_".join(parts))

    def __getitem__(self, key: str) -> Value:
        return dict(self.setting)[key]


@dataclass(frozen=True)
class Measured:
    """A cell and what came out of it.

    Attributes:
        cell: The cell.
        values: What its study returned; long lists are under "curves".
        seconds: Of a clock on the wall.
        cpu_seconds: Of all threads of its process.
    """

    cell: Cell
    values: dict[str, Any]
    seconds: float
    cpu_seconds: float


class Results(list[Measured]):
    """The measured cells, in the order of the study."""

    def of(self, *, arm: str | None = None, seed: int | None = None, **setting: Value) -> Self:
        """Returns those of an arm, a seed, and values of the setting."""
        wanted = setting.items()
        return type(self)(
            one
            for one in self
            if (arm is None or one.cell.arm == arm)
            and (seed is None or one.cell.seed == seed)
            and wanted <= dict(one.cell.setting).items()
        )

    def each(self, key: str) -> list[Any]:
        """Returns one value of every cell."""
        return [one.values[key] for one in self]


@dataclass(frozen=True)
class Table:
    """A table of the report.

    Attributes:
        title: One line above it.
        columns: The headings; the first column is text, the others are numbers.
        rows: As many texts as there are columns, each.
        note: What a reader has to know to read it.
    """

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""

    def markdown(self) -> str:
        """Returns the table as Markdown."""
        aligned = ["---", *("---:" for _ in self.columns[1:])]
        lines = [_row(self.columns), _row(aligned), *(_row(row) for row in self.rows)]
        return f"**{self.title}**\n\n" + "\n".join(lines) + (f"\n\n{self.note}" if self.note else "") + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


@dataclass(frozen=True)
class Context:
    """Where a cell runs.

    Attributes:
        steps: ``for step in steps(n)`` counts from 0 to n - 1 and shows a progress bar.
        device: Where tensors of large studies belong.
        earlier: What the stages before this one have measured; see :meth:`Study.stages`.
        folder: Where a cell may keep files for later stages, named after itself; None for nowhere.
    """

    steps: Callable[[int], Iterable[int]] = range
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    earlier: Results = field(default_factory=Results)
    folder: Path | None = None


C = TypeVar("C", bound=StudyConfig)


class Study(ABC, Generic[C]):
    """An experiment that can be repeated with one command.

    Attributes:
        name: What it is called on the command line.
        tags: Words to filter by.
        reference: Which figure or table of which paper it repeats.
        Config: Its settings.
        settings: The YAML file with its scales; by default ``configs/studies/NAME.yaml`` of this library.
        config: The settings of this run.
    """

    name: ClassVar[str]
    tags: ClassVar[tuple[str, ...]] = ()
    reference: ClassVar[str]
    Config: ClassVar[type[StudyConfig]]
    settings: ClassVar[Path | None] = None

    def __init__(self, config: C):
        self.config = config

    def prepare(self) -> None:
        """Loads what all cells need and raises if something is missing; called once, before anything is written."""
        return

    @abstractmethod
    def cells(self) -> list[Cell]:
        """Lists what is to be measured."""

    def stages(self) -> list[list[Cell]]:
        """Returns all cells in groups that wait for each other: a cell knows the results of the groups before its own.

        One group by default. A study that searches for a step size first has two.
        """
        return [self.cells()]

    @abstractmethod
    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        """Measures one cell.

        Torch's global random state has been seeded with the study and the cell's seed: it is the same for all arms.

        Returns:
            What can be written as JSON, so None instead of NaN; long lists under "curves".
        """

    @abstractmethod
    def tables(self, results: Results) -> list[Table]:
        """Returns the tables of the report, with the paper's numbers beside ours where it has some."""

    @abstractmethod
    def draw(self, results: Results) -> "Figure":
        """Draws the figure in the paper's layout."""

    def summary(self, results: Results) -> dict[str, Any]:
        """Returns the numbers that a reader asks for first."""
        return {}
