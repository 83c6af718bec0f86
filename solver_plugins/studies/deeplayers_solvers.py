"""Beyond the Deep Layers paper: LeNet with several solvers and iterations; accuracy, and the time to reach it."""

from typing import Any, Self

import pydantic
from pydantic import Field

from solver_plugins.studies.comparison import Row
from solver_plugins.studies.deeplayers import REFERENCE, samples
from solver_plugins.studies.deeplayers_table2 import DROPOUT, LeNetTable, Table2Config
from solver_plugins.studies.figures import COLOURS, label, legend, line, name_each, nan_for_none, new_figure
from solver_plugins.studies.study import Measured, Results, Table, Value, mean, register_study, spread


class SolversConfig(Table2Config):
    """Settings of the comparison."""

    variants: list[str] = Field(["d-d"], min_length=1, max_length=1, description="Which layers follow a dropout.")
    iterations: dict[str, list[int]] = Field(
        {"proxsg": [1, 3, 10, 30], "proxgd": [10], "fista": [10], "anderson": [10]},
        min_length=1,
        description="Solvers, and how many iterations they take.",
    )

    @pydantic.model_validator(mode="after")
    def _solvers_known(self) -> Self:
        for solver, counts in self.iterations.items():
            samples(solver)
            if not counts or min(counts) < 1:
                raise ValueError(f"expected iterations of at least 1 for {solver!r}")
        return self


@register_study
class DeepLayersSolvers(LeNetTable[SolversConfig]):
    """LeNet with different solvers and iterations: accuracy with and without sampling, and time to an accuracy."""

    name = "deeplayers-solvers"
    reference = f"LeNet of Table 2 {REFERENCE} with other solvers; the paper has no such table"
    Config = SolversConfig

    def arms(self) -> tuple[str, ...]:
        counts = self.config.iterations
        return DROPOUT, *(f"{solver}-{count}" for solver in counts for count in counts[solver])

    def conversion(self, group: Value, arm: str) -> dict[str, Any]:
        solver, _, count = arm.rpartition("-")
        # Not the strict pattern: a deterministic solver leaves the dropout in front of it alone.
        return {"targets": ["fc1", "fc2"], **self.config.solver.of(solver), "iters": int(count)}

    def tables(self, results: Results) -> list[Table]:
        rows = self.rows(results)
        goal = self._goal(rows)
        what = "" if goal is None else f" {goal:.2f} %, where '{DROPOUT}' ends"
        times = [
            (row.arm, row.found.spread("training_cpu_seconds", ".1f"), *(
                spread([_reached(one, goal, what) for one in row.found], ".1f") for what in ("cpu_seconds", "epoch")))
            for row in rows
        ]  # fmt: skip
        return [
            *super().tables(results),
            Table(
                f"Time to an accuracy on the validation split of{what}",
                ("", "training (CPU s)", "until then (CPU s)", "until then (epochs)"),
                times,
                "Seen after whole epochs. Step sizes follow one schedule of the whole length.",
            ),
        ]

    def _goal(self, rows: list[Row]) -> float | None:
        (plain,) = [row for row in rows if row.arm == DROPOUT]
        return plain.found.mean("validation_accuracy")

    def summary(self, results: Results) -> dict[str, Any]:
        rows = self.rows(results)
        goal = self._goal(rows)
        return {
            **super().summary(results),
            **{f"{row.arm}_seconds_to_goal": mean([_reached(one, goal, "cpu_seconds") for one in row.found])
               for row in rows},
        }  # fmt: skip

    def draw(self, results: Results) -> Any:
        rows = self.rows(results)
        figure, axes = new_figure(1, 2, width=5.4, height=3.6)
        left, right = axes[0]
        for number, (solver, counts) in enumerate(self.config.iterations.items()):
            found = [row for row in rows if row.arm in [f"{solver}-{count}" for count in counts]]
            style = {"color": COLOURS[(number + 1) % len(COLOURS)], "marker": "o"}
            left.plot(counts, nan_for_none([row.found.mean("accuracy") for row in found]), label=solver, **style)
            off = [row.found.mean("deterministic_accuracy") for row in found]
            if any(value is not None for value in off):
                style = {**style, "fillstyle": "none", "linestyle": "--"}
                left.plot(counts, nan_for_none(off), label=f"{solver}, sampling off in evaluation", **style)
        (plain,) = [row for row in rows if row.arm == DROPOUT]
        left.axhline(nan_for_none([plain.found.mean("accuracy")])[0], color=COLOURS[0], label=DROPOUT)
        name_each(left, sorted({count for counts in self.config.iterations.values() for count in counts}))
        label(left, "iterations", "accuracy on the test split (%)")
        legend(left)
        for number, row in enumerate(rows):
            for one in row.found:
                curves, name = one.values["curves"], row.arm if one is row.found[0] else None
                style = line(number, marker=".", label=name)
                right.plot(curves["cpu_seconds"], curves["validation_accuracy"], **style)
        label(right, "training (CPU s)", "accuracy on the validation split (%)")
        legend(right, outside=True)
        return figure


def _reached(one: Measured, goal: float | None, what: str) -> float | None:
    """Returns when a cell first reached an accuracy, in CPU seconds or epochs; None if it never did."""
    curves = one.values["curves"]
    for epoch, (score, seconds) in enumerate(zip(curves["validation_accuracy"], curves["cpu_seconds"], strict=True)):
        if goal is not None and score >= goal:
            return epoch + 1.0 if what == "epoch" else float(seconds)
    return None
