"""Table 5 of the Deep Layers paper: the rate of the last dropout against the sampling of Prox-SG in its place."""

from typing import Any, ClassVar, Self

import pydantic
from pydantic import Field

from solver_plugins.studies.comparison import FIRST
from solver_plugins.studies.controls import Sites
from solver_plugins.studies.deeplayers import REFERENCE
from solver_plugins.studies.deeplayers_table4 import DROPOUT, VGGConfig, VGGTable
from solver_plugins.studies.study import Value, register_study

PROXSG = "proxsg"


class Table5Config(VGGConfig):
    """Settings of Table 5."""

    drop_rates: list[float] = Field(
        [0.0, 0.1, 0.5, 0.9, 0.95], min_length=1, description="Of the last dropout; tau = (1 - p) n1."
    )

    @pydantic.model_validator(mode="after")
    def _rates_fit(self) -> Self:
        if not all(0 <= rate < 1 for rate in self.drop_rates):
            raise ValueError("expected drop_rates in [0, 1)")
        if self.first is None:
            raise ValueError("expected first: networks, or frozen convolutions, are trained before the solvers")
        return self


@register_study
class DeepLayersTable5(VGGTable[Table5Config]):
    """The rate of the last dropout of VGG16 against the sampling of Prox-SG in its place."""

    name = "deeplayers-table5"
    reference = f"Table 5 {REFERENCE}"
    Config = Table5Config
    group = "p"
    printed: ClassVar = {
        0.0: {FIRST: 70.57, PROXSG: 70.87},
        0.1: {FIRST: 70.56, PROXSG: 70.51},
        0.5: {FIRST: 70.27, PROXSG: 70.95},
        0.9: {FIRST: 68.34, PROXSG: 69.19},
        0.95: {FIRST: 30.61, PROXSG: 67.42},
    }

    def groups(self) -> list[Value]:
        return list(self.config.drop_rates)

    def arms(self) -> tuple[str, ...]:
        return DROPOUT, PROXSG

    def shared(self) -> Value:
        return self.config.drop_rate

    def rates(self, group: Value) -> tuple[float, float]:
        return self.config.drop_rate, float(group)

    def label(self, group: Value) -> str:
        return f"p={float(group):g}"

    def sites(self, group: Value) -> Sites:
        return {"fc2": "drop2"}

    def conversion(self, group: Value, arm: str) -> dict[str, Any]:
        return {"targets": ["fc2"], "p": float(group), **self.config.solver.of(arm)}
