"""Residual blocks of torchvision, timm and transformers, and what they compute with solvers: plain modules alone."""

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import timm
import torch
import torchvision
from torch import Tensor, nn

from solver_plugins import convert_model
from tests.blocks.linked import ITERS, diagonal, lively, normed, solved
from tests.surgery import models as hugging


@dataclass(frozen=True)
class Case:
    """One residual block of a library's model.

    Attributes:
        build: Makes the model.
        block: Name of the residual block.
        parts: Names of its convolutions and their norms; a ReLU follows each, the last one behind the sum.
        shortcut: Name of what stands in the skip connection; None where that is the identity.
        shared: Whether one ReLU module serves the whole block.
    """

    build: Callable[[], nn.Module]
    block: str
    parts: tuple[tuple[str, str], ...]
    shortcut: str | None = None
    shared: bool = False

    @property
    def names(self) -> list[str]:
        """The names of the block's convolutions."""
        return [f"{self.block}.{conv}" for conv, _ in self.parts]


def _resnet18() -> nn.Module:
    """Without the last stages, which take most of the time."""
    made = torchvision.models.resnet18()
    made.layer3, made.layer4, made.fc = nn.Identity(), nn.Identity(), nn.Linear(128, 5)
    return made


_BASIC = (("conv1", "bn1"), ("conv2", "bn2"))
CASES = {
    "torchvision": Case(_resnet18, "layer1.0", _BASIC, shared=True),
    "timm": Case(lambda: timm.create_model("test_resnet", num_classes=5), "layer1.0", _BASIC),
    "regnet": Case(
        lambda: timm.create_model("regnetx_002", num_classes=5),
        "s3.b2",
        (("conv1.conv", "conv1.bn"), ("conv2.conv", "conv2.bn"), ("conv3.conv", "conv3.bn")),
    ),
    "transformers": Case(
        hugging.resnet,
        "resnet.encoder.stages.1.layers.0",
        (("layer.0.convolution", "layer.0.normalization"), ("layer.1.convolution", "layer.1.normalization")),
        "shortcut",
    ),
}


def image() -> Tensor:
    """Returns a batch, large enough for the statistics of the last norm."""
    return torch.randn(3, 3, 64, 64, dtype=torch.float64)


def build(name: str) -> nn.Module:
    """Returns a plain model in float64, for evaluation, with lively norms."""
    made = CASES[name].build().double().eval()
    for module in made.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            lively(module)
    return made


def convert_block(plain: nn.Module, name: str, iters: int = ITERS) -> nn.Module:
    """Returns a copy in which the convolutions of the case's block are solvers."""
    targets = "|".join(map(re.escape, CASES[name].names))
    return convert_model(copy.deepcopy(plain), "proxgd", iters, targets=targets, pattern="all", example_inputs=image())


def output(model: Any, x: Tensor) -> Tensor:
    """Returns the logits."""
    found = model(x)
    return found if isinstance(found, Tensor) else found.logits


def solve_block(plain: nn.Module, solvers: dict[str, Any], name: str, iters: int = ITERS) -> nn.Module:
    """Gives a plain model the forward pass that solvers in the case's block make, and returns it.

    Args:
        plain: The plain model; its convolutions may carry adapters.
        solvers: The converted convolutions by their names in ``parts``, for their constants.
        name: Of the case.
        iters: How many steps.
    """
    case = CASES[name]
    module: Any = plain.get_submodule(case.block)

    def forward(x: Tensor) -> Tensor:
        skip = module.get_submodule(case.shortcut) if case.shortcut else None
        skip = x if skip is None else skip(x)
        for conv, norm in case.parts:
            layer, following = module.get_submodule(conv), module.get_submodule(norm)
            y = layer(x)
            last = (conv, norm) == case.parts[-1]
            c = normed(following, y) + skip if last else normed(following, y)
            plain_layer = getattr(layer, "base_layer", layer)
            x = torch.relu(solved(solvers[conv], plain_layer, x, c, diagonal(following, y), iters=iters))
        return x

    module.forward = forward
    return plain


def solvers_of(made: nn.Module, name: str) -> dict[str, Any]:
    """Returns the converted convolutions of the case's block by their names in ``parts``."""
    block = made.get_submodule(CASES[name].block)
    return {conv: block.get_submodule(conv) for conv, _ in CASES[name].parts}
