"""What a run predicts: one class of several, several labels at once, or numbers; each with its loss and measures.

The names are those of ``problem_type`` in transformers.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, get_args

import numpy
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from solver_plugins.prox.prior import in_float64
from solver_plugins.train.metrics import average_precision, measure

ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
Found = tuple[dict[str, float | None], list[float | None]]
"""Measures of all examples by name, and one number for each class or target."""


class Problem(ABC):
    """What is predicted.

    Attributes:
        name: Its ``problem_type`` in transformers.
        headings: The measures of its evaluation, in order, and what tables call them; the first one is the main one.
        smaller: Those of them that are better when they are smaller.
        each: What the number for each class or target is.
        digits: How many digits behind the point measures are shown with.
    """

    name: ClassVar[ProblemType]
    headings: ClassVar[Mapping[str, str]]
    smaller: ClassVar[frozenset[str]] = frozenset()
    each: ClassVar[str]
    digits: ClassVar[int] = 2

    @property
    def main(self) -> str:
        """The measure by which models are compared."""
        return next(iter(self.headings))

    @abstractmethod
    def loss(self, smoothing: float = 0.0, weights: Tensor | None = None) -> nn.Module:
        """Returns the loss of outputs and targets."""

    @abstractmethod
    def told(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        """Returns what the measures need of each example, row by row; the last one is its loss."""

    @abstractmethod
    def measure(self, told: Sequence[Tensor], names: int) -> Found:
        """Returns the measures of all examples, from what was told of them; ``names`` is how many outputs there are."""

    def told_as(self, key: str, measures: Mapping[str, float | None]) -> str:
        """Returns a measure as a line of progress shows it."""
        name, unit, _ = self.headings[key].partition(" (%)")
        return f"{name} {shown(measures[key], self.digits)}{'%' if unit else ''}"


class SingleLabel(Problem):
    """One class of several."""

    name = "single_label_classification"
    headings: ClassVar[Mapping[str, str]] = {
        "accuracy": "accuracy (%)", "top5": "top-5", "macro_f1": "macro F1", "ece": "ECE",
    }  # fmt: skip
    smaller = frozenset({"ece"})
    each = "accuracy (%)"

    def loss(self, smoothing: float = 0.0, weights: Tensor | None = None) -> nn.Module:
        return nn.CrossEntropyLoss(weights, label_smoothing=smoothing)

    def told(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        confidence, answers = outputs.softmax(-1).max(-1)
        likeliest = outputs.topk(min(5, outputs.shape[-1])).indices
        in_top5 = (likeliest == targets[:, None]).any(-1)
        return targets, answers, confidence, in_top5, functional.cross_entropy(outputs, targets, reduction="none")

    def measure(self, told: Sequence[Tensor], names: int) -> Found:
        labels, answers, confidence, in_top5 = told
        return measure(labels.numpy(), answers.numpy(), confidence.double().numpy(), in_top5.numpy(), names)


class MultiLabel(Problem):
    """Any number of labels at once: each is a question of its own, answered by yes from a probability of one half."""

    name = "multi_label_classification"
    headings: ClassVar[Mapping[str, str]] = {
        "map": "mean average precision (%)", "macro_f1": "macro F1", "micro_f1": "micro F1", "exact": "all right (%)",
    }  # fmt: skip
    each = "average precision (%)"

    def loss(self, smoothing: float = 0.0, weights: Tensor | None = None) -> nn.Module:
        return nn.BCEWithLogitsLoss(pos_weight=weights)

    def told(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        targets = targets.to(outputs.dtype)
        losses = functional.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
        return in_float64(outputs), targets > 0.5, losses.mean(-1)

    def measure(self, told: Sequence[Tensor], names: int) -> Found:
        scores, truth = told[0].numpy(), told[1].numpy()
        answers = scores >= 0
        hits, said, there = ((a & b).sum(0) for a, b in ((answers, truth), (answers, answers), (truth, truth)))
        met = said + there > 0
        f1 = 2 * hits[met] / (said + there)[met]
        each = [average_precision(scores[:, place], truth[:, place]) for place in range(names)]
        known = [value for value in each if value is not None]
        total = said.sum() + there.sum()
        numbers = {
            "map": 100 * float(numpy.mean(known)) if known else None,
            "macro_f1": 100 * float(f1.mean()) if met.any() else None,
            "micro_f1": 100 * float(2 * hits.sum() / total) if total else None,
            "exact": 100 * float((answers == truth).all(1).mean()),
        }
        return numbers, [None if value is None else 100 * value for value in each]


class Regression(Problem):
    """One number, or several."""

    name = "regression"
    headings: ClassVar[Mapping[str, str]] = {"rmse": "RMSE", "mae": "mean absolute error", "r2": "R2"}
    smaller = frozenset({"rmse", "mae"})
    each = "RMSE"
    digits = 4

    def loss(self, smoothing: float = 0.0, weights: Tensor | None = None) -> nn.Module:
        return nn.MSELoss()

    def told(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        outputs, targets = in_float64(outputs), in_float64(targets)
        return outputs, targets, (outputs - targets).square().mean(-1)

    def measure(self, told: Sequence[Tensor], names: int) -> Found:
        outputs, targets = told[0].numpy(), told[1].numpy()
        errors: NDArray[Any] = ((outputs - targets) ** 2).mean(0)
        spread = targets.var(0)
        known = spread > 0
        numbers = {
            "rmse": float(numpy.sqrt(errors.mean())),
            "mae": float(numpy.abs(outputs - targets).mean()),
            "r2": float((1 - errors[known] / spread[known]).mean()) if known.any() else None,
        }
        return numbers, [float(value) for value in numpy.sqrt(errors)]


def shown(value: float | None, digits: int) -> str:
    """Returns a number for a table; a dash for one that is not defined."""
    return "-" if value is None else f"{value:.{digits}f}"


PROBLEMS: Mapping[str, Problem] = {one.name: one for one in (SingleLabel(), MultiLabel(), Regression())}
assert set(PROBLEMS) == set(get_args(ProblemType))
SINGLE: ProblemType = "single_label_classification"
