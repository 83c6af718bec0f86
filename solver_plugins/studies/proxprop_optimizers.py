"""Beyond the ProxProp paper: its gradients against other optimisers and inside of them, each with its own step size."""

from typing import Self

import pydantic
from pydantic import Field
from torch import nn

from solver_plugins.config import StrictConfig
from solver_plugins.studies.comparison import differences
from solver_plugins.studies.proxprop_convergence import REFERENCE, Mode, conv_net
from solver_plugins.studies.searched import SearchedConfig, SearchedStudy
from solver_plugins.studies.study import Results, Table, Value, register_study
from solver_plugins.studies.training import Fitting
from solver_plugins.train.additions import Additions
from solver_plugins.train.config import ProxPropSection


class OptimizerArm(StrictConfig):
    """One way to train the network."""

    optimizer: str = Field("adamw", description="'sgd' with momentum, or a name of timm.optim.list_optimizers().")
    proxprop: Mode | None = Field(None, description="'exact' or 'cgN' for ProxProp's gradients; null for plain ones.")
    tau_theta: float = Field(1.0, gt=0, description="Step size of the implicit step.")
    epochs: int = Field(6, ge=1, description="Passes over the training split.")


class OptimizersConfig(SearchedConfig):
    """Settings of the comparison."""

    filters: list[int] = Field([16, 20, 20], min_length=1, description="Of the convolutions.")
    norm: bool = Field(False, description="Whether a BatchNorm follows every convolution; the paper's have none.")
    arms: dict[str, OptimizerArm] = Field(
        {"adamw": OptimizerArm(), "proxprop": OptimizerArm(proxprop="cg3")},
        min_length=2,
        description="What is compared.",
    )

    @pydantic.model_validator(mode="after")
    def _longest_search(self) -> Self:
        longest = max(arm.epochs for arm in self.arms.values())
        if self.search.epochs < longest:
            raise ValueError(
                f"expected search.epochs of {longest}, the longest arm's: arms are searched at full length"
            )
        return self


@register_study
class ProxPropOptimizers(SearchedStudy[OptimizersConfig]):
    """ProxProp against other optimisers and inside of them, at equal epochs and at equal time."""

    name = "proxprop-optimizers"
    tags = ("proxprop", "images")
    reference = f"The convolutional network {REFERENCE} with other optimisers; the paper has no such table"
    Config = OptimizersConfig
    group = "network"

    def groups(self) -> list[Value]:
        return ["conv-norm" if self.config.norm else "conv"]

    def arms(self) -> tuple[str, ...]:
        return tuple(self.config.arms)

    def title(self) -> str:
        return f"{len(self._images.train)} images of {self.config.data.name!r}"

    def prepare(self) -> None:
        super().prepare()
        # Made once, so that mistakes surface before anything is written.
        for arm in self.arms():
            self.fitting("", arm).check(self.make(""))

    def make(self, group: Value) -> nn.Module:
        return conv_net(self._images.shape, self.config.filters, self._images.classes, self.config.norm)

    def fitting(self, group: Value, arm: str) -> Fitting:
        one = self.config.arms[arm]
        return self.config.fitting.model_copy(update={"optimizer": one.optimizer, "epochs": one.epochs})

    def additions(self, arm: str, p: float | None = None) -> Additions:
        one = self.config.arms[arm]
        return Additions(ProxPropSection(mode=one.proxprop, tau_theta=one.tau_theta) if one.proxprop else None)

    def tables(self, results: Results) -> list[Table]:
        config, rows = self.config, self.rows(results)
        plain = [name for name, arm in config.arms.items() if arm.proxprop is None]
        accuracy, *search = super().tables(results)
        described = [
            (
                row.arm,
                config.arms[row.arm].optimizer,
                config.arms[row.arm].proxprop or "",
                str(config.arms[row.arm].epochs),
                row.found.spread("training_cpu_seconds", ".1f"),
                row.found.spread("training_loss", ".3f"),
                self._width(row.search),
            )
            for row in rows
        ]
        return [
            accuracy,
            differences(rows, [row for row in rows if row.arm not in plain], plain, config.seeds),
            Table(
                "Arms",
                ("", "optimizer", "ProxProp", "epochs", "training (CPU s)", "training loss", "rates within 1 point"),
                described,
                f"Rates: how many of {len(config.search.rates)} come within a point of the arm's best one on the "
                "validation split. Training loss: over the whole training split at the end.",
            ),
            *search,
        ]

    def _width(self, search: Results) -> str:
        found = search.known("validation_accuracy")
        return str(sum(one >= max(found) - 1 for one in found)) if found else ""
