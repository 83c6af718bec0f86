"""DropBlock before the last layer of a classifier: none, sampled, or its mean effect added to the loss."""

import math
import time
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from solver_plugins.dropblock import ClassifierDropout, StructuredDropoutRegularizer
from solver_plugins.errors import OptionError
from solver_plugins.studies.base import Cell, Context, Results, Study, StudyConfig, Table
from solver_plugins.studies.dropblock_rank import effective_rank
from solver_plugins.studies.fitting import spread
from solver_plugins.studies.images import ImageData, Images, Part
from solver_plugins.studies.registry import register_study
from solver_plugins.train.randomness import seed_for

NONE, SAMPLED, DETERMINISTIC = "none", "sampled", "deterministic"


class RegularizerConfig(StudyConfig):
    """Settings of the comparison. The schedule is the same for all arms, and fixed beforehand."""

    data: ImageData = ImageData()
    image_size: int | None = Field(None, ge=1, description="Images are resized to this side; null for as they are.")
    model: str = Field("resnet18", description="A model of timm.")
    model_args: dict[str, Any] = Field({}, description="Arguments of timm.create_model, such as pretrained: true.")
    theta: float = Field(0.7, gt=0, lt=1, description="The probability that a feature is kept.")
    block_size: int = Field(4, ge=1, description="Divides the number of features.")
    lr: float = Field(1e-3, gt=0, description="Of AdamW, at the beginning of a cosine.")
    weight_decay: float = Field(0.01, ge=0, description="Of AdamW.")
    batch_size: int = Field(64, ge=1, description="Images of a step.")
    epochs: int = Field(10, ge=1, description="Passes over the training split.")


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
        _attach(self._make(), DETERMINISTIC, self.config).remove()

    def _make(self) -> nn.Module:
        import timm

        config = self.config
        fixed = {"num_classes": self._images.classes, "in_chans": self._images.shape[0]}
        try:
            made: nn.Module = timm.create_model(config.model, **{**fixed, **config.model_args})
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            raise OptionError(
                f"timm cannot make {config.model!r} with {config.model_args}: {type(error).__name__}: {error}"
            ) from error
        return made

    def cells(self) -> list[Cell]:
        return [Cell(arm, seed) for seed in self.config.seeds for arm in (NONE, SAMPLED, DETERMINISTIC)]

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        config = self.config
        train, test = (self._ready(part, context) for part in (self._images.train, self._images.validation))
        model = self._make().to(context.device)
        added = None if cell.arm == NONE else _attach(model, cell.arm, config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
        size = min(config.batch_size, len(train))
        each = len(train) // size
        start, loss = time.process_time(), math.nan
        for epoch in context.steps(config.epochs):
            model.train()
            order = torch.randperm(
                len(train), generator=torch.Generator().manual_seed(seed_for(cell.seed, "order", epoch))
            )
            for step, rows in enumerate(order[: each * size].split(size)):
                done = (epoch * each + step) / (config.epochs * each)
                for group in optimizer.param_groups:
                    group["lr"] = config.lr * 0.5 * (1 + math.cos(math.pi * done))
                value = functional.cross_entropy(model(train.images[rows]), train.labels[rows])
                if isinstance(added, StructuredDropoutRegularizer):
                    value = value + added()
                optimizer.zero_grad()
                value.backward()
                optimizer.step()
                loss = float(value.detach())
        spent = time.process_time() - start
        if added is not None:
            added.remove()
        logits = _logits(model, test)
        return {
            "accuracy": 100 * float((logits.argmax(1) == test.labels).float().mean()),
            "effective_rank": effective_rank(torch.linalg.svdvals(logits.double().cpu())),
            "last_loss": loss if math.isfinite(loss) else None,
            "training_cpu_seconds": spent,
        }

    def _ready(self, part: Part, context: Context) -> Part:
        images = part.images
        if self.config.image_size is not None:
            images = functional.interpolate(images, (self.config.image_size,) * 2, mode="bilinear", antialias=True)
        known = self._images.train.images
        return Part((images - known.mean()) / known.std(), part.labels).to(context.device)

    def tables(self, results: Results) -> list[Table]:
        rows = [
            (
                arm,
                spread(results.of(arm=arm).each("accuracy"), ".2f"),
                spread(results.of(arm=arm).each("effective_rank"), ".2f"),
                spread(results.of(arm=arm).each("training_cpu_seconds"), ".1f"),
            )
            for arm in (NONE, SAMPLED, DETERMINISTIC)
        ]
        config = self.config
        return [
            Table(
                f"{config.model} on {len(self._images.train)} images of {config.data.name!r}, theta {config.theta:g}, "
                f"blocks of {config.block_size}, {config.epochs} epochs",
                ("DropBlock", "accuracy (%)", "effective rank of the logits", "training (CPU s)"),
                rows,
                f"Mean ± standard deviation over seeds {config.seeds}, on {len(self._images.validation)} images of "
                f"{config.data.validation!r}, which are looked at once. 'deterministic' adds the second-order mean "
                "effect.",
            )
        ]

    def summary(self, results: Results) -> dict[str, Any]:
        return {
            f"{arm}_{key}": sum(results.of(arm=arm).each(key)) / len(self.config.seeds)
            for arm in (NONE, SAMPLED, DETERMINISTIC)
            for key in ("accuracy", "effective_rank")
        }

    def draw(self, results: Results) -> Any:
        from solver_plugins.studies.figures import COLOURS, new_figure

        figure, axes = new_figure(1, 3, width=3.2)
        arms = (NONE, SAMPLED, DETERMINISTIC)
        wanted = (
            ("accuracy", "accuracy (%)"),
            ("effective_rank", "effective rank of the logits"),
            ("training_cpu_seconds", "training (CPU s)"),
        )
        for panel, (key, label) in zip(axes[0], wanted, strict=True):
            for place, arm in enumerate(arms):
                values = results.of(arm=arm).each(key)
                panel.plot([place] * len(values), values, "o", color=COLOURS[place], alpha=0.6)
                panel.plot(
                    [place - 0.2, place + 0.2], [sum(values) / len(values)] * 2, color=COLOURS[place], linewidth=2
                )
            panel.set_xticks(range(len(arms)), arms)
            panel.set_xlim(-0.5, len(arms) - 0.5)
            panel.set_ylabel(label, fontsize=9)
        return figure


def _attach(model: nn.Module, arm: str, config: RegularizerConfig) -> ClassifierDropout | StructuredDropoutRegularizer:
    options = ("dropblock", config.theta, config.block_size)
    if arm == SAMPLED:
        return ClassifierDropout(model, *options)
    return StructuredDropoutRegularizer(model, *options, loss="cross_entropy_second_order")


@torch.no_grad()
def _logits(model: nn.Module, part: Part) -> Tensor:
    model.eval()
    return torch.cat([model(images) for images in part.images.split(200)])
