"""The report of a study that searches: accuracies beside the paper's, differences seed by seed, and the search."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from solver_plugins.studies.controls import LINEAR, SIMPLE, untuned
from solver_plugins.studies.figures import COLOURS, label, legend, line, nan_for_none, new_figure, whole_numbers
from solver_plugins.studies.study import Results, Table, Value, mean, shown, spread

if TYPE_CHECKING:
    from solver_plugins.studies.searched import SearchedConfig

FIRST = "first"
"""The network before it is finetuned, as an arm."""


@dataclass(frozen=True, eq=False)
class Row:
    """One network in one arm.

    Attributes:
        group: Which network.
        label: Its name.
        arm: What is trained.
        paper: The paper's accuracy, if it has one.
        found: Our cells, one for each seed.
        search: The cells of the search.
    """

    group: Value
    label: str
    arm: str
    paper: float | None
    found: Results
    search: Results

    @classmethod
    def of_arm(cls, arm: str) -> "Row":
        """Returns a row without results."""
        return cls("", "", arm, None, Results(), Results())

    @property
    def key(self) -> str:
        """The name of the row in ``metrics.json``."""
        return f"{self.group}_{self.arm}"

    @property
    def name(self) -> str:
        """The name of the row in tables."""
        return f"{self.label}, {self.arm}"

    @property
    def rates(self) -> list[float]:
        """The step sizes that were used."""
        return sorted({one.values["lr"] for one in self.found if "lr" in one.values})

    def has_solver(self, plain: str) -> bool:
        """Whether the arm is neither plain nor a control without a solver."""
        return untuned(self.arm) not in (plain, FIRST, LINEAR, *SIMPLE)


def pairs(row: Row, rows: list[Row], other: str, key: str = "accuracy", beside: str = "accuracy") -> list[float | None]:
    """Returns what a value of an arm is above a value of another one, seed by seed."""
    (second,) = [one for one in rows if one.group == row.group and one.arm == other]
    both = zip([one.values.get(key) for one in row.found], second.found.each(beside), strict=True)
    return [None if a is None or b is None else a - b for a, b in both]


def paired(values: list[float | None], digits: int = 2) -> str:
    """Returns the mean of paired differences ± its standard error as text."""
    there = [value for value in values if value is not None]
    if len(there) < 2:
        return spread(values, f"+.{digits}f")
    return f"{mean(there):+.{digits}f} ± {statistics.stdev(there) / math.sqrt(len(there)):.{digits}f}"


def better(values: list[float | None]) -> str:
    """Returns how many of the seeds gain as text."""
    return f"{sum(one is not None and one > 0 for one in values)} of {len(values)}"


def accuracies(
    rows: list[Row], plain: str, config: "SearchedConfig", title: str, more: Mapping[str, tuple[str, str]]
) -> list[Table]:
    """Returns the table of accuracies on the test split; columns that no row fills are left out."""
    columns = {
        "paper (%)": [shown(row.paper, ".2f") for row in rows],
        "ours (%)": [row.found.spread("accuracy", ".2f") for row in rows],
        "ours - paper": [_over_paper(row) for row in rows],
        "spread over trials": [_mean(row, "trial_spread", ".3f") for row in rows],
        "sampling off in evaluation (%)": [_mean(row, "deterministic_accuracy", ".2f") for row in rows],
        "NLL": [_mean(row, "loss", ".3f") for row in rows],
        "ECE (%)": [_mean(row, "ece", ".2f") for row in rows],
        **{name: [_mean(row, key, form) for row in rows] for name, (key, form) in more.items()},
        "lr": [", ".join(f"{rate:g}" for rate in row.rates) for row in rows],
        "p": [", ".join(sorted({f"{one.values['p']:g}" for one in row.found if "p" in one.values})) for row in rows],
        "training (CPU s)": [_mean(row, "training_cpu_seconds", ".1f") for row in rows],
    }
    kept = {name: texts for name, texts in columns.items() if any(texts)}
    finetuned = "'first' is the network before it is finetuned. " if any(row.arm == FIRST for row in rows) else ""
    tuned = " p: the dropout rate that a tuned arm chose." if "p" in kept else ""
    expected = f" Predicted before the test split was read: {config.predictions}" if config.predictions else ""
    return [
        Table(
            f"Accuracy on the test split: {title}",
            ("", *kept),
            list(zip([row.name for row in rows], *kept.values(), strict=True)),
            f"Ours: mean ± standard deviation over seeds {config.seeds}. {finetuned}'{plain}' is what the "
            f"others are compared with.{tuned}{expected}",
        )
    ]


def _mean(row: Row, key: str, form: str) -> str:
    return shown(mean([one.values.get(key) for one in row.found]), form)


def _over_paper(row: Row) -> str:
    ours = row.found.mean("accuracy")
    return "" if row.paper is None or ours is None else f"{ours - row.paper:+.2f}"


def gains(rows: list[Row], plain: str) -> Table:
    """Returns a table of what the arms with a solver gain over the plain one, beside the paper's gain."""
    found = []
    for row in (row for row in rows if row.has_solver(plain)):
        # Where the paper finetunes, it reports only the network before finetuning.
        printed = {one.arm: one.paper for one in rows if one.group == row.group and one.paper is not None}
        theirs = printed.get(plain, printed.get(FIRST))
        paper = "" if row.paper is None or theirs is None else f"{row.paper - theirs:+.2f}"
        ours = pairs(row, rows, plain)
        found.append((row.name, paper, spread(ours, "+.2f"), better(ours)))
    return Table(
        f"Points gained over '{plain}', with the same training", ("", "paper", "ours", "seeds that gain"), found
    )


def losses(rows: list[Row], chosen: list[Row], others: Sequence[str], seeds: list[int]) -> Table:
    """Returns a table of the negative log-likelihoods of the chosen rows against each of the others."""
    return Table(
        "NLL over that of each other arm: below zero is better",
        ("", *(f"over '{other}'" for other in others)),
        [(row.name, *(paired(pairs(row, rows, other, "loss", "loss"), 3) for other in others)) for row in chosen],
        f"Paired by seed, mean ± standard error over seeds {seeds}.",
    )


def differences(rows: list[Row], chosen: list[Row], others: Sequence[str], seeds: list[int]) -> Table:
    """Returns a table of what the chosen rows gain over each of the others."""

    def cell(row: Row, other: str) -> str:
        text, off = paired(pairs(row, rows, other)), pairs(row, rows, other, "deterministic_accuracy")
        return text if all(one is None for one in off) else f"{text} ({paired(off)})"

    return Table(
        "Points gained over each other arm; in brackets with sampling off in evaluation, where there is sampling",
        ("", *(f"over '{other}'" for other in others)),
        [(row.name, *(cell(row, other) for other in others)) for row in chosen],
        f"Paired by seed, mean ± standard error over seeds {seeds}.",
    )


def search_tables(rows: list[Row], config: "SearchedConfig") -> list[Table]:
    """Returns a table of the search, if there was one."""
    rates = config.search.rates
    texts = [
        # Of a tuned arm, the best dropout rate at each step size.
        (row.name, *(shown(max(row.search.of(lr=rate).known("validation_accuracy"), default=None), ".2f", "-")
                     for rate in rates))
        for row in rows if row.search
    ]  # fmt: skip
    title = f"Search for the step size: accuracy on the validation split after {config.search.epochs} epochs (%)"
    note = f"For the seed {config.seeds[0]}; '-': not finite any more."
    return [Table(title, ("lr", *(f"{rate:g}" for rate in rates)), texts, note)] if texts else []


def draw_rows(rows: list[Row]) -> Any:
    """Draws accuracies beside the paper's, and the validation split over the epochs."""
    groups, arms = list(dict.fromkeys(row.group for row in rows)), list(dict.fromkeys(row.arm for row in rows))
    figure, axes = new_figure(1, 2, width=5.4, height=3.6)
    left, right = axes[0]
    for row in rows:
        number, group = arms.index(row.arm), groups.index(row.group)
        colour, place = COLOURS[number % len(COLOURS)], group + (number - (len(arms) - 1) / 2) * 0.8 / len(arms)
        values = nan_for_none(row.found.each("accuracy"))
        left.plot([place] * len(values), values, "o", color=colour, alpha=0.7, label=None if group else row.arm)
        if row.paper is not None:
            left.plot([place], [row.paper], "D", color=colour, fillstyle="none")
        if row.arm == FIRST:
            continue
        curves = [one.values["curves"]["validation_accuracy"] for one in row.found]
        shared = min(map(len, curves))
        means = [sum(values) / len(values) for values in zip(*(curve[:shared] for curve in curves), strict=True)]
        colour = COLOURS[(group if len(groups) > 1 else number) % len(COLOURS)]
        right.plot(range(1, shared + 1), means, **line(number, color=colour, marker=".", label=row.name))
    if any(row.paper is not None for row in rows):
        left.plot([], [], "D", color="#444444", fillstyle="none", label="paper")
    left.set_xticks(range(len(groups)), [next(row.label for row in rows if row.group == group) for group in groups])
    left.set_xlim(-0.5, len(groups) - 0.5)
    label(left, y="accuracy on the test split (%)")
    legend(left)
    whole_numbers(right)
    label(right, "epoch", "accuracy on the validation split (%)")
    legend(right, outside=True)
    return figure
