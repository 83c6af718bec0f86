"""LeakyReLU and PReLU: the squared hinge loss without shift (Prop. 3), written by its slope.

    g(x) = (gam/2) max(-x, 0)^2,  gam = (1 - s)/s        prox_{tg}(a) = a s/(s + t (1 - s)) below 0

The form with ``s`` in the numerator also holds at ``s = 0``, where ``g`` is the indicator function of ReLU.
"""

import abc
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from solver_plugins.errors import NotProximalError, ShapeError
from solver_plugins.prox.prior import Prior, Step, is_unit, register_prior, step_like

_RANGE = "is a proximal map only for a slope in [0, 1]: outside it decreases, or expands distances"


def _factor(slope: Step, step: Step) -> Step:
    """Returns the slope of the proximal map below 0."""
    return slope / (slope + step * (1 - slope))


class _Leaky(Prior):
    """A prior with the slope ``s`` of its proximal map at the unit step below 0."""

    tags = frozenset({"activation", "paper"})

    @abc.abstractmethod
    def activation(self, a: Tensor) -> Tensor:
        """Returns the proximal map at the unit step, by the same call that the network makes."""

    @abc.abstractmethod
    def slope_for(self, a: Tensor) -> Tensor | float:
        """Returns ``s`` as it broadcasts against an argument."""

    def prox(self, a: Tensor, step: Step = 1.0) -> Tensor:
        """Returns ``argmin_x gam/2 max(-x, 0)^2 + |x - a|^2 / (2 t)``, ``gam = (1 - s)/s``."""
        if is_unit(step):
            return self.activation(a)
        return torch.where(a > 0, a, a * _factor(self.slope_for(a), step_like(step, a)))

    def derivative(self, a: Tensor, step: Step = 1.0) -> Tensor:
        below = torch.ones_like(a) * _factor(self.slope_for(a), step_like(step, a))
        return torch.where(a > 0, torch.ones_like(a), below)

    def g(self, x: Tensor) -> Tensor:
        """Returns ``(1 - s)/(2 s) max(-x, 0)^2``; infinite below 0 for ``s = 0``."""
        slope = torch.ones_like(x) * self.slope_for(x)
        return torch.where(x < 0, (1 - slope) / (2 * slope) * x**2, torch.zeros_like(x))


@register_prior
@final
@dataclass(frozen=True)
class LeakyReluPrior(_Leaky):
    """LeakyReLU: a squared hinge loss on negative values (Prop. 3 with lambda = 0), with a slope in [0, 1] below 0."""

    negative_slope: float = 0.01

    name = "leaky_relu"
    slope_from_value = True

    def __post_init__(self) -> None:
        if not 0 <= self.negative_slope <= 1:
            raise NotProximalError(f"LeakyReLU {_RANGE}; found {self.negative_slope!r}.")

    def activation(self, a: Tensor) -> Tensor:
        return functional.leaky_relu(a, self.negative_slope)

    def slope_for(self, a: Tensor) -> float:
        return self.negative_slope


@register_prior
@final
@dataclass(frozen=True)
class PreluPrior(_Leaky):
    """PReLU: LeakyReLU with the learnable slope of a module, one for all or one per channel (dimension 1).

    Each call reads the slope from the module, so gradients reach it, and copying prior and module together
    (``deepcopy``, ``pickle``) keeps them connected. A slope outside [0, 1] raises NotProximalError: here, or at run
    time if training moves it there. On an accelerator and in a compiled graph, an asynchronous assertion fails instead.
    """

    module: nn.Module

    name = "prelu"
    learnable = True

    def __post_init__(self) -> None:
        self._weight()

    def activation(self, a: Tensor) -> Tensor:
        return functional.prelu(a, self._weight().to(a.dtype))

    def slope_for(self, a: Tensor) -> Tensor:
        """Returns the slopes along the channels, as ``F.prelu`` reads them."""
        weight = self._weight().to(a.dtype)
        if weight.numel() == 1:
            return weight.reshape(())
        if a.ndim < 2 or a.shape[1] != weight.numel():
            raise ShapeError(
                f"PReLU has {weight.numel()} slopes, one per channel (dimension 1); found the input shape "
                f"{tuple(a.shape)}."
            )
        return weight.reshape(-1, *[1] * (a.ndim - 2))

    def _weight(self) -> Tensor:
        weight: Tensor = self.module.weight  # type: ignore[assignment]
        _check_slope(weight.detach())
        return weight


def _check_slope(slope: Tensor) -> None:
    """Raises, or fails later on the device, if a slope lies outside [0, 1]."""
    inside = ((slope >= 0) & (slope <= 1)).all()
    message = f"PReLU {_RANGE}"
    if torch.compiler.is_compiling():
        torch._assert_async(inside, message)
    elif slope.device.type == "meta" or type(slope) not in (Tensor, nn.Parameter):
        return  # There are no values: a dry run, or a tensor subclass whose parts are checked where they are used.
    elif slope.device.type != "cpu":
        torch._assert_async(inside, message)
    elif not inside:
        bad = slope[~((slope >= 0) & (slope <= 1))].flatten()
        raise NotProximalError(
            f"{message}; found {bad[0].item():.6g}{f' and {bad.numel() - 1} more' if bad.numel() > 1 else ''}. "
            "Clamp the weight after each optimizer step, or keep the activation out of the solver."
        )
