"""The convolutional equilibrium of the OptEq paper, as its studies train it."""

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from solver_plugins.config import StrictConfig
from solver_plugins.integrations.architectures import OptEqNet
from solver_plugins.studies.images import Images, Part

_EVALUATION_BATCH = 200


class OptEqNetwork(StrictConfig):
    """Widths of the network. Section 5.1 gives ``hidden`` and 199k parameters; with the other widths it has 198k."""

    hidden: list[int] = Field([16, 32, 64, 128, 128], min_length=1, description="Hidden channels of the layers.")
    state: int = Field(48, ge=1, description="Channels of the equilibrium.")
    extracted: int = Field(96, ge=1, description="Channels of the convolution in front.")
    stride: int = Field(1, ge=1, description="Of the convolution in front.")
    constraint: Literal["aol", "none"] = Field("aol", description="How |W| stays bounded: 'none' is the paper's.")
    norm: float = Field(0.9, gt=0, le=1, description="Bound on |W|.")
    iters: int = Field(20, ge=1, description="K, the evaluations of the map.")

    def make(self, images: Images, **options: Any) -> OptEqNet:
        """Returns the network for a data set; options are those of OptEqNet."""
        own = {**self.model_dump(), "hidden": tuple(self.hidden), **options}
        return OptEqNet(images.classes, images.shape[0], **own)


@torch.no_grad()
def equilibria(model: OptEqNet, part: Part) -> Tensor:
    """Returns the features of a split, as the trained network computes them."""
    model.eval()
    return torch.cat([model.forward_features(images) for images in part.images.split(_EVALUATION_BATCH)])


def parameters_of(model: torch.nn.Module) -> int:
    """Returns how many parameters are trained."""
    return sum(one.numel() for one in model.parameters() if one.requires_grad)
