"""Table 2 of the Deep Layers paper: LeNet with dropouts beside LeNet with Prox-SG in their place, from scratch."""

from typing import Any, ClassVar, TypeVar

from pydantic import Field
from torch import nn

from solver_plugins.integrations.architectures import DROPOUTS, LeNet
from solver_plugins.studies.controls import Sites
from solver_plugins.studies.deeplayers import REFERENCE, DeepLayersTable, TableConfig
from solver_plugins.studies.study import Value, register_study

DROPOUT, PROXSG = "dropout", "proxsg"


class Table2Config(TableConfig):
    """Settings of Table 2."""

    variants: list[str] = Field(
        ["d-d", "d-nd", "nd-d"], min_length=1, description="Which of the two layers follow a dropout."
    )
    drop_rate: float = Field(0.5, ge=0, lt=1, description="Of the dropouts; tau = (1 - p) n1. Paper: 0.5.")
    channels: tuple[int, int] = Field((6, 16), description="Widths of the convolutions; not in the paper.")
    features: tuple[int, int] = Field((120, 84), description="Widths of the hidden layers; not in the paper.")


C = TypeVar("C", bound=Table2Config)


class LeNetTable(DeepLayersTable[C]):
    """A table with LeNet, trained from scratch."""

    group = "variant"

    def groups(self) -> list[Value]:
        return list(self.config.variants)

    def sites(self, group: Value) -> Sites:
        places = zip(DROPOUTS.get(str(group), ()), {"fc1": "drop1", "fc2": "drop2"}.items(), strict=False)
        return dict(site for dropped, site in places if dropped)

    def rate(self, group: Value) -> float:
        return self.config.drop_rate

    def label(self, group: Value) -> str:
        return f"LeNet-{str(group).upper()}"

    def make(self, group: Value) -> nn.Module:
        config = self.config
        classes, channels = self._images.classes, self._images.shape[0]
        return LeNet(classes, channels, config.drop_rate, str(group), config.channels, config.features)


@register_study
class DeepLayersTable2(LeNetTable[Table2Config]):
    """LeNet with dropouts beside LeNet with Prox-SG in their place."""

    name = "deeplayers-table2"
    reference = f"Table 2 {REFERENCE}"
    Config = Table2Config
    printed: ClassVar = {
        "d-d": {DROPOUT: 64.39, PROXSG: 72.86},
        "d-nd": {DROPOUT: 71.72, PROXSG: 75.20},
        "nd-d": {DROPOUT: 68.54, PROXSG: 76.23},
    }

    def arms(self) -> tuple[str, ...]:
        return DROPOUT, PROXSG

    def conversion(self, group: Value, arm: str) -> dict[str, Any]:
        # Without a rate, no layer would be found by its live dropout.
        found = {"pattern": "strict"} if self.config.drop_rate else {"targets": list(self.sites(group)), "p": 0.0}
        return {**found, **self.config.solver.of(arm)}
