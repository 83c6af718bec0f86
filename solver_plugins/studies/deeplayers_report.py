"""The report of a table of "Deep Layers as Stochastic Solvers": the paper's numbers beside ours."""

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from solver_plugins.studies.controls import SIMPLE, TUNED
from solver_plugins.studies.figures import COLOURS, label, legend, line, nan_for_none, new_figure, whole_numbers
from solver_plugins.studies.study import Results, Table, Value, mean, shown, spread

if TYPE_CHECKING:
    from solver_plugins.studies.deeplayers import TableConfig


@dataclass(frozen=True, eq=False)
class TableRow:
    """One network in one arm.

    Attributes:
        group: Which network.
        label: Its name.
        arm: What is trained.
        paper: The paper's accuracy, if it has one.
        found: Our cells, one for each seed.
        search: The cells of the search, one for each step size.
    """

    group: Value
    label: str
    arm: str
    paper: float | None
    found: Results
    search: Results

    @property
    def key(self) -> str:
        """The name of the row in ``metrics.json``."""
        return f"{self.group}_{self.arm}"

    @property
    def accuracy(self) -> float | None:
        """The mean over seeds, in percent."""
        return self.found.mean("accuracy")

    @property
    def rates(self) -> list[float]:
        """The step sizes that were used."""
        return sorted({one.values["lr"] for one in self.found if "lr" in one.values})


def pairs(row: TableRow, rows: list[TableRow], other: str, key: str = "accuracy") -> list[float | None]:
    """Returns what an arm gains over another one, seed by seed; ``key`` is the value of the first."""
    (beside,) = [one for one in rows if one.group == row.group and one.arm == other]
    both = zip(row.found.each(key), beside.found.each("accuracy"), strict=True)
    return [None if a is None or b is None else a - b for a, b in both]


def paired(values: list[float | None]) -> str:
    """Returns the mean of paired differences ± its standard error as text."""
    there = [value for value in values if value is not None]
    if len(there) < 2:
        return spread(values, "+.2f")
    return f"{mean(there):+.2f} ± {statistics.stdev(there) / math.sqrt(len(there)):.2f}"


def has_solver(arm: str, plain: str) -> bool:
    """Whether an arm is neither plain nor a control without a solver."""
    return arm.removesuffix(TUNED) not in (plain, "first", *SIMPLE)


def solved(rows: list[TableRow], plain: str) -> list[TableRow]:
    """Returns the rows of the arms with a solver."""
    return [row for row in rows if has_solver(row.arm, plain)]


def report(rows: list[TableRow], plain: str, config: "TableConfig", title: str) -> list[Table]:
    """Returns the tables: accuracies beside the paper's, what the solvers gain, and the search."""
    finetuned = "'first' is the network before it is finetuned. " if any(row.arm == "first" for row in rows) else ""
    return [
        Table(
            f"Accuracy on the test split: {title}",
            ("", "paper (%)", "ours (%)", "ours - paper", "spread over trials", "sampling off in evaluation (%)", "lr",
             "p", "training (CPU s)"),
            [_accuracy(row) for row in rows],
            f"Ours: mean ± standard deviation over seeds {config.seeds}. {finetuned}'{plain}' has no solver and is "
            f"trained as long as the others. A network that samples is tested {config.trials} times. p: the dropout rate "
            "that a tuned arm chose.",
        ),  # fmt: skip
        Table(
            f"Points gained over '{plain}', with the same training",
            ("", "paper", "ours", "seeds that gain"),
            [_gain(row, rows, plain) for row in solved(rows, plain)],
        ),
        *differences(rows, plain, config),
        *search_tables(rows, config),
    ]


def differences(rows: list[TableRow], plain: str, config: "TableConfig") -> list[Table]:
    """Returns a table of the arms with a solver against all controls, if there are any."""
    if not config.controls:
        return []
    others = [plain, *(arm for arm in config.controls if not has_solver(arm, plain))]
    return [
        Table(
            "Differences to the controls (points), sampling as each arm was trained; with sampling off in brackets",
            ("", *(f"over '{other}'" for other in others)),
            [
                (f"{row.label}, {row.arm}", *(_difference(row, rows, other) for other in others))
                for row in solved(rows, plain)
            ],
            f"Paired by seed, mean ± standard error over seeds {config.seeds}.",
        )
    ]


def _difference(row: TableRow, rows: list[TableRow], other: str) -> str:
    text = paired(pairs(row, rows, other))
    off = pairs(row, rows, other, "deterministic_accuracy")
    return text if all(one is None for one in off) else f"{text} ({paired(off)})"


def search_tables(rows: list[TableRow], config: "TableConfig") -> list[Table]:
    """Returns a table of the search, if there was one."""
    if not any(row.search for row in rows):
        return []
    rates = config.search.rates
    return [
        Table(
            f"Search for the step size: accuracy on the validation split after {config.search.epochs} epochs (%)",
            ("lr", *(f"{rate:g}" for rate in rates)),
            [_searched(row, rates) for row in rows if row.search],
            f"For the seed {config.seeds[0]}; '-': not finite any more.",
        )
    ]


def _accuracy(row: TableRow) -> tuple[str, ...]:
    ours = row.accuracy
    return (
        f"{row.label}, {row.arm}",
        shown(row.paper, ".2f"),
        row.found.spread("accuracy", ".2f"),
        "" if row.paper is None or ours is None else f"{ours - row.paper:+.2f}",
        shown(row.found.mean("trial_spread"), ".3f"),
        shown(row.found.mean("deterministic_accuracy"), ".2f"),
        ", ".join(f"{rate:g}" for rate in row.rates),
        ", ".join(sorted({f"{one.values['p']:g}" for one in row.found if "p" in one.values})),
        shown(row.found.mean("training_cpu_seconds"), ".1f"),
    )


def _gain(row: TableRow, rows: list[TableRow], plain: str) -> tuple[str, ...]:
    # Where the paper finetunes, it reports only the network before finetuning.
    printed = {one.arm: one.paper for one in rows if one.group == row.group and one.paper is not None}
    theirs = printed.get(plain, printed.get("first"))
    ours = pairs(row, rows, plain)
    better = sum(one is not None and one > 0 for one in ours)
    return (
        f"{row.label}, {row.arm}",
        "" if row.paper is None or theirs is None else f"{row.paper - theirs:+.2f}",
        spread(ours, "+.2f"),
        f"{better} of {len(ours)}",
    )


def _searched(row: TableRow, rates: list[float]) -> tuple[str, ...]:
    # Of a tuned arm, the best dropout rate at each step size.
    found = [row.search.of(lr=rate).known("validation_accuracy") for rate in rates]
    return (f"{row.label}, {row.arm}", *(shown(max(one, default=None), ".2f", "-") for one in found))


def draw_table(rows: list[TableRow]) -> Any:
    """Draws accuracies beside the paper's, and the validation split over the epochs."""
    groups, arms = list(dict.fromkeys(row.group for row in rows)), list(dict.fromkeys(row.arm for row in rows))
    figure, axes = new_figure(1, 2, width=5.4, height=3.6)
    left, right = axes[0]
    for row in rows:
        number, colour = arms.index(row.arm), COLOURS[arms.index(row.arm) % len(COLOURS)]
        place = groups.index(row.group) + (number - (len(arms) - 1) / 2) * 0.8 / len(arms)
        first = row.group == groups[0]
        values = nan_for_none(row.found.each("accuracy"))
        left.plot([place] * len(values), values, "o", color=colour, alpha=0.7, label=row.arm if first else None)
        if row.paper is not None:
            left.plot([place], [row.paper], "D", color=colour, fillstyle="none")
    left.plot([], [], "D", color="#444444", fillstyle="none", label="paper")
    labels = [next(row.label for row in rows if row.group == group) for group in groups]
    left.set_xticks(range(len(groups)), labels)
    left.set_xlim(-0.5, len(groups) - 0.5)
    label(left, y="accuracy on the test split (%)")
    legend(left)
    for row in (row for row in rows if row.arm != "first"):
        curves = [one.values["curves"]["validation_accuracy"] for one in row.found]
        shared = min(map(len, curves))
        means = [sum(values) / len(values) for values in zip(*(curve[:shared] for curve in curves), strict=True)]
        number = arms.index(row.arm)
        colour = COLOURS[(groups.index(row.group) if len(groups) > 1 else number) % len(COLOURS)]
        style = line(number, color=colour, marker=".", label=f"{row.label}, {row.arm}")
        right.plot(range(1, shared + 1), means, **style)
    whole_numbers(right)
    label(right, "epoch", "accuracy on the validation split (%)")
    legend(right, outside=True)
    return figure
