"""Figures 2 and 3 of the ProxProp paper: progress by epoch and by time, fully connected and convolutional."""

from typing import Any, Self

import pydantic
from pydantic import Field
from torch import nn

from solver_plugins.config import StrictConfig
from solver_plugins.studies import proxprop_networks as networks
from solver_plugins.studies.figures import label, legend, line, new_figure, whole_numbers
from solver_plugins.studies.images import ImageConfig, Images, ImageStudy
from solver_plugins.studies.proxprop_networks import BACKPROP, REFERENCE, Training, label_of, train_network
from solver_plugins.studies.study import Cell, Context, Results, Table, register_study

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
    arms: list[str] = Field(min_length=1, description="'backprop', 'exact' or 'cgN'.")
    training: Training = Training()
    lr: float = Field(gt=0, description="Step size tau of ProxProp.")
    backprop_lr: float = Field(gt=0, description="Step size of plain gradients.")
    tau_theta: float = Field(gt=0, description="Step size of the implicit step.")

    @pydantic.field_validator("arms")
    @classmethod
    def _known(cls, arms: list[str]) -> list[str]:
        networks.check_arms(arms)
        return arms


class MlpSection(_Network):
    """The fully connected network of Fig. 2."""

    hidden: list[int] = Field([4000, 1000, 4000], min_length=1, description="Widths of the hidden layers.")

    def make(self, images: Images) -> nn.Module:
        return networks.mlp(images.shape, self.hidden, images.classes)


class ConvSection(_Network):
    """The convolutional network of Fig. 3."""

    filters: list[int] = Field([16, 20, 20], min_length=1, description="Of the convolutions.")

    def make(self, images: Images) -> nn.Module:
        return networks.conv_net(images.shape, self.filters, images.classes)


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

    def summary(self, results: Results) -> dict[str, Any]:
        return {
            f"{name}_{arm}_loss": results.of(arm=arm, network=name).mean("loss")
            for name, section in self._networks().items()
            for arm in section.arms
        }

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
