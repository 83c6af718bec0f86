"""The loss of a run: that of its problem, with label smoothing, mixup and a penalty where they are asked for."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from timm.data.mixup import Mixup
from timm.loss.cross_entropy import SoftTargetCrossEntropy
from torch import Tensor, nn

from solver_plugins.errors import OptionError
from solver_plugins.train.data import Batch
from solver_plugins.train.problems import PROBLEMS, SINGLE, Problem
from solver_plugins.train.sections import MixupSection


def inputs_of(batch: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, ...] | dict[str, Tensor]:
    """Returns the positional arguments of the model's forward for a batch, or the ones by name."""
    if "image" in batch:
        return (batch["image"].to(dtype),)
    return {key: value for key, value in batch.items() if key != "labels"}


def logits_of(model: nn.Module, batch: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Runs a model of timm or transformers on a batch."""
    inputs = inputs_of(batch, dtype)
    result: Any = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    logits: Tensor = getattr(result, "logits", result)
    # A loss needs more precision than autocast leaves.
    return logits if logits.dtype == torch.float64 else logits.float()


class Classification:
    """The loss of a model on a batch: an objective of the training loop.

    Args:
        accelerator: Provides autocast.
        dtype: The dtype of the inputs.
        label_smoothing: Share of each label that goes to all classes.
        mixup: How images are mixed, and the number of classes; None for no mixing.
        class_weights: One weight for each class.
        problem: What is predicted.
        penalty: Returns the term to add to the loss after a forward pass on a batch, or None.
    """

    def __init__(
        self,
        accelerator: Any,
        dtype: torch.dtype = torch.float32,
        label_smoothing: float = 0.0,
        mixup: tuple[MixupSection, int] | None = None,
        penalty: Callable[[Batch], Tensor | None] | None = None,
        class_weights: Tensor | None = None,
        problem: Problem = PROBLEMS[SINGLE],
    ):
        self.accelerator, self.dtype, self.penalty = accelerator, dtype, penalty
        self.mixup: Any = None
        self.loss: nn.Module = problem.loss(label_smoothing, class_weights)
        if mixup is not None:
            section, classes = mixup
            self.mixup = Mixup(
                section.mixup, section.cutmix, prob=section.prob, switch_prob=section.switch_prob,
                label_smoothing=label_smoothing, num_classes=classes,
            )  # fmt: skip
            self.loss = SoftTargetCrossEntropy()

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns the loss."""
        targets = batch["labels"]
        if self.mixup is not None:
            batch["image"], targets = self.mixup(batch["image"], targets)
        try:
            with self.accelerator.autocast():
                logits = logits_of(model, batch, self.dtype)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise OptionError(
                f"Expected at least two examples per process and pass: this network has a BatchNorm, and "
                f"{len(targets)} is too few for its statistics. Raise batch_size, or lower accumulation."
            ) from None
        loss: Tensor = self.loss(logits, targets.to(logits.dtype) if targets.is_floating_point() else targets)
        added = None if self.penalty is None else self.penalty(batch)
        return loss if added is None else loss + added
