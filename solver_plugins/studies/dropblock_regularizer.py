"""DropBlock before the last layer of a classifier: none, sampled, or its mean effect added to the loss."""

from typing import Any

import torch
from pydantic import Field

from solver_plugins.studies.dropblock_rank import effective_rank
from solver_plugins.studies.dropblock_shallow import REFERENCE
from solver_plugins.studies.images import Column, SideBySide, SideBySideConfig, build_backbone, is_pretrained, prepared
from solver_plugins.studies.study import Cell, Context, register_study
from solver_plugins.studies.training import Fitting, collected, fit
from solver_plugins.train.additions import Additions
from solver_plugins.train.config import ModelSection, RegularizerSection

NONE, SAMPLED, DETERMINISTIC = "none", "sampled", "deterministic"


class RegularizerConfig(SideBySideConfig):
    """Settings of the comparison. The schedule is the same for all arms and fixed in advance."""

    model: ModelSection = Field(
        ModelSection(spec="timm/resnet18"), description="A model of timm and its weights, as in finetune recipes."
    )
    theta: float = Field(0.7, gt=0, lt=1, description="The probability that a feature is kept.")
    block_size: int = Field(4, ge=1, description="Divides the number of features.")
    fitting: Fitting = Fitting()


@register_study
class DropBlockRegularizer(SideBySide[RegularizerConfig]):
    """A classifier without DropBlock, with sampled DropBlock, and with its mean effect in the loss."""

    name = "dropblock-regularizer"
    tags = ("dropblock", "images")
    reference = f"Section 3 {REFERENCE} as a training tool; the paper has no such table"
    Config = RegularizerConfig
    arms = (NONE, SAMPLED, DETERMINISTIC)
    heading = "DropBlock"
    columns = (
        Column("accuracy", "accuracy (%)", ".2f"),
        Column("effective_rank", "effective rank of the logits", ".2f"),
        Column("training_cpu_seconds", "training (CPU s)", ".1f"),
    )
    note = " 'deterministic' adds the second-order mean effect."

    def prepare(self) -> None:
        super().prepare()
        # Made once, so that mistakes surface before anything is written.
        model = build_backbone(self.config.model, self._images)
        self._additions(DETERMINISTIC).attach(model, torch.optim.SGD(model.parameters()))

    def _additions(self, arm: str) -> Additions:
        config = self.config
        if arm == NONE:
            return Additions()
        section = RegularizerSection.parse({"theta": config.theta, "block_size": config.block_size, "how": arm})
        return Additions(regularizer=section)

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        config, known = self.config, self._images.train
        model = build_backbone(config.model, self._images).to(context.device)
        train, test = (
            prepared(config.model, model, part, known, context.device, config.image_size)
            for part in (known, self._images.validation)
        )
        batches = config.fitting.batches(train, cell.seed)
        done = fit(model, batches, config.fitting.settings(), context, additions=self._additions(cell.arm))
        logits = None if done.diverged else collected(model, test, model)
        return {
            "accuracy": None if logits is None else 100 * float((logits.argmax(1) == test.labels).float().mean()),
            "effective_rank": None if logits is None else effective_rank(torch.linalg.svdvals(logits.double().cpu())),
            "last_loss": done.loss,
            "training_cpu_seconds": done.cpu_seconds,
        }

    def title(self) -> str:
        config = self.config
        return (
            f"{config.model.spec}{', pretrained' if is_pretrained(config.model) else ''}, on "
            f"{len(self._images.train)} images of {config.data.name!r}, theta {config.theta:g}, blocks of "
            f"{config.block_size}, {config.fitting.epochs} epochs"
        )
