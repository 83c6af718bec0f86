"""Beyond the Deep Layers paper: heads on frozen features, where labels are few or wrong, or features are missing."""

from collections import OrderedDict
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from solver_plugins.config import StrictConfig
from solver_plugins.errors import OptionError
from solver_plugins.studies.comparison import Row, losses
from solver_plugins.studies.controls import LINEAR, SIMPLE, Sites, set_rates, untuned
from solver_plugins.studies.deeplayers import REFERENCE, DeepLayersTable, TableConfig, samples
from solver_plugins.studies.images import build_backbone, is_pretrained, prepared
from solver_plugins.studies.study import Cell, Context, Results, Table, Value, register_study
from solver_plugins.studies.training import Fitting, features_of
from solver_plugins.train.config import ModelSection
from solver_plugins.train.loop import Hooks
from solver_plugins.train.randomness import seed_for, seeded
from solver_plugins.train.tensors import Part

DROPOUT, PROXSG, PROXGD, OBSERVED = "dropout", "proxsg", "proxgd", "observed"
_SPREAD = 1e-6
"""Features that hardly vary are not blown up."""


class Situation(StrictConfig):
    """What a head is trained on, drawn anew for every seed."""

    images: int = Field(500, ge=2, description="Training images, drawn from the training split.")
    wrong_labels: float = Field(0.0, ge=0, lt=1, description="Share of training images with another class's label.")
    missing: float = Field(
        0.0, ge=0, lt=1, description="Share of features that each image lacks, in all splits: they are zero, the mean."
    )
    epochs: int | None = Field(None, ge=1, description="Passes over these images; fitting.epochs by default.")


class HeadsConfig(TableConfig):
    """Settings of the comparison."""

    model: ModelSection = Field(
        ModelSection(spec="timm/resnet18"), description="A model of timm and its weights, as in finetune recipes."
    )
    hidden: int = Field(256, ge=1, description="Width of the hidden layer, which becomes a solver.")
    drop_rate: float = Field(0.5, ge=0, lt=1, description="Of the dropout on the features.")
    situations: dict[str, Situation] = Field({"n500": Situation()}, min_length=1, description="By name.")


class Observed(nn.Module):
    """A linear layer before a ReLU as a solve that leaves out features that an image lacks: those that are zero.

    ``x <- relu(A u + b + x - (A M A^T + lam) x / L)`` from zero, where ``M`` keeps what is there. The last ReLU is the
    network's own. It is ``proxgd`` where nothing is missing.
    """

    def __init__(self, layer: nn.Linear, iters: int, lam: float):
        super().__init__()
        self.layer, self.iters, self.lam = layer, iters, lam

    def forward(self, input: Tensor) -> Tensor:
        """Returns the argument of the last ReLU."""
        A, there = self.layer.weight, input != 0
        L = torch.linalg.eigvalsh(A.detach() @ A.detach().T)[-1] + self.lam
        c: Tensor = self.layer(input)
        last = c
        for _ in range(self.iters - 1):
            x = last.relu()
            last = c + x - ((x @ A * there) @ A.T + self.lam * x) / L
        return last


@register_study
class DeepLayersHeads(DeepLayersTable[HeadsConfig]):
    """Heads on frozen features: solvers beside dropout, simpler controls and a linear head."""

    name = "deeplayers-heads"
    reference = f"Beyond Table 5 {REFERENCE}: heads on frozen features; the paper has no such table"
    Config = HeadsConfig
    group = "situation"
    simple = (*SIMPLE, LINEAR)
    # The library's default; evaluation with sampling was worse in every other study.
    eval_mode: ClassVar[str] = "deterministic"
    evaluation_batch = 2000
    _backbone: Any = None

    def groups(self) -> list[Value]:
        return list(self.config.situations)

    def arms(self) -> tuple[str, ...]:
        return DROPOUT, PROXSG, PROXGD, OBSERVED

    def rate(self, group: Value) -> float:
        return self.config.drop_rate

    def sites(self, group: Value) -> Sites:
        return {"hidden": "drop"}

    def title(self) -> str:
        config = self.config
        source = ", pretrained" if is_pretrained(config.model) else ""
        return f"heads on frozen features of {config.model.spec}{source}, images of {config.data.name!r}"

    def backbone(self) -> Any:
        """Returns the network whose features all heads read."""
        if self._backbone is None:
            # Random weights of its own: no cell's random numbers are used up.
            with seeded(self.name, "backbone"):
                self._backbone = build_backbone(self.config.model, self._images)
        return self._backbone

    def make(self, group: Value) -> nn.Module:
        config, features = self.config, self.backbone().num_features
        layers: list[tuple[str, nn.Module]] = [
            ("drop", nn.Dropout(config.drop_rate)), ("hidden", nn.Linear(features, config.hidden)), ("act", nn.ReLU()),
            ("classifier", nn.Linear(config.hidden, self._images.classes)),
        ]  # fmt: skip
        return nn.Sequential(OrderedDict(layers))

    def conversion(self, group: Value, arm: str) -> dict[str, Any]:
        options = {"targets": ["hidden"], **self.config.solver.of(arm)}
        return {**options, "p": self.rate(group)} if samples(arm) else options

    def fitting(self, group: Value, arm: str) -> Fitting:
        epochs = self.config.situations[str(group)].epochs
        return self.config.fitting.model_copy(update={"epochs": epochs} if epochs else {})

    def _example(self) -> Tensor:
        return torch.zeros(1, self.backbone().num_features)

    def _solved(self, model: Any, group: Value, arm: str, example: Tensor, p: float | None = None) -> nn.Module:
        solved: nn.Module = model
        if arm == LINEAR:
            classifier = nn.Linear(model.hidden.in_features, model.classifier.out_features)
            model.drop, model.hidden, model.act = nn.Identity(), nn.Identity(), nn.Identity()
            model.classifier = classifier.to(example)
        elif untuned(arm) == OBSERVED:
            set_rates(model, self.sites(group), self.rate(group) if p is None else p)
            model.hidden = Observed(model.hidden, self.config.solver.iters, self.config.solver.lam)
        else:
            solved = super()._solved(model, group, arm, example, p)
        return solved

    def prepare(self) -> None:
        super().prepare()
        most, wanted = len(self._images.train), max(one.images for one in self.config.situations.values())
        if wanted > most:
            raise OptionError(f"Expected situations of at most {most} images, those of data.train; found {wanted}.")

    def hooks(self, arm: str, steps: int) -> Hooks:
        # Its step size is exact at every step.
        return Hooks() if untuned(arm) == OBSERVED else super().hooks(arm, steps)

    def _ready(self, model: nn.Module, context: Context) -> dict[str, Part]:
        """Returns the features of all splits, standardised by those of the training split, computed once."""
        if not self._parts:
            backbone, config = self.backbone().to(context.device), self.config
            found = {}
            for key, part in self._splits().items():
                images = prepared(config.model, backbone, part, self._images.train, context.device, config.image_size)
                found[key] = Part(features_of(backbone, images.channels_last()), images.labels)
            known = found["train"].images
            mean, scale = known.mean(0), known.std(0).clamp_min(_SPREAD)
            self._parts = {key: Part((part.images - mean) / scale, part.labels) for key, part in found.items()}
        return self._parts

    def _inputs(self, model: nn.Module, cell: Cell, context: Context) -> dict[str, Part]:
        """Returns what the heads of a situation and seed read: the same for all arms."""
        situation = self.config.situations[str(cell[self.group])]
        parts = self._ready(model, context)

        def drawn(what: str) -> torch.Generator:
            # The same of each in all situations: a larger draw holds a smaller one.
            return torch.Generator().manual_seed(seed_for(self.name, cell.seed, what))

        train, count = parts["train"], situation.images
        rows = torch.randperm(len(train), generator=drawn("images"))[:count]
        labels = train.labels[rows.to(train.labels.device)].clone()
        wrong = torch.randperm(count, generator=drawn("wrong"))[: round(situation.wrong_labels * count)]
        away = torch.randint(1, self._images.classes, (len(wrong),), generator=drawn("labels"))
        labels[wrong] = (labels[wrong] + away.to(labels)) % self._images.classes
        chosen = {**parts, "train": Part(train.images[rows.to(train.images.device)], labels)}
        if situation.missing == 0:
            return chosen
        return {
            key: Part(_lacking(one.images, situation.missing, drawn(key)), one.labels) for key, one in chosen.items()
        }

    def tables(self, results: Results) -> list[Table]:
        rows, plain, config = self.rows(results), self.arms()[0], self.config
        accuracy, gained, *others = super().tables(results)
        solvers = [row for row in rows if row.has_solver(plain)]
        beside = [plain, *(arm for arm in config.controls if not Row.of_arm(arm).has_solver(plain))]
        return [accuracy, gained, *others, losses(rows, solvers, beside, config.seeds)]


def _lacking(features: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Returns features of which each image lacks a share, drawn by itself."""
    there = torch.rand(features.shape, generator=generator) >= share
    return features * there.to(features.device)
