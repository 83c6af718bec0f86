"""Accuracy and loss on a split: every example counts once, and a model that samples is evaluated several times."""

import math
import statistics
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional
from tqdm.auto import tqdm

from solver_plugins.blocks import blocks_of
from solver_plugins.train.classification import logits_of
from solver_plugins.train.errors import DataError
from solver_plugins.train.launch import Alone
from solver_plugins.train.randomness import seeded


@dataclass(frozen=True)
class Scores:
    """What an evaluation found.

    Attributes:
        accuracy: Percentage of correct answers, averaged over the trials.
        accuracy_std: Standard deviation over the trials; 0 for a single one.
        loss: Mean cross entropy.
        trials: How many there were.
        count: How many examples.
    """

    accuracy: float
    accuracy_std: float
    loss: float
    trials: int
    count: int


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
) -> Scores:
    """Evaluates a model; its mode and the random state stay as they were.

    Args:
        accelerator: Of the run, or the process by itself.
        model: The model, prepared or not.
        loader: Batches of the split, prepared, with the split as their ``dataset``.
        dtype: The dtype of the inputs.
        place: Where in the run this is; it seeds the random numbers of a model that samples.
        trials: How often a model that samples in evaluation is evaluated; any other is evaluated once.
    """
    count = len(loader.dataset)
    trials = trials if samples_in_evaluation(model) else 1
    training = model.training
    model.eval()
    accuracies, losses = [], []
    bar = tqdm(
        total=trials * len(loader), desc="evaluate", unit="batch", leave=False,
        disable=None if accelerator.is_local_main_process else True,
    )  # fmt: skip
    try:
        for trial in range(trials):
            with seeded(*place, trial, accelerator.process_index, devices=True):
                right, loss = _pass(accelerator, model, loader, dtype, count, bar)
            accuracies.append(100 * right / count)
            losses.append(loss / count)
    finally:
        bar.close()
        model.train(training)
    spread = statistics.stdev(accuracies) if trials > 1 else 0.0
    return Scores(statistics.fmean(accuracies), spread, statistics.fmean(losses), trials, count)


def _pass(
    accelerator: Accelerator | Alone, model: nn.Module, loader: Any, dtype: torch.dtype, count: int, bar: Any
) -> tuple[int, float]:
    right, seen, losses = 0, 0, []
    for batch in loader:
        with accelerator.autocast():
            logits = logits_of(model, batch, dtype)
        labels = batch["labels"]
        loss = functional.cross_entropy(logits, labels, reduction="none")
        hits = logits.argmax(-1) == labels
        # This also drops the examples that pad the last batch of several processes.
        gathered, hits = accelerator.gather_for_metrics((loss, hits))
        right += int(hits.sum())
        seen += len(hits)
        losses += gathered.double().tolist()
        bar.update()
    if seen != count:
        raise DataError(f"Expected {count} examples in the evaluation; {seen} came back from the processes.")
    return right, math.fsum(losses)
