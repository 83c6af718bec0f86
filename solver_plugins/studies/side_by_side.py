"""Studies that train one network in a few ways and put these side by side: one table, one panel for each value.

A study of this kind says what its arms are, which values it measures, and how a cell is run.
"""

from abc import abstractmethod
from typing import Any, ClassVar, NamedTuple, TypeVar

from pydantic import Field

from solver_plugins.studies.figures import COLOURS, label, nan_for_none, new_figure
from solver_plugins.studies.images import ImageConfig, ImageStudy
from solver_plugins.studies.study import Cell, Results, Table


class SideBySideConfig(ImageConfig):
    """Settings of such a study."""

    image_size: int | None = Field(None, ge=1, description="Images are resized to this side; null for as they are.")


class Column(NamedTuple):
    """A column of the table: a value of the cells, averaged over seeds if it has a format."""

    key: str
    heading: str
    form: str = ""
    drawn: bool = True

    def cell(self, found: Results) -> str:
        """Returns the value of an arm as text."""
        return found.spread(self.key, self.form) if self.form else str(found[0].values[self.key])


C = TypeVar("C", bound=SideBySideConfig)


class SideBySide(ImageStudy[C]):
    """A study that compares arms on one network.

    Attributes:
        arms: What is compared.
        heading: The heading of the arms' column.
        columns: The values to show.
        note: What else readers of the table should know.
    """

    arms: ClassVar[tuple[str, ...]]
    heading: ClassVar[str]
    columns: ClassVar[tuple[Column, ...]]
    note: ClassVar[str] = ""

    @abstractmethod
    def title(self) -> str:
        """Returns what the report says about network, data and training."""

    def cells(self) -> list[Cell]:
        return Cell.grid(seed=self.config.seeds, arm=self.arms)

    def tables(self, results: Results) -> list[Table]:
        data = self.config.data
        rows = [(arm, *(column.cell(results.of(arm=arm)) for column in self.columns)) for arm in self.arms]
        note = (
            f"Mean ± standard deviation over seeds {self.config.seeds} (of random first weights and of the order), on "
            f"{len(self._images.validation)} images of {data.validation!r}, after the last epoch.{self.note}"
        )
        return [Table(self.title(), (self.heading, *(column.heading for column in self.columns)), rows, note)]

    def summary(self, results: Results) -> dict[str, Any]:
        keys = [column.key for column in self.columns if column.form]
        return {f"{arm}_{key}": results.of(arm=arm).mean(key) for arm in self.arms for key in keys}

    def draw(self, results: Results) -> Any:
        drawn = [column for column in self.columns if column.drawn]
        figure, axes = new_figure(1, len(drawn), width=3.2)
        for panel, column in zip(axes[0], drawn, strict=True):
            for place, arm in enumerate(self.arms):
                found = results.of(arm=arm)
                values = nan_for_none(found.each(column.key))
                panel.plot([place] * len(values), values, "o", color=COLOURS[place], alpha=0.6)
                middle = nan_for_none([found.mean(column.key)] * 2)
                panel.plot([place - 0.2, place + 0.2], middle, color=COLOURS[place], linewidth=2)
            panel.set_xticks(range(len(self.arms)), self.arms)
            panel.set_xlim(-0.5, len(self.arms) - 0.5)
            label(panel, y=column.heading)
        return figure
