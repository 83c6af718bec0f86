"""Figures 2 and 3 of the ProxProp paper: progress by epoch and by time, fully connected and convolutional."""

from typing import Any, ClassVar, Self

import pydantic
from pydantic import Field
from torch import nn

from solver_plugins.config import StrictConfig
from solver_plugins.studies.base import Cell, Context, Results, Study, StudyConfig, Table
from solver_plugins.studies.images import ImageData, Images
from solver_plugins.studies.networks import BACKPROP, Training, conv_net, mlp, train_network
from solver_plugins.studies.proxprop_stability import check_arms
from solver_plugins.studies.registry import register_study
from solver_plugins.train.errors import DataError

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
        check_arms(arms)
        return arms


class MlpSection(_Network):
    """The fully connected network of Fig. 2."""

    hidden: list[int] = Field([4000, 1000, 4000], min_length=1, description="Widths of the hidden layers.")


class ConvSection(_Network):
    """The convolutional network of Fig. 3."""

    filters: list[int] = Field([16, 20, 20], min_length=1, description="Of the convolutions.")


class ConvergenceConfig(StudyConfig):
    """Settings of Figures 2 and 3."""

    data: ImageData = ImageData()
    mlp: MlpSection | None = Field(None, description="Fig. 2; null to leave it out.")
    conv: ConvSection | None = Field(None, description="Fig. 3; null to leave it out.")

    @pydantic.model_validator(mode="after")
    def _something(self) -> Self:
        if self.mlp is None and self.conv is None:
            raise ValueError("expected mlp (Fig. 2), conv (Fig. 3) or both; found neither")
        return self


@register_study
class ProxPropConvergence(Study[ConvergenceConfig]):
    """Progress of ProxProp and plain gradients, by epoch and by time."""

    name = "proxprop-convergence"
    tags = ("proxprop", "images")
    reference = "Fig. 2 and Fig. 3 of *Proximal Backpropagation* (Frerix, Möllenhoff, Moeller and Cremers, ICLR 2018)"
    Config: ClassVar[Any] = ConvergenceConfig
    _images: Images

    def prepare(self) -> None:
        self._images = self.config.data.load()
        if self.config.conv is not None:
            shrink = 2 ** len(self.config.conv.filters)
            if min(self._images.shape[1:]) < shrink:
                raise DataError(
                    f"Expected images of at least {shrink}x{shrink} for {len(self.config.conv.filters)} poolings; "
                    f"found {self._images.shape[2]}x{self._images.shape[1]}. Give fewer conv.filters."
                )

    def _networks(self) -> dict[str, _Network]:
        both: dict[str, _Network | None] = {"mlp": self.config.mlp, "conv": self.config.conv}
        return {name: section for name, section in both.items() if section is not None}

    def cells(self) -> list[Cell]:
        return [
            Cell(arm, seed, (("network", name),))
            for name, section in self._networks().items()
            for arm in section.arms
            for seed in self.config.seeds
        ]

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        section = self._networks()[str(cell["network"])]
        lr = section.backprop_lr if cell.arm == BACKPROP else section.lr
        done = train_network(
            self._make(section), self._images, section.training, cell.arm, lr, section.tau_theta, cell.seed, context
        )
        values = done.values()
        return {**values, "training_seconds": values["curves"]["seconds"][-1]}

    def _make(self, section: _Network) -> nn.Module:
        if isinstance(section, ConvSection):
            return conv_net(self._images.shape, section.filters, self._images.classes)
        assert isinstance(section, MlpSection)
        return mlp(self._images.shape, section.hidden, self._images.classes)

    def tables(self, results: Results) -> list[Table]:
        columns = (
            "network, gradient",
            "full-batch loss",
            "best validation (%)",
            "paper",
            "test (%)",
            "paper",
            "training",
        )
        rows = []
        for name, section in self._networks().items():
            for arm in section.arms:
                found = results.of(arm=arm, network=name)
                validation, test = PAPER.get((name, arm), ("", ""))
                rows.append((
                    f"{name}, {_label(arm)}",
                    _mean(found, "loss", ".3g"),
                    _mean(found, "best_validation_accuracy", ".1f"), validation,
                    _mean(found, "test_accuracy", ".1f"), test,
                    f"{_mean(found, 'training_seconds', '.0f')} s",
                ))  # fmt: skip
        epochs = ", ".join(f"{name} {section.training.epochs}" for name, section in self._networks().items())
        note = (
            f"Ours: {self.config.data.train!r} of {self.config.data.name!r}, epochs: {epochs}, seeds "
            f"{self.config.seeds}. Paper: 45000 images of CIFAR-10, 50 epochs. '-': diverged. Times: training alone."
        )
        return [Table("After the last epoch", columns, rows, note)]

    def summary(self, results: Results) -> dict[str, Any]:
        return {
            f"{name}_{arm}_loss": _average(results.of(arm=arm, network=name), "loss")
            for name, section in self._networks().items()
            for arm in section.arms
        }

    def draw(self, results: Results) -> Any:
        from solver_plugins.studies.figures import COLOURS, STYLES, legend, new_figure, whole_numbers

        networks = self._networks()
        figure, axes = new_figure(len(networks), 3)
        for (name, section), (by_epoch, by_time, accuracy) in zip(networks.items(), axes, strict=True):
            for index, arm in enumerate(section.arms):
                for one in results.of(arm=arm, network=name, seed=self.config.seeds[0]):
                    curves = one.values["curves"]
                    style = {"color": COLOURS[index % len(COLOURS)], "linestyle": STYLES[index % len(STYLES)],
                             "label": _label(arm)}  # fmt: skip
                    by_epoch.plot(range(len(curves["loss"])), curves["loss"], **style)
                    by_time.plot(curves["seconds"], curves["loss"], **style)
                    accuracy.plot(curves["seconds"], curves["accuracy"], **style)
            optimizer = "Adam" if section.training.optimizer == "adam" else "Nesterov SGD"
            kind = "convolutional" if name == "conv" else "fully connected"
            by_epoch.set_title(f"{kind}, {optimizer}", fontsize=11)
            for panel, x, y in (
                (by_epoch, "epoch", "full-batch loss"),
                (by_time, "training time (s)", "full-batch loss"),
                (accuracy, "training time (s)", "validation accuracy (%)"),
            ):
                panel.set_xlabel(x, fontsize=9)
                panel.set_ylabel(y, fontsize=9)
            legend(by_epoch)
            whole_numbers(by_epoch)
        return figure


def _label(arm: str) -> str:
    return "BackProp" if arm == BACKPROP else f"ProxProp ({arm})"


def _average(found: Results, key: str) -> float | None:
    values = [value for value in found.each(key) if value is not None]
    return sum(values) / len(values) if values else None


def _mean(found: Results, key: str, form: str) -> str:
    """Returns the mean over seeds, and their standard deviation where there are several."""
    values = [value for value in found.each(key) if value is not None]
    if not values:
        return "-"
    mean = sum(values) / len(values)
    if len(values) == 1:
        return f"{mean:{form}}"
    deviation = (sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5
    return f"{mean:{form}} ± {deviation:{form}}"
