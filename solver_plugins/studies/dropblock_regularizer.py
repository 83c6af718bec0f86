"""DropBlock before the last layer of a classifier: none, sampled, or its mean effect added to the loss."""

from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import nn

from solver_plugins.studies.classifiers import ClassifierStudy
from solver_plugins.studies.controls import untuned
from solver_plugins.studies.dropblock_rank import effective_rank
from solver_plugins.studies.dropblock_shallow import REFERENCE
from solver_plugins.studies.searched import SearchedConfig
from solver_plugins.studies.study import Cell, Value, register_study
from solver_plugins.studies.training import collected
from solver_plugins.train.additions import Additions
from solver_plugins.train.config import ModelSection, RegularizerSection
from solver_plugins.train.tensors import Part

NONE, DROPOUT, SAMPLED, DETERMINISTIC = "none", "dropout", "sampled", "deterministic"


class RegularizerConfig(SearchedConfig):
    """Settings of the comparison. The schedule and the search are the same for all arms."""

    model: ModelSection = Field(
        ModelSection(spec="timm/resnet18"), description="A model of timm and its weights, as in finetune recipes."
    )
    frozen: bool = Field(False, description="Whether the last layer alone is trained, on features that stay.")
    theta: float = Field(0.7, gt=0, lt=1, description="The probability that a feature is kept, where it is not tuned.")
    block_size: int = Field(4, ge=1, description="Divides the number of features.")


@register_study
class DropBlockRegularizer(ClassifierStudy[RegularizerConfig]):
    """A classifier without DropBlock, with sampled DropBlock, and with its mean effect in the loss."""

    name = "dropblock-regularizer"
    tags = ("dropblock", "images")
    reference = f"Section 3 {REFERENCE} as a training tool; the paper has no such table"
    Config = RegularizerConfig
    measures: ClassVar = {"effective rank of the logits": ("effective_rank", ".2f")}

    def arms(self) -> tuple[str, ...]:
        return NONE, SAMPLED, DETERMINISTIC

    def tunable(self) -> tuple[str, ...]:
        return DROPOUT, SAMPLED, DETERMINISTIC

    def equals(self, group: Value, arm: str) -> list[tuple[str, float]]:
        own = [] if untuned(arm) == DROPOUT else [(untuned(arm), 1 - self.config.theta)]
        return [*own, (NONE, 0.0)]

    def section(self) -> ModelSection:
        return self.config.model

    def frozen(self) -> bool:
        return self.config.frozen

    def prepare(self) -> None:
        super().prepare()
        # Made once, so that mistakes surface before anything is written.
        model = self.make("")
        self.additions(DETERMINISTIC).attach(model, torch.optim.SGD(model.parameters()))

    def additions(self, arm: str, p: float | None = None) -> Additions:
        kind, theta = untuned(arm), self.config.theta if p is None else 1 - p
        if kind not in self.tunable() or theta == 1:
            return Additions()
        block = {"scheme": "dropout"} if kind == DROPOUT else {"block_size": self.config.block_size}
        how = DETERMINISTIC if kind == DETERMINISTIC else SAMPLED
        return Additions(regularizer=RegularizerSection.parse({"theta": theta, "how": how, **block}))

    def _test(self, cell: Cell, model: nn.Module, parts: dict[str, Part], diverged: bool) -> dict[str, Any]:
        found = super()._test(cell, model, parts, diverged)
        logits = None if diverged else collected(model, parts["test"], model)
        rank = None if logits is None else effective_rank(torch.linalg.svdvals(logits.double().cpu()))
        return {**found, "effective_rank": rank}

    def title(self) -> str:
        return f"{super().title()}, theta {self.config.theta:g}, blocks of {self.config.block_size}"
