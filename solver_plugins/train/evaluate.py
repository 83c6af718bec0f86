"""Loss, accuracy and other measures on a split: every example counts once; a model that samples is evaluated often."""

import math
import statistics
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from tqdm.auto import tqdm

from solver_plugins.blocks import blocks_of
from solver_plugins.train.classification import logits_of
from solver_plugins.train.errors import DataError
from solver_plugins.train.launch import Alone
from solver_plugins.train.problems import PROBLEMS, SINGLE, Found, Problem
from solver_plugins.train.randomness import seeded


@dataclass(frozen=True)
class Scores:
    """What an evaluation found.

    Attributes:
        loss: The mean loss: for a classifier the negative log-likelihood.
        trials: How many passes there were.
        count: How many examples.
        measures: The measures of the problem, by name: the first one is the mean over the trials, the others are those
            of the last trial.
        spread: The standard deviation of the first one over the trials; 0 for a single one.
        per_class: A number for each class or target; see the problem's ``each``.
    """

    loss: float
    trials: int
    count: int
    measures: dict[str, float | None]
    spread: float
    per_class: list[float | None]

    @property
    def accuracy(self) -> float:
        """The percentage of right answers of a classifier."""
        value = self.measures["accuracy"]
        assert value is not None
        return value

    @property
    def ece(self) -> float:
        """The expected calibration error of a classifier, in percent."""
        value = self.measures["ece"]
        assert value is not None
        return value

    def flat(self) -> dict[str, Any]:
        """Returns everything under its own name, as in ``result.json``."""
        main = next(iter(self.measures))
        return {
            **self.measures, f"{main}_std": self.spread, "loss": self.loss, "trials": self.trials, "count": self.count,
            "per_class": self.per_class,
        }  # fmt: skip


def samples_in_evaluation(model: nn.Module) -> bool:
    """Whether a model samples in evaluation, so that two evaluations differ."""
    return any(
        block.solver.samples != "nothing" and block.solver.samples_in_evaluation for block in blocks_of(model).values()
    )


@torch.no_grad()
def evaluate(
    accelerator: Accelerator | Alone,
    model: nn.Module,
    loader: Any,
    dtype: torch.dtype,
    place: tuple[int | str, ...],
    trials: int,
    problem: Problem = PROBLEMS[SINGLE],
) -> Scores:
    """Evaluates a model; its mode and the random state stay as they were.

    Args:
        accelerator: Of the run, or the process by itself.
        model: The model, prepared or not.
        loader: Batches of the split, prepared, with the split as their ``dataset``.
        dtype: The dtype of the inputs.
        place: Where in the run this is; it seeds the random numbers of a model that samples.
        trials: How often a model that samples in evaluation is evaluated; any other is evaluated once.
        problem: What is predicted.
    """
    count = len(loader.dataset)
    trials = trials if samples_in_evaluation(model) else 1
    training = model.training
    model.eval()
    found: list[tuple[Found, float]] = []
    bar = tqdm(
        total=trials * len(loader), desc="evaluate", unit="batch", leave=False,
        disable=None if accelerator.is_local_main_process else True,
    )  # fmt: skip
    try:
        for trial in range(trials):
            with seeded(*place, trial, accelerator.process_index, devices=True):
                found.append(_pass(accelerator, model, loader, dtype, problem, bar))
    finally:
        bar.close()
        model.train(training)
    values = [measures[problem.main] for (measures, _), _ in found]
    known = [value for value in values if value is not None]
    spread = statistics.stdev(known) if len(known) > 1 else 0.0
    last, per_class = found[-1][0]
    main = {problem.main: statistics.fmean(known) if known else None}
    loss = statistics.fmean(one for _, one in found)
    return Scores(loss, trials, count, {**last, **main}, spread, per_class)


def _pass(
    accelerator: Accelerator | Alone, model: nn.Module, loader: Any, dtype: torch.dtype, problem: Problem, bar: Any
) -> tuple[Found, float]:
    parts: list[list[Tensor]] = []
    names, count = 0, len(loader.dataset)
    for batch in loader:
        with accelerator.autocast():
            outputs = logits_of(model, batch, dtype)
        names = outputs.shape[-1]
        # This also drops the examples that pad the last batch of several processes.
        told = accelerator.gather_for_metrics(problem.told(outputs, batch["labels"]))
        parts.append([part.cpu() for part in told])
        bar.update()
    *told, losses = (torch.cat(column) for column in zip(*parts, strict=True))
    if len(losses) != count:
        raise DataError(f"Expected {count} examples in the evaluation; {len(losses)} came back from the processes.")
    return problem.measure(told, names), math.fsum(losses.double().tolist()) / count
