"""An equilibrium head beside other heads on the same backbone, with the same schedule and search."""

import copy
from typing import Any, ClassVar

from pydantic import Field
from torch import nn

from solver_plugins.config import StrictConfig
from solver_plugins.equilibrium import HeadConfig
from solver_plugins.errors import OptionError
from solver_plugins.integrations.heads import attach_opteq_head
from solver_plugins.studies.classifiers import ClassifierStudy
from solver_plugins.studies.controls import put_before, untuned
from solver_plugins.studies.opteq_alpha import REFERENCE
from solver_plugins.studies.searched import SearchedConfig
from solver_plugins.studies.study import Cell, Context, Value, register_study
from solver_plugins.studies.training import Fitting, fit, parameters_of
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


class OptEqHeadConfig(SearchedConfig):
    """Settings of the comparison. The schedule and the search are the same for all heads."""

    backbone: Backbone = Backbone()
    head: HeadConfig = HeadConfig()
    mlp_hidden: int = Field(64, ge=1, description="Hidden features of the head 'mlp': linear, ReLU, linear.")


@register_study
class OptEqHeadStudy(ClassifierStudy[OptEqHeadConfig]):
    """An equilibrium head beside a linear one and a small network, on the same backbone."""

    name = "opteq-head"
    tags = ("opteq", "images")
    reference = f"Equation 4 {REFERENCE} as a head; the paper has no such table"
    Config = OptEqHeadConfig
    measures: ClassVar = {"parameters": ("head_parameters", ".0f")}
    _first: Part | None
    _backbones: dict[int, nn.Module]

    def arms(self) -> tuple[str, ...]:
        return LINEAR, MLP, OPTEQ

    def tunable(self) -> tuple[str, ...]:
        return self.arms()

    def equals(self, group: Value, arm: str) -> list[tuple[str, float]]:
        return [(untuned(arm), 0.0)]

    def section(self) -> ModelSection:
        return self.config.backbone.model

    def frozen(self) -> bool:
        return self.config.backbone.frozen

    def same_for_all_seeds(self) -> bool:
        return super().same_for_all_seeds() and self._first is None

    def prepare(self) -> None:
        super().prepare()
        config = self.config
        self._backbones, self._first = {}, None
        if config.backbone.train is not None:
            self._first = config.data.model_copy(update={"train": config.backbone.train}).load().train
        # Made once, so that mistakes surface before anything is written.
        self._put(self.make(""), OPTEQ)

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
                model = self.make("").to(context.device)
                if self._first is not None:
                    batches = wanted.fitting.batches(self._prepared(model, self._first, context), seed)
                    done = fit(model, batches, wanted.fitting.settings(), context)
                    if done.diverged:
                        raise OptionError(
                            f"The backbone did not train: its loss is not finite after {done.steps} steps. Lower "
                            "backbone.fitting.lr."
                        )
            self._backbones[seed] = model
        return copy.deepcopy(self._backbones[seed])

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        model = self._backbone(cell.seed, context)
        self._inputs(model, cell, context)
        with seeded(self.name, "head", cell.seed):
            self._put(model, untuned(cell.arm)).to(context.device)
            return self.compare(cell, model, context)

    def _convert(self, cell: Cell, model: Any, parts: dict[str, Part], p: Any = None) -> dict[str, Any]:
        if p is not None:
            put_before(model, self.classifier_of(model), nn.Dropout(p))
        super()._convert(cell, model, parts, p)
        return {"head_parameters": parameters_of(self.classifier_of(model))}

    def title(self) -> str:
        first = (
            "" if self._first is None else f", trained on {len(self._first)} images of {self.config.backbone.train!r}"
        )
        return f"Heads on {super().title()}{first}"
