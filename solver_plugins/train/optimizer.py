"""The settings of a training loop, and timm's optimiser and schedule made from them."""

from dataclasses import dataclass
from typing import Any

import torch
from timm.optim import create_optimizer_v2, list_optimizers  # type: ignore[attr-defined]
from timm.scheduler.scheduler_factory import create_scheduler_v2
from torch import nn

from solver_plugins.blocks import separate_gates
from solver_plugins.errors import OptionError, did_you_mean
from solver_plugins.train.config import OptimizerSection, ScheduleSection


@dataclass(frozen=True)
class TrainSettings:
    """The settings of a training loop.

    Attributes:
        epochs: Passes over the training data.
        optimizer: The optimiser's name in timm, and its options.
        schedule: The schedule of the learning rate; None for a constant rate.
        decay_all: Whether weight decay applies to biases and norms, too.
    """

    epochs: int
    optimizer: OptimizerSection
    schedule: ScheduleSection | None = None
    decay_all: bool = False


def make_optimizer(settings: TrainSettings, model: nn.Module) -> torch.optim.Optimizer:
    """Makes the optimiser with timm's factory."""
    section = settings.optimizer
    trained: Any = [one for one in model.parameters() if one.requires_grad] if settings.decay_all else model
    try:
        made: torch.optim.Optimizer = create_optimizer_v2(
            trained, section.opt, section.lr, section.weight_decay, section.momentum, layer_decay=section.layer_decay,
            **section.args,
        )  # fmt: skip
    except (ValueError, TypeError, RuntimeError, AssertionError) as error:
        known = [str(name) for name in list_optimizers()]
        near = "" if section.opt in known else did_you_mean(section.opt, known).partition(" Options:")[0]
        raise OptionError(
            f"timm cannot make the optimizer {section.opt!r} with {section.args}: {error}.{near}"
        ) from error
    separate_gates(model, made, section.gate_rate)
    return made


def make_schedule(settings: TrainSettings, optimizer: torch.optim.Optimizer, steps: int) -> Any:
    """Makes timm's schedule for epochs of this many steps; None for a constant rate."""
    section = settings.schedule
    if section is None:
        return None
    made, _ = create_scheduler_v2(
        optimizer, section.sched, settings.epochs, decay_epochs=section.decay_epochs,
        decay_milestones=section.decay_milestones, decay_rate=section.decay_rate, min_lr=section.min_lr,
        warmup_lr=section.warmup_lr, warmup_epochs=section.warmup_epochs, step_on_epochs=False, updates_per_epoch=steps,
    )  # fmt: skip
    return made
