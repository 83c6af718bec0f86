"""The two networks of the ProxProp paper, and training them with plain or preconditioned gradients."""

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from solver_plugins.config import StrictConfig
from solver_plugins.proxprop import NonFiniteError, ProxProp
from solver_plugins.studies.base import Context
from solver_plugins.studies.images import Images, Part
from solver_plugins.train.randomness import seed_for

BACKPROP = "backprop"
EVALUATION_BATCH = 500


class Training(StrictConfig):
    """How a network is trained."""

    optimizer: Literal["nesterov", "adam"] = Field("nesterov", description="SGD with Nesterov's momentum, or Adam.")
    momentum: float = Field(0.95, ge=0, lt=1, description="Of nesterov.")
    batch_size: int = Field(500, ge=1, description="Images of a step.")
    epochs: int = Field(50, ge=1, description="Passes over the training split.")


@dataclass
class History:
    """What was measured before the first epoch and after each one, until the end or until training diverged.

    Attributes:
        loss: Over the whole training split, without ProxProp or dropout.
        accuracy: On the validation split, in percent.
        seconds: Of training, without evaluation.
        diverged: Whether a loss, an activation or a gradient was not finite any more.
        test_accuracy: On the test split at the end, in percent, if there is one and training did not diverge.
    """

    loss: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    diverged: bool = False
    test_accuracy: float | None = None

    def values(self) -> dict[str, Any]:
        """Returns what a cell's file holds."""
        return {
            "diverged": self.diverged,
            "loss": None if self.diverged else self.loss[-1],
            "validation_accuracy": None if self.diverged else self.accuracy[-1],
            "best_validation_accuracy": max(self.accuracy, default=None),
            "test_accuracy": self.test_accuracy,
            "curves": {"loss": self.loss, "accuracy": self.accuracy, "seconds": self.seconds},
        }


def mlp(shape: tuple[int, int, int], hidden: list[int], classes: int) -> nn.Module:
    """Returns the fully connected network; the paper's is 3072-4000-1000-4000-10."""
    sizes = [math.prod(shape), *hidden]
    layers = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(sizes[-1], classes))


def conv_net(shape: tuple[int, int, int], filters: list[int], classes: int) -> nn.Module:
    """Returns the convolutional network; the paper's has 16, 20 and 20 filters of 5x5, each followed by pooling.

    The authors' code leaves the last pooling out; this is the network of the text.
    """
    channels, height, width = shape
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise([channels, *filters]):
        layers += [nn.Conv2d(before, after, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    shrink = 2 ** len(filters)
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(filters[-1] * (height // shrink) * (width // shrink), classes)
    )


def train_network(
    model: nn.Module, images: Images, settings: Training, mode: str, lr: float, tau_theta: float, seed: int,
    context: Context,
) -> History:  # fmt: skip
    """Trains with plain gradients (mode "backprop") or ProxProp's ("exact", "cg3"), until the end or divergence."""
    model = model.to(context.device)
    parts = [part.to(context.device) for part in (images.train, images.validation)]
    train, validation = parts
    optimizer = _optimizer(settings, model, lr)
    prox = None if mode == BACKPROP else ProxProp(model, mode=mode, tau_theta=tau_theta).attach(optimizer)
    history = History()
    spent = 0.0
    try:
        for epoch in context.steps(settings.epochs + 1):
            if epoch > 0:
                start = time.perf_counter()
                _epoch(model, optimizer, train, _order(len(train), settings.batch_size, seed, epoch))
                spent += time.perf_counter() - start
            # Nothing that is only looked at may be heard by ProxProp; no gradient reaches it.
            loss, _ = evaluate(model, train)
            history.loss.append(_finite(loss))
            history.accuracy.append(evaluate(model, validation)[1])
            history.seconds.append(spent)
    except (_DivergedError, NonFiniteError):
        history.diverged = True
    finally:
        if prox is not None:
            prox.detach()
    if images.test is not None and not history.diverged:
        history.test_accuracy = evaluate(model, images.test.to(context.device))[1]
    return history


class _DivergedError(ArithmeticError):
    """A loss that is not finite."""


def _finite(loss: float) -> float:
    if not math.isfinite(loss):
        raise _DivergedError
    return loss


def _optimizer(settings: Training, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    if settings.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=lr)
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=settings.momentum, nesterov=settings.momentum > 0)


def _order(count: int, size: int, seed: int, epoch: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed_for(seed, "order", epoch))
    return iter(torch.randperm(count, generator=generator).split(size))


def _epoch(model: nn.Module, optimizer: torch.optim.Optimizer, train: Part, order: Iterator[Tensor]) -> None:
    model.train()
    for rows in order:
        loss = functional.cross_entropy(model(train.images[rows]), train.labels[rows])
        _finite(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def evaluate(model: nn.Module, part: Part, size: int = EVALUATION_BATCH) -> tuple[float, float]:
    """Returns mean loss and accuracy, in percent, from batches of this size."""
    model.eval()
    loss, right = 0.0, 0
    for images, labels in zip(part.images.split(size), part.labels.split(size), strict=True):
        outputs = model(images)
        loss += float(functional.cross_entropy(outputs, labels, reduction="sum"))
        right += int((outputs.argmax(-1) == labels).sum())
    return loss / len(part), 100 * right / len(part)
