"""The convolutional equilibrium of the OptEq paper, and what the studies that train it share."""

from typing import Any, Literal, TypeVar

import pydantic
from pydantic import Field

from solver_plugins.config import StrictConfig
from solver_plugins.integrations.architectures import OptEqNet
from solver_plugins.studies.images import ImageConfig, Images, ImageStudy
from solver_plugins.studies.study import Results
from solver_plugins.studies.training import Fitting

REFERENCE = "of *Optimization Induced Equilibrium Networks* (Xie et al., 2021)"
ALPHAS = (0.01, 0.1, 0.4, 0.8, 1.0)
"""Those of the paper's tables."""


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


class OptEqConfig(ImageConfig):
    """Settings of a study that trains the network."""

    network: OptEqNetwork = OptEqNetwork()
    fitting: Fitting = Fitting()
    alphas: list[float] = Field(list(ALPHAS), min_length=1, description="Steps of the layers, in (0, 1].")

    @pydantic.field_validator("alphas")
    @classmethod
    def _steps(cls, alphas: list[float]) -> list[float]:
        if min(alphas) <= 0 or max(alphas) > 1:
            raise ValueError("expected alphas above 0 and at most 1")
        return alphas


C = TypeVar("C", bound=OptEqConfig)


class OptEqStudy(ImageStudy[C]):
    """A study that trains the network on images."""

    tags = ("opteq", "images")

    def _setting(self, results: Results) -> str:
        """Returns what the report says about data, network and training."""
        config = self.config
        return (
            f"{len(self._images.train)} images of {config.data.name!r}, hidden channels "
            f"{'-'.join(map(str, config.network.hidden))}, {results[0].values['parameters']} parameters, "
            f"K = {config.network.iters}, {config.fitting.epochs} epochs"
        )
