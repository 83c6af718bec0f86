"""An equilibrium head beside a linear one, on the same backbone: equal epochs, fixed beforehand."""

import copy
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import nn

from solver_plugins.config import StrictConfig
from solver_plugins.equilibrium import HeadConfig
from solver_plugins.errors import OptionError
from solver_plugins.integrations.heads import attach_opteq_head
from solver_plugins.studies.backbones import build_backbone, is_pretrained, prepared
from solver_plugins.studies.base import Cell, Context, Results, Study, StudyConfig, Table
from solver_plugins.studies.fitting import Fitting, fit, mean, spread
from solver_plugins.studies.images import ImageData, Images, Part
from solver_plugins.studies.networks import evaluate
from solver_plugins.studies.opteq_network import parameters_of
from solver_plugins.studies.registry import register_study
from solver_plugins.train.config import ModelSection
from solver_plugins.train.randomness import seeded

LINEAR, MLP, OPTEQ = "linear", "mlp", "opteq"
ARMS = (LINEAR, MLP, OPTEQ)


class Backbone(StrictConfig):
    """The network whose features the heads read."""

    model: ModelSection = Field(
        ModelSection(spec="timm/test_resnet"), description="A model of timm and its weights, as in finetune recipes."
    )
    train: str | None = Field(
        None, description="The split of the data that it is trained on first, with a linear head; null for none."
    )
    fitting: Fitting = Fitting()
    frozen: bool = Field(True, description="Whether only the heads are trained, on features that stay as they are.")


class OptEqHeadConfig(StudyConfig):
    """Settings of the comparison. The schedule is the same for all heads."""

    data: ImageData = ImageData()
    image_size: int | None = Field(None, ge=1, description="Images are resized to this side; null for as they are.")
    backbone: Backbone = Backbone()
    head: HeadConfig = HeadConfig()
    mlp_hidden: int = Field(64, ge=1, description="Hidden features of the head 'mlp': linear, ReLU, linear.")
    fitting: Fitting = Fitting()


@register_study
class OptEqHeadStudy(Study[OptEqHeadConfig]):
    """An equilibrium head beside a linear one and a small network, on the same backbone."""

    name = "opteq-head"
    tags = ("opteq", "images")
    reference = (
        "Equation 4 of *Optimization Induced Equilibrium Networks* (Xie et al., 2021) as a head; the paper has no such "
        "table"
    )
    Config: ClassVar[Any] = OptEqHeadConfig
    _images: Images
    _first: Part | None
    _backbones: dict[int, nn.Module]

    def prepare(self) -> None:
        config = self.config
        self._images, self._backbones, self._first = config.data.load(), {}, None
        if config.backbone.train is not None:
            self._first = config.data.model_copy(update={"train": config.backbone.train}).load().train
        # Made once, so that what does not fit is told before anything is written.
        self._put(build_backbone(config.backbone.model, self._images), OPTEQ)

    def _put(self, model: nn.Module, arm: str) -> nn.Module:
        """Gives a model a new head, and returns the head."""
        model.reset_classifier(self._images.classes)  # type: ignore[operator]
        if arm == OPTEQ:
            attach_opteq_head(model, **self.config.head.model_dump())
        elif arm == MLP:
            name, layer = next((n, m) for n, m in model.named_modules() if m is model.get_classifier())  # type: ignore[operator]
            hidden = self.config.mlp_hidden
            model.set_submodule(
                name,
                nn.Sequential(nn.Linear(layer.in_features, hidden), nn.ReLU(), nn.Linear(hidden, layer.out_features)),
            )
        head: nn.Module = model.get_classifier()  # type: ignore[operator]
        return head

    def cells(self) -> list[Cell]:
        return [Cell(arm, seed) for seed in self.config.seeds for arm in ARMS]

    def _backbone(self, seed: int, context: Context) -> nn.Module:
        """Returns a copy of the backbone of a seed: the same for all heads."""
        if seed not in self._backbones:
            wanted = self.config.backbone
            with seeded(self.name, "backbone", seed):
                model = build_backbone(wanted.model, self._images).to(context.device)
                if self._first is not None:
                    first = self._ready(model, self._first, context)
                    done = fit(model, first, wanted.fitting, seed, context.steps(wanted.fitting.epochs))
                    if done.loss is None:
                        raise OptionError(
                            f"The backbone did not train: its loss is not finite after {done.steps} steps. Lower "
                            "backbone.fitting.lr."
                        )
            self._backbones[seed] = model
        return copy.deepcopy(self._backbones[seed])

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        config = self.config
        model = self._backbone(cell.seed, context)
        train, test = (self._ready(model, part, context) for part in (self._images.train, self._images.validation))
        with seeded(self.name, "head", cell.seed):
            head = self._put(model, cell.arm).to(context.device)
            trained = model
            if config.backbone.frozen:
                train, test, trained = _features(model, train), _features(model, test), head
            done = fit(trained, train, config.fitting, cell.seed, context.steps(config.fitting.epochs))
        loss, accuracy = (None, None) if done.loss is None else evaluate(trained, test)
        return {
            "accuracy": accuracy,
            "loss": loss,
            "training_accuracy": None if done.loss is None else evaluate(trained, train)[1],
            "head_parameters": parameters_of(head),
            "training_cpu_seconds": done.cpu_seconds,
        }

    def _ready(self, model: nn.Module, part: Part, context: Context) -> Part:
        config = self.config
        return prepared(config.backbone.model, model, part, self._images.train, context.device, config.image_size)

    def tables(self, results: Results) -> list[Table]:
        config = self.config
        rows = [
            (
                arm,
                str(found[0].values["head_parameters"]),
                spread(found.each("accuracy"), ".2f"),
                spread(found.each("loss"), ".3f"),
                spread(found.each("training_accuracy"), ".2f"),
                spread(found.each("training_cpu_seconds"), ".1f"),
            )
            for arm, found in ((arm, results.of(arm=arm)) for arm in ARMS)
        ]
        wanted = config.backbone
        source = ", pretrained" if is_pretrained(wanted.model) else ""
        source += "" if self._first is None else f", trained on {len(self._first)} images of {wanted.train!r}"
        what = "frozen features" if wanted.frozen else "the whole network is trained"
        return [
            Table(
                f"Heads on {wanted.model.spec}{source}; {what}; {len(self._images.train)} images of "
                f"{config.data.train!r} of {config.data.name!r}, {config.fitting.epochs} epochs",
                (
                    "head",
                    "parameters",
                    "accuracy (%)",
                    "loss",
                    "accuracy on the training split (%)",
                    "training (CPU s)",
                ),
                rows,
                f"Mean ± standard deviation over seeds {config.seeds} (of random first weights and of the order), on "
                f"{len(self._images.validation)} images of {config.data.validation!r}, after the last epoch.",
            )
        ]

    def summary(self, results: Results) -> dict[str, Any]:
        return {
            f"{arm}_{key}": mean(results.of(arm=arm).each(key))
            for arm in ARMS
            for key in ("accuracy", "loss", "training_accuracy", "training_cpu_seconds")
        }

    def draw(self, results: Results) -> Any:
        from solver_plugins.studies.figures import compared

        wanted = (("accuracy", "accuracy (%)"), ("loss", "loss"), ("training_cpu_seconds", "training (CPU s)"))
        return compared(results, ARMS, wanted)


@torch.no_grad()
def _features(model: nn.Module, part: Part) -> Part:
    """Returns what the classifier of a model reads, in place of the images."""
    model.eval()
    found = [
        model.forward_head(model.forward_features(images), pre_logits=True)  # type: ignore[operator]
        for images in part.images.split(200)
    ]
    return Part(torch.cat(found), part.labels)
