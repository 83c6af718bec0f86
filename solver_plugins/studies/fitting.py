"""Training a classifier of images by one schedule that is fixed beforehand."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from solver_plugins.config import StrictConfig
from solver_plugins.equilibrium import DivergenceError
from solver_plugins.studies.images import Part, scaled
from solver_plugins.train.randomness import seed_for


class Fitting(StrictConfig):
    """The schedule: the same for all arms."""

    optimizer: Literal["sgd", "adamw"] = Field("sgd", description="SGD with momentum, or AdamW.")
    lr: float = Field(0.1, gt=0, description="Step size at the beginning.")
    momentum: float = Field(0.9, ge=0, lt=1, description="Of sgd.")
    weight_decay: float = Field(3e-4, ge=0, description="On all parameters.")
    decay_epochs: int | None = Field(None, ge=1, description="Multiply lr so often; null for a cosine to zero.")
    decay_rate: float = Field(0.5, gt=0, le=1, description="The factor of decay_epochs.")
    batch_size: int = Field(128, ge=1, description="Images of a step; a smaller rest of an epoch is left out.")
    epochs: int = Field(200, ge=1, description="Passes over the training split.")
    shift: int = Field(0, ge=0, description="Images are shifted by up to so many pixels, both ways; 0 for not at all.")
    flip: bool = Field(False, description="Whether every other image is mirrored, at random.")


@dataclass(frozen=True)
class Fitted:
    """How training went.

    Attributes:
        loss: Of the last step; None if training diverged.
        cpu_seconds: Of training alone.
        steps: Steps of the optimizer.
    """

    loss: float | None
    cpu_seconds: float
    steps: int


def fit(
    model: nn.Module,
    train: Part,
    settings: Fitting,
    seed: int,
    epochs: Iterable[int],
    *,
    extra: Callable[[], Tensor] | None = None,
    after: Callable[[], None] | None = None,
) -> Fitted:
    """Trains the parameters that want a gradient, until the end or until a loss or a parameter is not finite.

    Args:
        model: The model, on the device of the images.
        train: What it is trained on; anything that the model takes may stand for images.
        settings: The schedule.
        seed: Of the order of the images.
        epochs: Counts from 0 to ``settings.epochs - 1``, perhaps with a progress bar.
        extra: What is added to the loss of each step, once the model has run.
        after: Called after each step.
    """
    parameters = [one for one in model.parameters() if one.requires_grad]
    optimizer = _optimizer(parameters, settings)
    size = min(settings.batch_size, len(train))
    each = len(train) // size
    model.train()
    start, loss, steps = time.process_time(), math.nan, 0
    for epoch in epochs:
        generator = torch.Generator().manual_seed(seed_for(seed, "order", epoch))
        for step, rows in enumerate(torch.randperm(len(train), generator=generator)[: each * size].split(size)):
            rate = _rate(settings, epoch, step / each)
            for group in optimizer.param_groups:
                group["lr"] = rate
            try:
                images = augmented(train.images[rows], settings, generator)
                value = functional.cross_entropy(model(images), train.labels[rows])
                if extra is not None:
                    value = value + extra()
            except DivergenceError:
                return Fitted(None, time.process_time() - start, steps)
            loss = float(value.detach())
            if not math.isfinite(loss):
                return Fitted(None, time.process_time() - start, steps)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            steps += 1
            if after is not None:
                after()
    # The last step may have gone too far, and no loss has seen it.
    diverged = not all(bool(torch.isfinite(one).all()) for one in parameters)
    return Fitted(None if diverged else loss, time.process_time() - start, steps)


def _optimizer(parameters: list[nn.Parameter], settings: Fitting) -> torch.optim.Optimizer:
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(parameters, settings.lr, weight_decay=settings.weight_decay)
    return torch.optim.SGD(parameters, settings.lr, settings.momentum, weight_decay=settings.weight_decay)


def augmented(images: Tensor, settings: Fitting, generator: torch.Generator) -> Tensor:
    """Returns images (N, C, H, W) mirrored and shifted at random, as the settings say; what they lack is reflected.

    The random numbers are the generator's, on the CPU, so that all arms of a seed see the same images.
    """
    count, pad = len(images), settings.shift
    if settings.flip:
        mirrored = (torch.rand(count, generator=generator) < 0.5).to(images.device)
        images = torch.where(mirrored[:, None, None, None], images.flip(-1), images)
    if pad == 0:
        return images
    height, width = images.shape[-2:]
    windows = functional.pad(images, (pad,) * 4, mode="reflect").unfold(2, height, 1).unfold(3, width, 1)
    down, right = (torch.randint(2 * pad + 1, (count,), generator=generator).to(images.device) for _ in range(2))
    return windows[torch.arange(count, device=images.device), :, down, right]


def _rate(settings: Fitting, epoch: int, part: float) -> float:
    if settings.decay_epochs is not None:
        return settings.lr * float(settings.decay_rate ** (epoch // settings.decay_epochs))
    return settings.lr * 0.5 * (1 + math.cos(math.pi * (epoch + part) / settings.epochs))


def normalised(part: Part, known: Part, device: torch.device, size: int | None = None) -> Part:
    """Returns a split less the mean of a known one, over its spread, in another size if one is given."""
    return scaled(part, known.images.mean(), known.images.std(), device, size)


def spread(values: list[float | None], form: str) -> str:
    """Returns mean ± standard deviation of what is there, and how much is not."""
    there = torch.tensor([value for value in values if value is not None], dtype=torch.float64)
    if not len(there):
        return "-"
    text = f"{float(there.mean()):{form}}"
    if len(there) > 1:
        text += f" ± {float(there.std()):{form}}"
    gone = len(values) - len(there)
    return text + (f" (- in {gone} of {len(values)})" if gone else "")


def mean(values: list[float | None]) -> float | None:
    """Returns the mean of what is there; None for nothing."""
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None
