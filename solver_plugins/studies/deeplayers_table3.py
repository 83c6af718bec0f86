"""Table 3 of the Deep Layers paper: the first convolution of AlexNet as Prox-GD, finetuned."""

from typing import Any, ClassVar, Literal

from pydantic import Field
from torch import nn

from solver_plugins.integrations.architectures import CifarAlexNet
from solver_plugins.studies.controls import Sites
from solver_plugins.studies.deeplayers import FIRST, REFERENCE, DeepLayersTable, TableConfig
from solver_plugins.studies.study import Value, register_study

PLAIN, PROXGD = "plain", "proxgd"


class Table3Config(TableConfig):
    """Settings of Table 3."""

    beside: Literal["CIFAR-10", "CIFAR-100"] = Field("CIFAR-10", description="Which of the paper's numbers are shown.")


@register_study
class DeepLayersTable3(DeepLayersTable[Table3Config]):
    """AlexNet with its first convolution as Prox-GD, finetuned."""

    name = "deeplayers-table3"
    reference = f"Table 3 {REFERENCE}"
    Config = Table3Config
    group = "beside"
    printed: ClassVar = {"CIFAR-10": {FIRST: 77.30, PROXGD: 78.51}, "CIFAR-100": {FIRST: 44.20, PROXGD: 45.53}}

    def groups(self) -> list[Value]:
        return [self.config.beside]

    def arms(self) -> tuple[str, ...]:
        return PLAIN, PROXGD

    def sites(self, group: Value) -> Sites:
        return {"conv1": None}

    def label(self, group: Value) -> str:
        return "AlexNet"

    def make(self, group: Value) -> nn.Module:
        return CifarAlexNet(self._images.classes, self._images.shape[0])

    def conversion(self, group: Value, arm: str) -> dict[str, Any]:
        return {"targets": ["conv1"], **self.config.solver.of(arm)}
