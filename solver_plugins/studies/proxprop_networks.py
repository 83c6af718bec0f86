"""The two networks of the ProxProp paper, and training them with plain or preconditioned gradients."""

import itertools
import math
from typing import Any, Literal

from pydantic import Field
from torch import nn

from solver_plugins.config import StrictConfig
from solver_plugins.proxprop.proxprop import read_mode
from solver_plugins.studies.images import Images
from solver_plugins.studies.study import Context
from solver_plugins.studies.training import fit, scores
from solver_plugins.train.additions import Additions
from solver_plugins.train.config import OptimizerSection, ProxPropSection
from solver_plugins.train.errors import DataError, DivergedError
from solver_plugins.train.loop import Hooks
from solver_plugins.train.optimizer import TrainSettings
from solver_plugins.train.tensors import Shuffled

BACKPROP = "backprop"
REFERENCE = "of *Proximal Backpropagation* (Frerix, Möllenhoff, Moeller and Cremers, ICLR 2018)"


def check_arms(arms: list[str]) -> None:
    """Raises OptionError unless every arm is "backprop" or a mode of ProxProp."""
    for arm in arms:
        if arm != BACKPROP:
            read_mode(arm)


def label_of(arm: str) -> str:
    """Returns the name of an arm in tables."""
    return "BackProp" if arm == BACKPROP else f"ProxProp ({arm})"


class Training(StrictConfig):
    """How a network is trained, at a constant step size."""

    optimizer: Literal["nesterov", "adam"] = Field("nesterov", description="SGD with Nesterov's momentum, or Adam.")
    momentum: float = Field(0.95, ge=0, lt=1, description="Of nesterov.")
    batch_size: int = Field(500, ge=1, description="Images of a step.")
    epochs: int = Field(50, ge=1, description="Passes over the training split.")

    def settings(self, lr: float) -> TrainSettings:
        """Returns the settings of the training loop for a step size."""
        # torch refuses Nesterov's method without momentum.
        opt = "momentum" if self.optimizer == "nesterov" and not self.momentum else self.optimizer
        return TrainSettings(self.epochs, OptimizerSection(opt=opt, lr=lr, weight_decay=0.0, momentum=self.momentum))


def mlp(shape: tuple[int, int, int], hidden: list[int], classes: int) -> nn.Module:
    """Returns the fully connected network; the paper's is 3072-4000-1000-4000-10."""
    sizes = [math.prod(shape), *hidden]
    layers = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(sizes[-1], classes))


def conv_net(shape: tuple[int, int, int], filters: list[int], classes: int, norm: bool = False) -> nn.Module:
    """Returns the convolutional network; the paper's has 16, 20 and 20 filters of 5x5, each followed by pooling.

    This is the network of the paper's text; the authors' code leaves out the last pooling, and neither has a norm.

    Raises:
        DataError: If the images are too small.
    """
    channels, height, width = shape
    shrink = 2 ** len(filters)
    if min(height, width) < shrink:
        raise DataError(
            f"Expected images of at least {shrink}x{shrink} for {len(filters)} poolings; found {width}x{height}. Give "
            "fewer conv.filters."
        )
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise([channels, *filters]):
        layers += [nn.Conv2d(before, after, 5, padding=2), *([nn.BatchNorm2d(after)] if norm else [])]
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    last = filters[-1] * (height // shrink) * (width // shrink)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(last, classes))


def train_network(
    model: nn.Module, images: Images, settings: Training, mode: str, lr: float, tau_theta: float, seed: int,
    context: Context,
) -> dict[str, Any]:  # fmt: skip
    """Trains with plain gradients (mode "backprop") or ProxProp's ("exact", "cg3"), until the end or divergence.

    Returns:
        The values of a cell. Its curves have a point before the first epoch and after each one: the loss over the whole
        training split, the accuracy on the validation split in percent, and the seconds spent in training.
    """
    model = model.to(context.device)
    train, validation = (part.to(context.device) for part in (images.train, images.validation))
    losses: list[float] = []
    accuracies: list[float] = []
    seconds: list[float] = []

    def look(spent: float) -> None:
        loss = scores(model, train).loss
        if not math.isfinite(loss):
            raise DivergedError(f"The loss over the training split is {loss}.")
        losses.append(loss)
        accuracies.append(scores(model, validation).accuracy)
        seconds.append(spent)

    look(0.0)
    section = None if mode == BACKPROP else ProxPropSection(mode=mode, tau_theta=tau_theta)
    done = fit(
        model, Shuffled(train, settings.batch_size, seed, rest=True), settings.settings(lr), context,
        additions=Additions(section), hooks=Hooks(after_epoch=(lambda loop: look(loop.progress.seconds),)),
    )  # fmt: skip
    tested = images.test is not None and not done.diverged
    return {
        "diverged": done.diverged,
        "loss": None if done.diverged else losses[-1],
        "validation_accuracy": None if done.diverged else accuracies[-1],
        "best_validation_accuracy": max(accuracies, default=None),
        "test_accuracy": scores(model, images.test.to(context.device)).accuracy if tested else None,  # type: ignore[union-attr]
        "curves": {"loss": losses, "accuracy": accuracies, "seconds": seconds},
    }
