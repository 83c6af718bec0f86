"""What a solver in place of a dropout has to beat: the same layers without dropout, or with something simpler.

``none`` is no dropout at these layers, ``averaged`` the mean of as many masks as the solver has iterations, ``gain`` no
dropout and a trained gain for each output channel (as IA3 has), ``biases`` no dropout and only biases trained. An arm
whose name ends in ``-tuned`` has its rate chosen by the search, together with the step size.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from solver_plugins.dropblock import AveragedDropout

NONE, AVERAGED, GAIN, BIASES, TUNED = "none", "averaged", "gain", "biases", "-tuned"
SIMPLE = (NONE, AVERAGED, GAIN, BIASES)
LINEAR = "linear"
"""A control of heads alone: the classifier without a hidden layer."""

Sites = Mapping[str, str | None]
"""Layers that become solvers, and the dropout in front of each: names of modules, or how they end."""


class Gained(nn.Module):
    """A layer whose output channels are multiplied by trained gains, which begin at one."""

    def __init__(self, layer: Any):
        super().__init__()
        self.layer = layer
        # Channels come first in feature maps, behind the batch.
        self.gain = nn.Parameter(torch.ones(len(layer.weight), *[1] * (layer.weight.ndim - 2)))

    def forward(self, input: Tensor) -> Tensor:
        found: Tensor = self.layer(input) * self.gain
        return found


class Gains(nn.Module):
    """Features times trained gains, which begin at one."""

    def __init__(self, features: int):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(features))

    def forward(self, input: Tensor) -> Tensor:
        """Returns the features times the gains."""
        return input * self.gain


def put_before(model: nn.Module, last: nn.Module, layer: nn.Module) -> None:
    """Puts a layer in front of one of a model's."""
    name = next(name for name, one in model.named_modules() if one is last)
    model.set_submodule(name, nn.Sequential(layer, last).to(next(last.parameters()).device))


def untuned(arm: str) -> str:
    """Returns the name of an arm without what says that its rate is searched."""
    return arm.removesuffix(TUNED)


def put_control(model: nn.Module, sites: Sites, control: str, masks: int) -> None:
    """Puts a control into a plain network, in place."""
    for target, dropout in sites.items():
        name = full_name(model, target)
        layer: Any = model.get_submodule(name)
        if dropout is not None:
            rate = rate_of(model, dropout)
            if control == AVERAGED:
                model.set_submodule(full_name(model, dropout), AveragedDropout(rate, masks))
            else:
                set_rates(model, {target: dropout}, 0.0)
        if control == GAIN:
            model.set_submodule(name, Gained(layer).to(layer.weight.device))
        elif control == BIASES:
            layer.weight.requires_grad_(False)


def set_rates(model: nn.Module, sites: Sites, p: float) -> None:
    """Sets the rates of the dropouts in front of the layers."""
    for dropout in filter(None, sites.values()):
        module: Any = model.get_submodule(full_name(model, dropout))
        module.p = p


def rate_of(model: nn.Module, dropout: str) -> float:
    """Returns the rate of a dropout."""
    module: Any = model.get_submodule(full_name(model, dropout))
    return float(module.p)


def full_name(model: nn.Module, end: str) -> str:
    """Returns the name of the module that is called so, or whose name ends so."""
    return next(name for name, _ in model.named_modules() if name == end or name.endswith(f".{end}"))
