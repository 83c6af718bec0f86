"""Table 4 of the Deep Layers paper: the fully connected layers of VGG16 as solvers."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from solver_plugins.studies.deeplayers import FIRST, REFERENCE
from solver_plugins.studies.deeplayers_vgg import DROPOUT, VGGConfig, VGGTable
from solver_plugins.studies.study import Value, register_study

LAST, BOTH, PROXGD = "proxsg-nd-d", "proxsg-d-d", "proxgd"


class Table4Config(VGGConfig):
    """Settings of Table 4."""

    beside: Literal["CIFAR-10", "CIFAR-100"] = Field("CIFAR-10", description="Which of the paper's numbers are shown.")


@register_study
class DeepLayersTable4(VGGTable[Table4Config]):
    """VGG16 with its last or both fully connected layers as Prox-SG, or as Prox-GD behind live dropouts."""

    name = "deeplayers-table4"
    reference = f"Table 4 {REFERENCE}"
    Config = Table4Config
    group = "beside"
    printed: ClassVar = {
        "CIFAR-10": {FIRST: 92.56, LAST: 92.44, BOTH: 92.57, PROXGD: 92.80},
        "CIFAR-100": {FIRST: 70.27, LAST: 70.95, BOTH: 70.44, PROXGD: 71.10},
    }

    def groups(self) -> list[Value]:
        return [self.config.beside]

    def arms(self) -> tuple[str, ...]:
        return DROPOUT, LAST, BOTH, PROXGD

    def label(self, group: Value) -> str:
        return "VGG16" if self.config.width == 1 else "narrow VGG16"

    def conversion(self, group: Value, arm: str) -> dict[str, Any]:
        solver = "proxgd" if arm == PROXGD else "proxsg"
        return {"targets": ["fc2"] if arm == LAST else ["fc1", "fc2"], **self.config.solver.of(solver)}
