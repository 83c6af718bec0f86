"""An equilibrium head beside other heads on the same backbone, all trained by one schedule fixed in advance."""

import copy
from typing import Any

from pydantic import Field
from torch import nn

from solver_plugins.config import StrictConfig
from solver_plugins.equilibrium import HeadConfig
from solver_plugins.errors import OptionError
from solver_plugins.integrations.heads import attach_opteq_head
from solver_plugins.studies.images import Column, SideBySide, SideBySideConfig, build_backbone, is_pretrained, prepared
from solver_plugins.studies.opteq_alpha import REFERENCE
from solver_plugins.studies.study import Cell, Context, register_study
from solver_plugins.studies.training import Fitting, features_of, fit, parameters_of, scores
from solver_plugins.train.config import ModelSection
from solver_plugins.train.randomness import seeded
from solver_plugins.train.tensors import Part

LINEAR, MLP, OPTEQ = "linear", "mlp", "opteq"


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


class OptEqHeadConfig(SideBySideConfig):
    """Settings of the comparison. The schedule is the same for all heads."""

    backbone: Backbone = Backbone()
    head: HeadConfig = HeadConfig()
    mlp_hidden: int = Field(64, ge=1, description="Hidden features of the head 'mlp': linear, ReLU, linear.")
    fitting: Fitting = Fitting()


@register_study
class OptEqHeadStudy(SideBySide[OptEqHeadConfig]):
    """An equilibrium head beside a linear one and a small network, on the same backbone."""

    name = "opteq-head"
    tags = ("opteq", "images")
    reference = f"Equation 4 {REFERENCE} as a head; the paper has no such table"
    Config = OptEqHeadConfig
    arms = (LINEAR, MLP, OPTEQ)
    heading = "head"
    columns = (
        Column("head_parameters", "parameters", drawn=False),
        Column("accuracy", "accuracy (%)", ".2f"),
        Column("loss", "loss", ".3f"),
        Column("training_accuracy", "accuracy on the training split (%)", ".2f", drawn=False),
        Column("training_cpu_seconds", "training (CPU s)", ".1f"),
    )
    _first: Part | None
    _backbones: dict[int, nn.Module]

    def prepare(self) -> None:
        super().prepare()
        config = self.config
        self._backbones, self._first = {}, None
        if config.backbone.train is not None:
            self._first = config.data.model_copy(update={"train": config.backbone.train}).load().train
        # Made once, so that mistakes surface before anything is written.
        self._put(build_backbone(config.backbone.model, self._images), OPTEQ)

    def _put(self, model: Any, arm: str) -> nn.Module:
        """Gives a model a new head, and returns the head."""
        model.reset_classifier(self._images.classes)
        if arm == OPTEQ:
            attach_opteq_head(model, **self.config.head.model_dump())
        elif arm == MLP:
            name, layer = next((n, m) for n, m in model.named_modules() if m is model.get_classifier())
            hidden = self.config.mlp_hidden
            layers = nn.Linear(layer.in_features, hidden), nn.ReLU(), nn.Linear(hidden, layer.out_features)
            model.set_submodule(name, nn.Sequential(*layers))
        head: nn.Module = model.get_classifier()
        return head

    def _backbone(self, seed: int, context: Context) -> nn.Module:
        """Returns a copy of the backbone of a seed, which is the same for all heads."""
        if seed not in self._backbones:
            wanted = self.config.backbone
            with seeded(self.name, "backbone", seed):
                model = build_backbone(wanted.model, self._images).to(context.device)
                if self._first is not None:
                    batches = wanted.fitting.batches(self._ready(model, self._first, context), seed)
                    done = fit(model, batches, wanted.fitting.settings(), context)
                    if done.diverged:
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
                train, test = (Part(features_of(model, part), part.labels) for part in (train, test))
                trained = head
            done = fit(trained, config.fitting.batches(train, cell.seed), config.fitting.settings(), context)
        found = None if done.diverged else scores(trained, test)
        return {
            "accuracy": None if found is None else found.accuracy,
            "loss": None if found is None else found.loss,
            "training_accuracy": None if found is None else scores(trained, train).accuracy,
            "head_parameters": parameters_of(head),
            "training_cpu_seconds": done.cpu_seconds,
        }

    def _ready(self, model: nn.Module, part: Part, context: Context) -> Part:
        config = self.config
        return prepared(config.backbone.model, model, part, self._images.train, context.device, config.image_size)

    def title(self) -> str:
        config, wanted = self.config, self.config.backbone
        source = ", pretrained" if is_pretrained(wanted.model) else ""
        source += "" if self._first is None else f", trained on {len(self._first)} images of {wanted.train!r}"
        what = "frozen features" if wanted.frozen else "the whole network is trained"
        return (
            f"Heads on {wanted.model.spec}{source}; {what}; {len(self._images.train)} images of "
            f"{config.data.train!r} of {config.data.name!r}, {config.fitting.epochs} epochs"
        )
