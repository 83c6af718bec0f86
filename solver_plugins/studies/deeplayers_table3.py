"""Table 3 of the Deep Layers paper: the first convolution of AlexNet as Prox-GD, finetuned."""

from typing import Any, ClassVar

from torch import nn

from solver_plugins.integrations.architectures import CifarAlexNet
from solver_plugins.studies.comparison import FIRST
from solver_plugins.studies.controls import Sites
from solver_plugins.studies.deeplayers import REFERENCE, DeepLayersTable, FinetunedConfig
from solver_plugins.studies.study import Value, register_study


@register_study
class DeepLayersTable3(DeepLayersTable[FinetunedConfig]):
    """AlexNet with its first convolution as Prox-GD, finetuned."""

    name = "deeplayers-table3"
    reference = f"Table 3 {REFERENCE}"
    Config = FinetunedConfig
    printed: ClassVar = {"CIFAR-10": {FIRST: 77.30, "proxgd": 78.51}, "CIFAR-100": {FIRST: 44.20, "proxgd": 45.53}}

    def arms(self) -> tuple[str, ...]:
        return "plain", "proxgd"

    def label(self, group: Value) -> str:
        return "AlexNet"

    def make(self, group: Value) -> nn.Module:
        return CifarAlexNet(self._images.classes, self._images.shape[0])

    def sites(self, group: Value) -> Sites:
        return {"conv1": None}

    def conversion(self, group: Value, arm: str) -> dict[str, Any]:
        return {"targets": ["conv1"], **self.config.solver.of(arm)}
