"""Loss, accuracy and other measures on a split: every example counts once; a model that samples is evaluated often."""

import math
import statistics
from dataclasses import asdict, dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional
from tqdm.auto import tqdm

from solver_plugins.blocks import blocks_of
from solver_plugins.train.classification import logits_of
from solver_plugins.train.errors import DataError
from solver_plugins.train.launch import Alone
from solver_plugins.train.metrics import Measures, measure
from solver_plugins.train.randomness import seeded


@dataclass(frozen=True)
class Scores:
    """What an evaluation found.

    Attributes:
        accuracy: Percentage of correct answers, averaged over the trials.
        accuracy_std: Standard deviation over the trials; 0 for a single one.
        loss: Mean cross entropy: the negative log-likelihood.
        trials: How many there were.
        count: How many examples.
        top5: See :class:`~solver_plugins.train.metrics.Measures`; from here on measures are those of the last trial.
        macro_f1: See there.
        ece: See there.
        per_class: See there.
    """

    accuracy: float
    accuracy_std: float
    loss: float
    trials: int
    count: int
    top5: float | None
    macro_f1: float
    ece: float
    per_class: list[float | None]


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
    found: list[tuple[Measures, float]] = []
    bar = tqdm(
        total=trials * len(loader), desc="evaluate", unit="batch", leave=False,
        disable=None if accelerator.is_local_main_process else True,
    )  # fmt: skip
    try:
        for trial in range(trials):
            with seeded(*place, trial, accelerator.process_index, devices=True):
                found.append(_pass(accelerator, model, loader, dtype, count, bar))
    finally:
        bar.close()
        model.train(training)
    accuracies = [measures.accuracy for measures, _ in found]
    spread = statistics.stdev(accuracies) if trials > 1 else 0.0
    last = asdict(found[-1][0]) | {"accuracy": statistics.fmean(accuracies)}
    return Scores(
        accuracy_std=spread, loss=statistics.fmean(loss for _, loss in found), trials=trials, count=count, **last
    )


def _pass(
    accelerator: Accelerator | Alone, model: nn.Module, loader: Any, dtype: torch.dtype, count: int, bar: Any
) -> tuple[Measures, float]:
    parts: list[list[Tensor]] = []
    classes = 0
    for batch in loader:
        with accelerator.autocast():
            logits = logits_of(model, batch, dtype)
        labels, classes = batch["labels"], logits.shape[-1]
        confidence, answers = logits.softmax(-1).max(-1)
        likeliest = logits.topk(min(5, classes)).indices
        told = (
            labels, answers, confidence, (likeliest == labels[:, None]).any(-1),
            functional.cross_entropy(logits, labels, reduction="none"),
        )  # fmt: skip
        # This also drops the examples that pad the last batch of several processes.
        parts.append([part.cpu() for part in accelerator.gather_for_metrics(told)])
        bar.update()
    labels, answers, confidence, in_top5, losses = (torch.cat(column) for column in zip(*parts, strict=True))
    if len(labels) != count:
        raise DataError(f"Expected {count} examples in the evaluation; {len(labels)} came back from the processes.")
    measures = measure(labels.numpy(), answers.numpy(), confidence.double().numpy(), in_top5.numpy(), classes)
    return measures, math.fsum(losses.double().tolist()) / count
