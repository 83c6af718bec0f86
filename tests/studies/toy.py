"""A study of no time: what the framework does to cells, settings and folders."""

from pathlib import Path
from typing import Any, ClassVar

import torch

from solver_plugins.studies import Cell, Study, StudyConfig, Table

SETTINGS = "common: {rates: [1.0, 2.0]}\nscales: {smoke: {}, short: {seeds: [0, 1]}, paper: {seeds: [0, 1, 2]}}\n"


class ToyConfig(StudyConfig):
    rates: list[float]
    fail_at: str | None = None
    value: float = 0.0


class Toy(Study[ToyConfig]):
    """Draws a number."""

    name = "toy"
    tags = ("quick",)
    reference = "Table 0 of no paper"
    Config: ClassVar[Any] = ToyConfig
    ran: ClassVar[list[str]] = []

    def cells(self):
        return [
            Cell(arm, seed, (("rate", rate),))
            for rate in self.config.rates
            for seed in self.config.seeds
            for arm in ("plain", "other arm")
        ]

    def run(self, cell, context):
        if cell.name == self.config.fail_at:
            raise InterruptedError("killed")
        type(self).ran.append(cell.name)
        drawn = [float(torch.rand(())) for _ in context.steps(3)]
        return {"drawn": drawn[-1] * cell["rate"] + self.config.value, "curves": {"drawn": drawn}}

    def tables(self, results):
        return [Table("Numbers", ("cell", "a|b"), [(one.cell.name, f"{one.values['drawn']:.6f}") for one in results])]

    def summary(self, results):
        return {"mean": sum(results.each("drawn")) / len(results)}

    def draw(self, results):
        from solver_plugins.studies.figures import new_figure

        figure, axes = new_figure(1, 1)
        axes[0][0].plot(results.each("drawn"))
        return figure


def write_settings(folder: Path) -> Path:
    path = folder / "toy.yaml"
    path.write_text(SETTINGS)
    return path
