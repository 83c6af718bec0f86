"""DropBlock before the last layer of a classifier: none, sampled, or its mean effect added to the loss."""

from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from solver_plugins.dropblock import ClassifierDropout, StructuredDropoutRegularizer
from solver_plugins.studies.backbones import build_backbone, is_pretrained, prepared
from solver_plugins.studies.base import Cell, Context, Results, Study, StudyConfig, Table
from solver_plugins.studies.dropblock_rank import effective_rank
from solver_plugins.studies.fitting import Fitting, fit, mean, spread
from solver_plugins.studies.images import ImageData, Images, Part
from solver_plugins.studies.registry import register_study
from solver_plugins.train.config import ModelSection

NONE, SAMPLED, DETERMINISTIC = "none", "sampled", "deterministic"
ARMS = (NONE, SAMPLED, DETERMINISTIC)


class RegularizerConfig(StudyConfig):
    """Settings of the comparison. The schedule is the same for all arms, and fixed beforehand."""

    data: ImageData = ImageData()
    image_size: int | None = Field(None, ge=1, description="Images are resized to this side; null for as they are.")
    model: ModelSection = Field(
        ModelSection(spec="timm/resnet18"), description="A model of timm and its weights, as in finetune recipes."
    )
    theta: float = Field(0.7, gt=0, lt=1, description="The probability that a feature is kept.")
    block_size: int = Field(4, ge=1, description="Divides the number of features.")
    fitting: Fitting = Fitting()


@register_study
class DropBlockRegularizer(Study[RegularizerConfig]):
    """A classifier without DropBlock, with sampled DropBlock, and with its mean effect in the loss."""

    name = "dropblock-regularizer"
    tags = ("dropblock", "images")
    reference = (
        "Section 3 of *On the Regularization Properties of Structured Dropout* (Pal, Lane, Vidal and Haeffele, CVPR "
        "2020) as a training tool; the paper has no such table"
    )
    Config: ClassVar[Any] = RegularizerConfig
    _images: Images

    def prepare(self) -> None:
        self._images = self.config.data.load()
        # Made once, so that what does not fit is told before anything is written.
        _attach(build_backbone(self.config.model, self._images), DETERMINISTIC, self.config).remove()

    def cells(self) -> list[Cell]:
        return [Cell(arm, seed) for seed in self.config.seeds for arm in ARMS]

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        config = self.config
        known = self._images.train
        model = build_backbone(config.model, self._images).to(context.device)
        train, test = (
            prepared(config.model, model, part, known, context.device, config.image_size)
            for part in (known, self._images.validation)
        )
        added = None if cell.arm == NONE else _attach(model, cell.arm, config)
        extra = added if isinstance(added, StructuredDropoutRegularizer) else None
        done = fit(model, train, config.fitting, cell.seed, context.steps(config.fitting.epochs), extra=extra)
        if added is not None:
            added.remove()
        logits = None if done.loss is None else _logits(model, test)
        return {
            "accuracy": None if logits is None else 100 * float((logits.argmax(1) == test.labels).float().mean()),
            "effective_rank": None if logits is None else effective_rank(torch.linalg.svdvals(logits.double().cpu())),
            "last_loss": done.loss,
            "training_cpu_seconds": done.cpu_seconds,
        }

    def tables(self, results: Results) -> list[Table]:
        rows = [
            (
                arm,
                spread(results.of(arm=arm).each("accuracy"), ".2f"),
                spread(results.of(arm=arm).each("effective_rank"), ".2f"),
                spread(results.of(arm=arm).each("training_cpu_seconds"), ".1f"),
            )
            for arm in ARMS
        ]
        config = self.config
        return [
            Table(
                f"{config.model.spec}{', pretrained' if is_pretrained(config.model) else ''}, on "
                f"{len(self._images.train)} images of {config.data.name!r}, theta {config.theta:g}, blocks of "
                f"{config.block_size}, {config.fitting.epochs} epochs",
                ("DropBlock", "accuracy (%)", "effective rank of the logits", "training (CPU s)"),
                rows,
                f"Mean ± standard deviation over seeds {config.seeds}, on {len(self._images.validation)} images of "
                f"{config.data.validation!r}, after the last epoch. 'deterministic' adds the second-order mean effect.",
            )
        ]

    def summary(self, results: Results) -> dict[str, Any]:
        return {
            f"{arm}_{key}": mean(results.of(arm=arm).each(key))
            for arm in ARMS
            for key in ("accuracy", "effective_rank")
        }

    def draw(self, results: Results) -> Any:
        from solver_plugins.studies.figures import compared

        wanted = (
            ("accuracy", "accuracy (%)"),
            ("effective_rank", "effective rank of the logits"),
            ("training_cpu_seconds", "training (CPU s)"),
        )
        return compared(results, ARMS, wanted)


def _attach(model: nn.Module, arm: str, config: RegularizerConfig) -> ClassifierDropout | StructuredDropoutRegularizer:
    options = ("dropblock", config.theta, config.block_size)
    if arm == SAMPLED:
        return ClassifierDropout(model, *options)
    return StructuredDropoutRegularizer(model, *options, loss="cross_entropy_second_order")


@torch.no_grad()
def _logits(model: nn.Module, part: Part) -> Tensor:
    model.eval()
    return torch.cat([model(images) for images in part.images.split(200)])
