"""The base of all studies: a config, independent cells, and the tables and figure made from their results.

A third-party distribution adds one by an entry point of the group ``solver_plugins.studies``::

    [project.entry-points."solver_plugins.studies"]
    my-study = "my_package.my_module:MyStudy"
"""

import inspect
import math
import re
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

import pydantic
import torch
from pydantic import Field

from solver_plugins.config import StrictConfig
from solver_plugins.errors import RegistrationError
from solver_plugins.registry import Registry

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Value = str | int | float


class StudyConfig(StrictConfig):
    """The settings that every study has."""

    seeds: list[int] = Field([0], min_length=1, description="One repetition for each; arms share data and weights.")
    note: str = Field("", description="What readers of the report should know, such as how settings were chosen.")

    @pydantic.field_validator("seeds")
    @classmethod
    def _distinct(cls, seeds: list[int]) -> list[int]:
        if len(set(seeds)) < len(seeds) or min(seeds) < 0:
            raise ValueError("expected seeds that differ and are not negative")
        return seeds


@dataclass(frozen=True)
class Cell:
    """One measurement: what is compared ("backprop", "cg3"), with a seed, in a setting (what else varies).

    It depends on these, the config and earlier stages only.
    """

    arm: str
    seed: int
    setting: tuple[tuple[str, Value], ...] = ()

    @property
    def name(self) -> str:
        """A name for files and progress bars, such as ``cg3_lr=0.5_seed=0``."""
        return f"{self.place}_seed={self.seed}"

    @property
    def place(self) -> str:
        """The arm and its settings as the name of a file."""
        setting = (f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in self.setting)
        return re.sub(r"[^\w.=+-]", "-", "_".join([self.arm, *setting]))

    def __getitem__(self, key: str) -> Value:
        return dict(self.setting)[key]

    @classmethod
    def grid(cls, **values: Iterable[Value]) -> list["Cell"]:
        """Returns a cell for every combination of values, of which the last varies fastest.

        ``arm`` and ``seed`` are two of the names; all others are settings.
        """
        made: list[dict[str, Any]] = [dict(zip(values, one, strict=True)) for one in product(*values.values())]
        return [cls(one.pop("arm"), one.pop("seed"), tuple(one.items())) for one in made]


@dataclass(frozen=True)
class Measured:
    """A cell and what its study returned (long lists are under "curves"), with its wall time and CPU time."""

    cell: Cell
    values: dict[str, Any]
    seconds: float
    cpu_seconds: float


class Results(list[Measured]):
    """The measured cells, in the order of the study."""

    def of(self, *, arm: str | None = None, seed: int | None = None, **setting: Value) -> Self:
        """Returns the results of one arm, seed or setting."""
        wanted = setting.items()
        return type(self)(
            one
            for one in self
            if (arm is None or one.cell.arm == arm)
            and (seed is None or one.cell.seed == seed)
            and wanted <= dict(one.cell.setting).items()
        )

    def each(self, key: str) -> list[Any]:
        """Returns one value of every result."""
        return [one.values[key] for one in self]

    def known(self, key: str) -> list[float]:
        """Returns a value of the cells for which it is not None."""
        return [value for value in self.each(key) if value is not None]

    def mean(self, key: str) -> float | None:
        """Returns the mean of a value over the cells that have it; None if none has."""
        return mean(self.each(key))

    def spread(self, key: str, form: str) -> str:
        """Returns mean ± standard deviation of a value; see :func:`spread`."""
        return spread(self.each(key), form)


def mean(values: Sequence[float | None]) -> float | None:
    """Returns the mean of the values that are not None; None if there are none."""
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None


def spread(values: Sequence[float | None], form: str) -> str:
    """Returns mean ± standard deviation of the values as text, and how many are None; "-" if all are."""
    there = [value for value in values if value is not None]
    if not there:
        return "-"
    text = f"{mean(there):{form}}" + (f" ± {statistics.stdev(there):{form.lstrip('+')}}" if len(there) > 1 else "")
    gone = len(values) - len(there)
    return text + (f" (- in {gone} of {len(values)})" if gone else "")


def shown(value: float | None, form: str, missing: str = "") -> str:
    """Formats a number; ``missing`` stands for None."""
    return missing if value is None else f"{value:{form}}"


def finite(value: float | torch.Tensor) -> float | None:
    """Returns a number as JSON can hold it: None if it is not finite."""
    return float(value) if math.isfinite(value) else None


@dataclass(frozen=True)
class Table:
    """A table of the report: the first column is text, the others are numbers."""

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
    """The surroundings of a cell.

    Attributes:
        steps: ``for step in steps(n)`` counts from 0 to n - 1 and shows a progress bar.
        device: Where to put models and data.
        earlier: The results of earlier stages; see :meth:`Study.stages`.
        folder: Where a cell may keep files for later stages, named after itself; None if there is no folder.
        talks: Whether this process shows progress bars.
    """

    steps: Callable[[int], Iterable[int]] = range
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    earlier: Results = field(default_factory=Results)
    folder: Path | None = None
    talks: bool = False


C = TypeVar("C", bound=StudyConfig)


class Study(ABC, Generic[C]):
    """An experiment that can be repeated with one command.

    Attributes:
        name: What it is called on the command line.
        tags: Words to filter by.
        reference: The figure or table that it reproduces.
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
        """Loads what all cells need, and raises if something is missing; called once, before anything is written."""
        return

    @abstractmethod
    def cells(self) -> list[Cell]:
        """Lists what is to be measured."""

    def stages(self) -> list[list[Cell]]:
        """Returns the cells in stages; a cell can use the results of earlier stages.

        There is one stage by default. A study that first searches for a step size has two.
        """
        return [self.cells()]

    @abstractmethod
    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        """Measures one cell.

        The global random state is seeded with the study's name and the cell's seed, so it is the same for all arms.

        Returns:
            Values for a JSON file, so None instead of NaN; long lists go under "curves".
        """

    @abstractmethod
    def tables(self, results: Results) -> list[Table]:
        """Returns the tables of the report, with the paper's numbers beside ours where there are some."""

    @abstractmethod
    def draw(self, results: Results) -> "Figure":
        """Draws the figure in the paper's layout."""

    def summary(self, results: Results) -> dict[str, Any]:
        """Returns the most important numbers: by default the means over seeds of all."""
        found: dict[str, list[Any]] = {}
        for one in results:
            for key, value in one.values.items():
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    found.setdefault(f"{one.cell.place}_{key}", []).append(value)
        return {key: mean(values) for key, values in found.items()}


def _check_study(name: str, study: Any) -> None:
    label = getattr(study, "__qualname__", repr(study))
    if not (inspect.isclass(study) and issubclass(study, Study)):
        raise RegistrationError(f"A study is a class derived from solver_plugins.studies.Study; found {label}.")
    missing = [repr(one) for one in ("name", "Config", "reference") if not hasattr(study, one)]
    missing += [f"{one}()" for one in sorted(getattr(study, "__abstractmethods__", ()))]
    if missing:
        raise RegistrationError(f"A study needs name, Config, reference and methods; {label} has no {missing[0]}.")
    if study.name != name:
        raise RegistrationError(
            f"A study is registered under its own name; {label}.name is {study.name!r}, but it was to be registered "
            f"as {name!r}."
        )


STUDIES: Registry[type[Study[Any]]] = Registry("study", entry_point_group="solver_plugins.studies", check=_check_study)
register_study = STUDIES.register_class
"""Class decorator: registers a study under its ``name``; its docstring's first line becomes the description."""
list_studies = STUDIES.names
"""Returns the names of the studies; ``filter`` is a glob on the name or a tag."""
study_info = STUDIES.info
"""Returns name, class, description, tags and origin of a study."""
