"""Figure 2 of the structured dropout paper: a deep network whose last layer is trained with DropBlock.

A backbone of timm, a linear layer to 80 features, DropBlock, and a linear layer to the classes, trained on one-hot
targets with the squared loss on a small data set as one batch. If the backbone can produce any features, the global
minimum is that of Theorem 2.7 without inputs.
"""

from typing import Any, Literal, Self

import pydantic
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from solver_plugins.dropblock import GridBlocks, drop_block_1d, global_minimum, theta_bar_of
from solver_plugins.dropblock.retain import check_divides
from solver_plugins.studies.dropblock_shallow import REFERENCE
from solver_plugins.studies.figures import COLOURS, STYLES, label, legend, nan_for_none, new_figure, whole_numbers
from solver_plugins.studies.images import ImageConfig, ImageStudy, build_backbone, prepared
from solver_plugins.studies.study import Cell, Context, Results, Table, finite, register_study, shown
from solver_plugins.studies.training import fit
from solver_plugins.train.config import ModelSection, OptimizerSection, ScheduleSection
from solver_plugins.train.data import Batch
from solver_plugins.train.optimizer import TrainSettings
from solver_plugins.train.tensors import Shuffled

SAMPLED, DETERMINISTIC = "sampled", "deterministic"
_POINTS = 300
"""About how many points of a curve are kept."""


class DeepConfig(ImageConfig):
    """Settings of Fig. 2."""

    image_size: int | None = Field(None, ge=1, description="Images are resized to this side; null for as they are.")
    model: ModelSection = Field(
        ModelSection(spec="timm/resnet50"), description="A model of timm, as in finetune recipes; its last layer goes."
    )
    width: int = Field(80, ge=1, description="Features before the last layer.")
    theta: float = Field(0.5, gt=0, lt=1, description="Retain probability at this width.")
    block_size: int = Field(5, ge=1, description="r.")
    arms: list[Literal["sampled", "deterministic"]] = Field(
        ["sampled", "deterministic"], min_length=1, description="Drop at random, or descend on the expected objective."
    )
    lr: float = Field(1e-3, gt=0, description="Of Adam, at the beginning of a cosine.")
    iterations: int = Field(1000, ge=2, description="Steps, each with all images.")

    @pydantic.model_validator(mode="after")
    def _fits(self) -> Self:
        check_divides(self.block_size, self.width)
        return self


class LastLayers(nn.Module):
    """A backbone and the two linear layers behind it."""

    def __init__(self, backbone: nn.Module, features: int, width: int, classes: int):
        super().__init__()
        self.backbone = backbone
        self.reduce = nn.Linear(features, width)
        self.classify = nn.Linear(width, classes, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        return self.reduce(self.backbone(images))


class SquaredLoss:
    """The squared loss with DropBlock, sampled or in expectation: an objective of the training loop that keeps curves.

    At the steps ``at`` it keeps the expected loss and, where masks are drawn, the loss with them; ``predictions`` are
    those of the last step, without masks.
    """

    def __init__(self, config: DeepConfig, sampling: bool):
        self.config, self.sampling = config, sampling
        self.scheme = GridBlocks(config.theta, config.block_size)
        self.at: list[int] = []
        self.objective: list[float] = []
        self.sampled: list[float] = []
        self.predictions = torch.empty(0)
        self._step = 0

    def __call__(self, model: Any, batch: Batch) -> Tensor:
        config, weight = self.config, model.classify.weight
        targets = functional.one_hot(batch["labels"], len(weight)).float()
        features = model(batch["image"])
        objective = (targets - features @ weight.mT).square().sum() + self.scheme.variance(weight, features).sum()
        loss = objective
        if self.sampling:
            dropped = drop_block_1d(features, config.theta, config.block_size)
            loss = (targets - dropped @ weight.mT).square().sum()
        last = self._step == config.iterations - 1
        if last or self._step % max(1, config.iterations // _POINTS) == 0:
            self.at.append(self._step)
            self.objective.append(float(objective.detach()))
            self.sampled += [float(loss.detach())] if self.sampling else []
        if last:
            self.predictions = (features.detach() @ weight.detach().mT).double().cpu()
        self._step += 1
        return loss / len(targets)


@register_study
class DropBlockFig2(ImageStudy[DeepConfig]):
    """A deep network with DropBlock before its last layer, against the closed-form minimum."""

    name = "dropblock-fig2"
    tags = ("dropblock", "images")
    reference = f"Fig. 2 {REFERENCE}"
    Config = DeepConfig

    def prepare(self) -> None:
        super().prepare()
        # Made once, so that mistakes surface before anything is written.
        self._make()

    def _make(self) -> LastLayers:
        backbone: Any = build_backbone(self.config.model, self._images, classes=0)
        return LastLayers(backbone, int(backbone.num_features), self.config.width, self._images.classes)

    def cells(self) -> list[Cell]:
        return Cell.grid(seed=self.config.seeds, arm=self.config.arms)

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        config, train = self.config, self._images.train
        targets = functional.one_hot(train.labels, self._images.classes).float()
        minimum = global_minimum(
            targets, theta_bar_of(config.theta, config.width, config.block_size), config.block_size
        )
        model = self._make()
        resized = train.resized(config.image_size)
        part = prepared(config.model, model.backbone, resized, resized, context.device)
        # An epoch is one step with all images.
        settings = TrainSettings(
            config.iterations, OptimizerSection(opt="adam", lr=config.lr, weight_decay=0.0), ScheduleSection()
        )
        loss = SquaredLoss(config, cell.arm == SAMPLED)
        done = fit(model, Shuffled(part, len(part), cell.seed), settings, context, objective=loss)
        found = None if done.diverged else torch.linalg.svdvals(loss.predictions)
        final = None if done.diverged else finite(loss.objective[-1])
        predicted = minimum.singular_values
        return {
            "closed_form": minimum.objective,
            "attainable": config.block_size * minimum.fewest_blocks <= config.width,
            "final": final,
            "gap": None if final is None else final / minimum.objective - 1,
            "singular_value_error": None if found is None else finite((found - predicted).norm() / predicted.norm()),
            "curves": {
                "iteration": loss.at,
                "objective": [finite(value) for value in loss.objective],
                "sampled": [finite(value) for value in loss.sampled],
                "singular_values": [None] * len(predicted) if found is None else found.tolist(),
                "predicted": predicted.tolist(),
            },
        }

    def tables(self, results: Results) -> list[Table]:
        rows = [
            (
                f"{one.cell.arm}, seed {one.cell.seed}",
                f"{one.values['closed_form']:.4f}" + ("" if one.values["attainable"] else " (bound)"),
                shown(one.values["final"], ".4f", "diverged"),
                shown(one.values["gap"], ".2%", "-"),
                shown(one.values["singular_value_error"], ".2%", "-"),
                f"{one.seconds:.0f} s",
            )
            for one in results
        ]
        config = self.config
        return [
            Table(
                f"{config.model.spec} with {config.width} last features on {len(self._images.train)} images of "
                f"{config.data.name!r}, theta {config.theta:g}, blocks of {config.block_size}",
                ("training", "closed form", "objective at the end", "gap", "singular values", "time"),
                rows,
                "The paper shows curves for a ResNet-50 on small parts of MNIST and CIFAR-10, no numbers: 'very close "
                "to the lower bound', up to the least singular value. 'singular values': relative distance of those of "
                "the predictions from the closed form's.",
            )
        ]

    def draw(self, results: Results) -> Any:
        figure, axes = new_figure(1, 2, width=4.8, height=3.4)
        left, right = axes[0]
        markers = {SAMPLED: "o", DETERMINISTIC: "x"}
        for index, one in enumerate(results.of(seed=self.config.seeds[0])):
            curves, text = one.values["curves"], f"{one.cell.arm} training"
            colour, values = COLOURS[2 * index], curves["singular_values"]
            objective = nan_for_none(curves["objective"])
            left.plot(curves["iteration"], objective, color=colour, linestyle=STYLES[index], label=text)
            numbers = range(1, len(values) + 1)
            right.plot(numbers, nan_for_none(values), markers[one.cell.arm], color=colour, label=text)
        left.axhline(one.values["closed_form"], color=COLOURS[1], linestyle=":", linewidth=2, label="lower bound")
        right.plot(numbers, curves["predicted"], ":", color=COLOURS[1], linewidth=2, label="prediction")
        label(left, "iteration", "deterministic objective", log="y")
        label(right, "number", "singular value of the predictions")
        right.set_ylim(bottom=0)
        whole_numbers(right)
        for panel in (left, right):
            legend(panel)
        return figure
