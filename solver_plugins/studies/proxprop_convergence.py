"""Figures 2 and 3 of the ProxProp paper: progress by epoch and by time; and the networks of the ProxProp studies."""

import itertools
import math
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import Field
from torch import nn

from solver_plugins.config import StrictConfig
from solver_plugins.proxprop.proxprop import read_mode
from solver_plugins.studies.figures import label, legend, line, new_figure, whole_numbers
from solver_plugins.studies.images import ImageConfig, Images, ImageStudy
from solver_plugins.studies.study import Cell, Context, Results, Table, register_study
from solver_plugins.studies.training import fit, scores
from solver_plugins.train.additions import Additions
from solver_plugins.train.config import OptimizerSection, ProxPropSection
from solver_plugins.train.errors import DataError, DivergedError
from solver_plugins.train.loop import Hooks
from solver_plugins.train.optimizer import TrainSettings
from solver_plugins.train.tensors import Shuffled

BACKPROP = "backprop"
REFERENCE = "of *Proximal Backpropagation* (Frerix, Möllenhoff, Moeller and Cremers, ICLR 2018)"


def _check_mode(mode: str) -> str:
    read_mode(mode)
    return mode


Mode = Annotated[str, pydantic.AfterValidator(_check_mode)]
"""A mode of ProxProp."""
Arm = Annotated[str, pydantic.AfterValidator(lambda arm: arm if arm == BACKPROP else _check_mode(arm))]
"""What is compared: "backprop", or a mode of ProxProp."""


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
    DataError if the images are too small.
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

    It returns the values of a cell. Its curves have a point before the first epoch and after each one: the loss over
    the whole training split, the accuracy on the validation split in percent, and the seconds spent in training.
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


PAPER: dict[tuple[str, str], tuple[str, str]] = {
    ("mlp", BACKPROP): ("", "about 54"),
    ("mlp", "cg3"): ("", "about 56"),
    ("mlp", "cg5"): ("", "about 56"),
    ("mlp", "cg10"): ("", "about 56"),
    ("conv", BACKPROP): ("71.7", "69.6"),
    ("conv", "cg3"): ("72.9 (better of cg3, cg10)", "70.7 (not said which)"),
    ("conv", "cg10"): ("72.9 (better of cg3, cg10)", "70.7 (not said which)"),
}
"""Best validation accuracy and test accuracy, as far as the text says them."""


class _Network(StrictConfig):
    arms: list[Arm] = Field(min_length=1, description="'backprop', 'exact' or 'cgN'.")
    training: Training = Training()
    lr: float = Field(gt=0, description="Step size tau of ProxProp.")
    backprop_lr: float = Field(gt=0, description="Step size of plain gradients.")
    tau_theta: float = Field(gt=0, description="Step size of the implicit step.")


class MlpSection(_Network):
    """The fully connected network of Fig. 2."""

    hidden: list[int] = Field([4000, 1000, 4000], min_length=1, description="Widths of the hidden layers.")

    def make(self, images: Images) -> nn.Module:
        return mlp(images.shape, self.hidden, images.classes)


class ConvSection(_Network):
    """The convolutional network of Fig. 3."""

    filters: list[int] = Field([16, 20, 20], min_length=1, description="Of the convolutions.")

    def make(self, images: Images) -> nn.Module:
        return conv_net(images.shape, self.filters, images.classes)


class ProgressConfig(ImageConfig):
    """Settings of Figures 2 and 3."""

    mlp: MlpSection | None = Field(None, description="Fig. 2; null to leave it out.")
    conv: ConvSection | None = Field(None, description="Fig. 3; null to leave it out.")

    @pydantic.model_validator(mode="after")
    def _something(self) -> Self:
        if self.mlp is None and self.conv is None:
            raise ValueError("expected mlp (Fig. 2), conv (Fig. 3) or both; found neither")
        return self


@register_study
class ProxPropConvergence(ImageStudy[ProgressConfig]):
    """Progress of ProxProp and plain gradients, by epoch and by time."""

    name = "proxprop-convergence"
    tags = ("proxprop", "images")
    reference = f"Fig. 2 and Fig. 3 {REFERENCE}"
    Config = ProgressConfig

    def prepare(self) -> None:
        super().prepare()
        for section in self._networks().values():
            section.make(self._images)

    def _networks(self) -> dict[str, MlpSection | ConvSection]:
        both = {"mlp": self.config.mlp, "conv": self.config.conv}
        return {name: section for name, section in both.items() if section is not None}

    def cells(self) -> list[Cell]:
        return [
            cell
            for name, section in self._networks().items()
            for cell in Cell.grid(network=[name], arm=section.arms, seed=self.config.seeds)
        ]

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        section = self._networks()[str(cell["network"])]
        lr, model = section.backprop_lr if cell.arm == BACKPROP else section.lr, section.make(self._images)
        values = train_network(
            model, self._images, section.training, cell.arm, lr, section.tau_theta, cell.seed, context
        )
        return {**values, "training_seconds": values["curves"]["seconds"][-1]}

    def tables(self, results: Results) -> list[Table]:
        ours = ("full-batch loss", "best validation (%)", "paper", "test (%)", "paper", "training")
        rows = []
        for name, section in self._networks().items():
            for arm in section.arms:
                found = results.of(arm=arm, network=name)
                validation, test = PAPER.get((name, arm), ("", ""))
                rows.append((
                    f"{name}, {label_of(arm)}",
                    found.spread("loss", ".3g"),
                    found.spread("best_validation_accuracy", ".1f"), validation,
                    found.spread("test_accuracy", ".1f"), test,
                    f"{found.spread('training_seconds', '.0f')} s",
                ))  # fmt: skip
        epochs = ", ".join(f"{name} {section.training.epochs}" for name, section in self._networks().items())
        note = (
            f"Ours: {self.config.data.train!r} of {self.config.data.name!r}, epochs: {epochs}, seeds "
            f"{self.config.seeds}. Paper: 45000 images of CIFAR-10, 50 epochs. '-': diverged. Times: training alone."
        )
        return [Table("After the last epoch", ("network, gradient", *ours), rows, note)]

    def draw(self, results: Results) -> Any:
        sections = self._networks()
        figure, axes = new_figure(len(sections), 3)
        for (name, section), (by_epoch, by_time, accuracy) in zip(sections.items(), axes, strict=True):
            for index, arm in enumerate(section.arms):
                for one in results.of(arm=arm, network=name, seed=self.config.seeds[0]):
                    curves = one.values["curves"]
                    style = line(index, label=label_of(arm))
                    by_epoch.plot(range(len(curves["loss"])), curves["loss"], **style)
                    by_time.plot(curves["seconds"], curves["loss"], **style)
                    accuracy.plot(curves["seconds"], curves["accuracy"], **style)
            optimizer = "Adam" if section.training.optimizer == "adam" else "Nesterov SGD"
            kind = "convolutional" if name == "conv" else "fully connected"
            label(by_epoch, "epoch", "full-batch loss", f"{kind}, {optimizer}")
            label(by_time, "training time (s)", "full-batch loss")
            label(accuracy, "training time (s)", "validation accuracy (%)")
            legend(by_epoch)
            whole_numbers(by_epoch)
        return figure
