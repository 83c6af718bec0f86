"""LeakyReLU and PReLU: the squared hinge loss without shift (Prop. 3), written by its slope.

    g(x) = (gam/2) max(-x, 0)^2,  gam = (1 - s)/s        prox_{tg}(a) = a s/(s + t (1 - s)) below 0

The form with ``s`` in the numerator also holds at ``s = 0``, where ``g`` is the indicator function of ReLU.
"""

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


def _hinge(x: Tensor, slope: Tensor) -> Tensor:
    """Returns ``(1 - s)/(2 s) max(-x, 0)^2``; infinite below 0 for ``s = 0``."""
    return torch.where(x < 0, (1 - slope) / (2 * slope) * x**2, torch.zeros_like(x))


@register_prior
@final
@dataclass(frozen=True)
class LeakyReluPrior(Prior):
    """LeakyReLU: a squared hinge loss on negative values (Prop. 3 with lambda = 0).

    Args:
        negative_slope: The slope below 0, in [0, 1].
    """

    negative_slope: float = 0.01

    name = "leaky_relu"
    tags = frozenset({"activation", "paper"})
    slope_from_value = True

    def __post_init__(self) -> None:
        if not 0 <= self.negative_slope <= 1:
            raise NotProximalError(f"LeakyReLU {_RANGE}; found {self.negative_slope!r}.")

    def prox(self, a: Tensor, step: Step = 1.0) -> Tensor:
        """Returns ``argmin_x gam/2 max(-x, 0)^2 + |x - a|^2 / (2 t)``, ``gam = (1 - s)/s``."""
        if is_unit(step):
            return functional.leaky_relu(a, self.negative_slope)
        return torch.where(a > 0, a, a * _factor(self.negative_slope, step_like(step, a)))

    def derivative(self, a: Tensor, step: Step = 1.0) -> Tensor:
        below = torch.ones_like(a) * _factor(self.negative_slope, step_like(step, a))
        return torch.where(a > 0, torch.ones_like(a), below)

    def g(self, x: Tensor) -> Tensor:
        return _hinge(x, torch.full_like(x, self.negative_slope))


@register_prior
@final
@dataclass(frozen=True)
class PreluPrior(Prior):
    """PReLU: LeakyReLU with the learnable slope of a module, one for all or one per channel (dimension 1).

    Each call reads the slope from the module, so gradients reach it, and copying prior and module together
    (``deepcopy``, ``pickle``) keeps them connected. A slope outside [0, 1] raises: here, or at run time if training
    moves it there.

    Args:
        module: The ``nn.PReLU`` whose ``weight`` is the slope.
    """

    module: nn.Module

    name = "prelu"
    tags = frozenset({"activation", "paper"})
    learnable = True

    def __post_init__(self) -> None:
        self._weight()

    def prox(self, a: Tensor, step: Step = 1.0) -> Tensor:
        """Returns ``argmin_x gam/2 max(-x, 0)^2 + |x - a|^2 / (2 t)``, ``gam = (1 - s)/s`` per channel.

        Raises:
            NotProximalError: If a slope lies outside [0, 1]. On an accelerator and in a compiled graph, an asynchronous
                assertion fails instead.
        """
        weight = self._weight()
        if is_unit(step):
            return functional.prelu(a, weight.to(a.dtype))
        return torch.where(a > 0, a, a * _factor(_as_channels(weight, a), step_like(step, a)))

    def derivative(self, a: Tensor, step: Step = 1.0) -> Tensor:
        below = _factor(_as_channels(self._weight(), a), step_like(step, a))
        return torch.where(a > 0, torch.ones_like(a), below)

    def g(self, x: Tensor) -> Tensor:
        return _hinge(x, _as_channels(self._weight(), x).expand_as(x))

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


def _as_channels(weight: Tensor, a: Tensor) -> Tensor:
    """Returns the slopes in the dtype of ``a``, shaped to broadcast along the channels as ``F.prelu`` does."""
    weight = weight.to(a.dtype)
    if weight.numel() == 1:
        return weight.reshape(())
    if a.ndim < 2 or a.shape[1] != weight.numel():
        raise ShapeError(
            f"PReLU has {weight.numel()} slopes, one per channel (dimension 1); found the input shape {tuple(a.shape)}."
        )
    return weight.reshape(-1, *[1] * (a.ndim - 2))
