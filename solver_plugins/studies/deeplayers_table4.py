"""Table 4 of the Deep Layers paper: the fully connected layers of VGG16 as solvers; and its VGG16 for Table 5."""

from collections import OrderedDict
from typing import Any, ClassVar, TypeVar

from pydantic import Field
from torch import Tensor, nn

from solver_plugins.studies.comparison import FIRST
from solver_plugins.studies.controls import Sites
from solver_plugins.studies.deeplayers import REFERENCE, DeepLayersTable, FinetunedConfig, TableConfig, read_first
from solver_plugins.studies.study import Cell, Context, Value, register_study
from solver_plugins.studies.training import collected
from solver_plugins.train.tensors import Part

DROPOUT, LAST, BOTH, PROXGD = "dropout", "proxsg-nd-d", "proxsg-d-d", "proxgd"
_LAYERS = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
"""Channels and convolutions of VGG16 between two poolings."""


class VGGConfig(TableConfig):
    """Settings of a table with VGG16."""

    width: float = Field(1.0, gt=0, le=1, description="Factor on the channels of VGG16; 1 is the paper's network.")
    features: int = Field(512, ge=1, description="Widths of the fully connected layers. Paper: 512 for the last.")
    norm: bool = Field(True, description="Whether a BatchNorm follows every convolution; the paper does not say.")
    drop_rate: float = Field(0.5, ge=0, lt=1, description="Of both dropouts. Paper: 0.5.")
    frozen: bool = Field(
        False,
        description="Whether convolutions stay as the first stage leaves them, and new fully connected layers are "
        "trained on their features; else whole networks are finetuned, as in the paper.",
    )


class CifarVGG(nn.Module):
    """VGG16 for 32x32 images: 13 convolutions, then dropout -> linear -> ReLU twice, then the classifier."""

    def __init__(
        self, in_chans: int, num_classes: int, width: float, features: int, rates: tuple[float, float], norm: bool
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = in_chans
        for channels, count in _LAYERS:
            after = max(1, round(channels * width))
            for _ in range(count):
                layers.append(nn.Conv2d(before, after, 3, padding=1))
                layers += [nn.BatchNorm2d(after)] if norm else []
                layers.append(nn.ReLU())
                before = after
            layers.append(nn.MaxPool2d(2))
        self.body = nn.Sequential(*layers, nn.Flatten())
        parts: list[tuple[str, nn.Module]] = [
            ("drop1", nn.Dropout(rates[0])), ("fc1", nn.Linear(before, features)), ("relu1", nn.ReLU()),
            ("drop2", nn.Dropout(rates[1])), ("fc2", nn.Linear(features, features)), ("relu2", nn.ReLU()),
            ("fc", nn.Linear(features, num_classes)),
        ]  # fmt: skip
        self.head = nn.Sequential(OrderedDict(parts))
        for layer in self.body:
            if isinstance(layer, nn.Conv2d):
                # Without norms, thirteen layers would otherwise lose the signal.
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits."""
        found: Tensor = self.head(self.body(x))
        return found


C = TypeVar("C", bound=VGGConfig)


class VGGTable(DeepLayersTable[C]):
    """A table with VGG16 whose convolutions may be frozen."""

    _features: dict[int, dict[str, Part]]

    def prepare(self) -> None:
        self._features = {}
        super().prepare()

    def rates(self, group: Value) -> tuple[float, float]:
        """Returns the rates of the two dropouts of a network."""
        return self.config.drop_rate, self.config.drop_rate

    def make(self, group: Value) -> CifarVGG:
        config, images = self.config, self._images
        return CifarVGG(images.shape[0], images.classes, config.width, config.features, self.rates(group), config.norm)

    def title(self) -> str:
        config = self.config
        size = "VGG16" if config.width == 1 else f"VGG16 with {config.width:g} of its channels"
        what = "new fully connected layers on frozen features" if config.frozen else "finetuned"
        return f"{size}, {what}, {super().title()}"

    def _firsts(self) -> list[Cell]:
        # Networks that share their convolutions share one cell.
        return list(dict.fromkeys(super()._firsts()))

    def _first_cell(self, group: Value, seed: int) -> Cell:
        return super()._first_cell(self.shared() if self.config.frozen else group, seed)

    def shared(self) -> Value:
        """Returns the network whose convolutions all others use if they are frozen."""
        return self.groups()[0]

    def _tests_first(self) -> bool:
        return super()._tests_first() and not self.config.frozen

    def _begin(self, model: Any, first: Cell, context: Context) -> nn.Module:
        if not self.config.frozen:
            return super()._begin(model, first, context)
        kept = {key: value for key, value in read_first(first, context).items() if key.startswith("body.")}
        model.body.load_state_dict({key.removeprefix("body."): value for key, value in kept.items()})
        moved: nn.Module = model.to(context.device)
        return moved

    def _inputs(self, model: Any, cell: Cell, context: Context) -> dict[str, Part]:
        parts = super()._inputs(model, cell, context)
        if not self.config.frozen:
            return parts
        if cell.seed not in self._features:
            # Only one seed is kept: features may be as large as the images.
            body = model.body
            found = {key: Part(collected(body, one, body), one.labels) for key, one in parts.items()}
            self._features = {cell.seed: found}
        return self._features[cell.seed]

    def _trained(self, model: Any) -> nn.Module:
        trained: nn.Module = model.head if self.config.frozen else model
        return trained

    def sites(self, group: Value) -> Sites:
        # Never the classifier.
        return {"fc1": "drop1", "fc2": "drop2"}

    def rate(self, group: Value) -> float:
        return self.rates(group)[1]


class Table4Config(VGGConfig, FinetunedConfig):
    """Settings of Table 4."""


@register_study
class DeepLayersTable4(VGGTable[Table4Config]):
    """VGG16 with its last or both fully connected layers as Prox-SG, or as Prox-GD behind live dropouts."""

    name = "deeplayers-table4"
    reference = f"Table 4 {REFERENCE}"
    Config = Table4Config
    printed: ClassVar = {
        "CIFAR-10": {FIRST: 92.56, LAST: 92.44, BOTH: 92.57, PROXGD: 92.80},
        "CIFAR-100": {FIRST: 70.27, LAST: 70.95, BOTH: 70.44, PROXGD: 71.10},
    }

    def arms(self) -> tuple[str, ...]:
        return DROPOUT, LAST, BOTH, PROXGD

    def label(self, group: Value) -> str:
        return "VGG16" if self.config.width == 1 else "narrow VGG16"

    def conversion(self, group: Value, arm: str) -> dict[str, Any]:
        options = self.config.solver.of(PROXGD if arm == PROXGD else "proxsg")
        return {"targets": ["fc2"] if arm == LAST else ["fc1", "fc2"], **options}
