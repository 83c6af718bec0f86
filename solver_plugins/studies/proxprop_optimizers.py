"""Beyond the ProxProp paper: its gradients against other optimisers and inside of them, each with its own step size."""

import math
from typing import Self

import pydantic
from pydantic import Field
from torch import nn

from solver_plugins.config import StrictConfig
from solver_plugins.studies.comparison import differences
from solver_plugins.studies.images import Images
from solver_plugins.studies.proxprop_convergence import REFERENCE, Mode, conv_net
from solver_plugins.studies.searched import LOOKED, SearchedConfig, SearchedStudy
from solver_plugins.studies.study import Context, Results, Table, Value, register_study
from solver_plugins.studies.texts import Texts
from solver_plugins.studies.training import Fitting
from solver_plugins.train.additions import Additions
from solver_plugins.train.config import ModelSection, ProxPropSection
from solver_plugins.train.tensors import Part


class OptimizerArm(StrictConfig):
    """One way to train the network."""

    optimizer: str = Field("adamw", description="'sgd' with momentum, or a name of timm.optim.list_optimizers().")
    proxprop: Mode | None = Field(None, description="'exact' or 'cgN' for ProxProp's gradients; null for plain ones.")
    tau_theta: float = Field(1.0, gt=0, description="Step size of the implicit step.")
    epochs: int = Field(6, ge=1, description="Passes over the training split.")


class OptimizersConfig(SearchedConfig):
    """Settings of the comparison."""

    model: ModelSection | None = Field(
        None, description="A network in place of the paper's: 'timm/NAME', or 'hf/FOLDER' for texts (data.text)."
    )
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
    _texts: Texts | None = None

    def groups(self) -> list[Value]:
        if self.section() is not None:
            return super().groups()
        return ["conv-norm" if self.config.norm else "conv"]

    def arms(self) -> tuple[str, ...]:
        return tuple(self.config.arms)

    def title(self) -> str:
        return f"{len(self._images.train)} {'images' if self._texts is None else 'texts'} of {self.config.data.name!r}"

    def _load(self) -> Images:
        config = self.config
        if config.model is None or config.data.text is None:
            return super()._load()
        self._texts = Texts(config.data, config.model)
        return self._texts.images

    def _prepared(self, model: nn.Module, part: Part, context: Context) -> Part:
        return part.to(context.device) if self._texts is not None else super()._prepared(model, part, context)

    def prepare(self) -> None:
        super().prepare()
        # Made once, so that mistakes surface before anything is written.
        for arm in self.arms():
            self.fitting("", arm).check(self.make(""))

    def make(self, group: Value) -> nn.Module:
        if self._texts is not None:
            return self._texts.build()
        if self.section() is not None:
            return super().make(group)
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
                *self._width(row.search),
            )
            for row in rows
        ]
        columns = ("", "optimizer", "ProxProp", "epochs", "training (CPU s)", "training loss")
        return [
            accuracy,
            differences(rows, [row for row in rows if row.arm not in plain], plain, config.seeds),
            Table(
                "Arms",
                (*columns, "rates within 1 point", "decades"),
                described,
                f"Rates: how many of {len(config.search.rates)} come within a point of the arm's best one on the "
                "validation split, and how many decades lie between them. Training loss: over the "
                "whole training split at the end.",
            ),
            *search,
        ]

    def _width(self, search: Results) -> tuple[str, str]:
        """Returns how many step sizes are nearly the best one, and how many decades lie between them."""
        found = [(one.values[LOOKED], float(one.cell["lr"])) for one in search if one.values[LOOKED] is not None]
        near = [rate for score, rate in found if score >= max(found)[0] - 1]
        return (str(len(near)), f"{math.log10(max(near) / min(near)):.1f}") if near else ("", "")
