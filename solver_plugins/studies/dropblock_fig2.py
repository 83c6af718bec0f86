"""Figure 2 of the structured dropout paper: a deep network whose last layer is trained with DropBlock.

A backbone of timm, a linear layer to 80 features, DropBlock, and a linear layer to the classes, trained on one-hot
targets with the squared loss on a small data set as one batch. If the backbone can produce any features, the global
minimum is that of Theorem 2.7 without inputs.
"""

import math
from typing import Any, ClassVar, Literal, Self

import pydantic
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from solver_plugins.dropblock import GlobalMinimum, GridBlocks, drop_block_1d, global_minimum, theta_bar_of
from solver_plugins.dropblock.retain import check_divides
from solver_plugins.studies.backbones import build_backbone, prepared
from solver_plugins.studies.base import Cell, Context, Results, Study, StudyConfig, Table
from solver_plugins.studies.images import ImageData, Images
from solver_plugins.studies.registry import register_study
from solver_plugins.train.config import ModelSection

SAMPLED, DETERMINISTIC = "sampled", "deterministic"


class DeepConfig(StudyConfig):
    """Settings of Fig. 2."""

    data: ImageData = ImageData()
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
        """Returns the features that the last layer takes."""
        return self.reduce(self.backbone(images))


@register_study
class DropBlockFig2(Study[DeepConfig]):
    """A deep network with DropBlock before its last layer, against the closed-form minimum."""

    name = "dropblock-fig2"
    tags = ("dropblock", "images")
    reference = (
        "Fig. 2 of *On the Regularization Properties of Structured Dropout* (Pal, Lane, Vidal and Haeffele, CVPR 2020)"
    )
    Config: ClassVar[Any] = DeepConfig
    _images: Images

    def prepare(self) -> None:
        self._images = self.config.data.load()
        # Made once, so that a name or argument that timm does not know is told before anything is written.
        self._make()

    def _make(self) -> LastLayers:
        backbone: Any = build_backbone(self.config.model, self._images, classes=0)
        return LastLayers(backbone, int(backbone.num_features), self.config.width, self._images.classes)

    def cells(self) -> list[Cell]:
        return [Cell(arm, seed) for seed in self.config.seeds for arm in self.config.arms]

    def _targets(self) -> tuple[Tensor, GlobalMinimum]:
        config = self.config
        targets = functional.one_hot(self._images.train.labels, self._images.classes).float()
        theta_bar = theta_bar_of(config.theta, config.width, config.block_size)
        return targets, global_minimum(targets, theta_bar, config.block_size)

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        config = self.config
        targets, minimum = self._targets()
        model = self._make().to(context.device).train()
        resized = self._images.train.resized(config.image_size)
        images = prepared(config.model, model.backbone, resized, resized, context.device).images
        targets = targets.to(context.device)
        optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
        scheme = GridBlocks(config.theta, config.block_size)
        at: list[int] = []
        sampled: list[float] = []
        objectives: list[float] = []
        features = torch.empty(0)
        every = max(1, config.iterations // 300)
        for step in context.steps(config.iterations):
            for group in optimizer.param_groups:
                group["lr"] = config.lr * 0.5 * (1 + math.cos(math.pi * step / config.iterations))
            features, weight = model(images), model.classify.weight
            objective = (targets - features @ weight.mT).square().sum() + scheme.variance(weight, features).sum()
            loss = objective
            if cell.arm == SAMPLED:
                dropped = drop_block_1d(features, config.theta, config.block_size)
                loss = (targets - dropped @ weight.mT).square().sum()
            if step % every == 0 or step == config.iterations - 1:
                at.append(step)
                objectives.append(float(objective.detach()))
                sampled.append(float(loss.detach()))
            last = (features.detach() @ weight.detach().mT).double().cpu()
            optimizer.zero_grad()
            (loss / len(targets)).backward()
            optimizer.step()
        found = torch.linalg.svdvals(last)
        predicted = minimum.singular_values
        return {
            "closed_form": minimum.objective,
            "attainable": config.block_size * minimum.fewest_blocks <= config.width,
            "final": objectives[-1] if math.isfinite(objectives[-1]) else None,
            "gap": objectives[-1] / minimum.objective - 1 if math.isfinite(objectives[-1]) else None,
            "singular_value_error": _finite(float((found - predicted).norm() / predicted.norm())),
            "curves": {
                "iteration": at,
                "objective": [_finite(value) for value in objectives],
                "sampled": [_finite(value) for value in sampled] if cell.arm == SAMPLED else [],
                "singular_values": [_finite(value) for value in found.tolist()],
                "predicted": predicted.tolist(),
            },
        }

    def tables(self, results: Results) -> list[Table]:
        rows = [
            (
                f"{one.cell.arm}, seed {one.cell.seed}",
                f"{one.values['closed_form']:.4f}" + ("" if one.values["attainable"] else " (bound)"),
                "diverged" if one.values["final"] is None else f"{one.values['final']:.4f}",
                "-" if one.values["gap"] is None else f"{100 * one.values['gap']:.2f}%",
                "-" if one.values["final"] is None else f"{100 * one.values['singular_value_error']:.2f}%",
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

    def summary(self, results: Results) -> dict[str, Any]:
        gaps = [gap for gap in results.each("gap") if gap is not None]
        errors = [error for error in results.each("singular_value_error") if error is not None]
        return {"largest_gap": max(gaps, default=None), "largest_singular_value_error": max(errors, default=None)}

    def draw(self, results: Results) -> Any:
        from solver_plugins.studies.figures import COLOURS, STYLES, legend, nan_for_none, new_figure, whole_numbers

        figure, axes = new_figure(1, 2, width=4.8, height=3.4)
        left, right = axes[0]
        left.set_yscale("log")
        markers = {SAMPLED: "o", DETERMINISTIC: "x"}
        for index, one in enumerate(results.of(seed=self.config.seeds[0])):
            curves = one.values["curves"]
            style = {"color": COLOURS[2 * index], "linestyle": STYLES[index]}
            left.plot(curves["iteration"], nan_for_none(curves["objective"]), label=f"{one.cell.arm} training", **style)
            right.plot(
                range(1, len(curves["singular_values"]) + 1), nan_for_none(curves["singular_values"]),
                markers[one.cell.arm], color=COLOURS[2 * index], label=f"{one.cell.arm} training",
            )  # fmt: skip
        left.axhline(one.values["closed_form"], color=COLOURS[1], linestyle=":", linewidth=2, label="lower bound")
        predicted = curves["predicted"]
        right.plot(range(1, len(predicted) + 1), predicted, ":", color=COLOURS[1], linewidth=2, label="prediction")
        left.set_xlabel("iteration", fontsize=9)
        left.set_ylabel("deterministic objective", fontsize=9)
        right.set_xlabel("number", fontsize=9)
        right.set_ylabel("singular value of the predictions", fontsize=9)
        right.set_ylim(bottom=0)
        whole_numbers(right)
        for panel in (left, right):
            legend(panel)
        return figure


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
