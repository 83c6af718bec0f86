"""ELU and CELU: linear above 0, exponential below."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn import functional

from solver_plugins.errors import NotProximalError
from solver_plugins.prox.monotone import NewtonPrior
from solver_plugins.prox.prior import infinite_where, register_prior


@register_prior
@final
@dataclass(frozen=True)
class EluPrior(NewtonPrior):
    """ELU: g(x) = (x + alpha) log(1 + x/alpha) - x - x^2/2 on -alpha <= x < 0, and 0 above; 0 <= alpha <= 1."""

    alpha: float = 1.0

    name = "elu"

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise NotProximalError(
                f"ELU is a proximal map only for alpha in [0, 1] (its slope at 0 is alpha); found {self.alpha!r}."
            )

    def activation(self, a: Tensor) -> Tensor:
        return functional.elu(a, self.alpha)

    def value_and_slope(self, v: Tensor) -> tuple[Tensor, Tensor]:
        below = self.alpha * torch.exp(v.clamp(max=0))
        return functional.elu(v, self.alpha), torch.where(v > 0, torch.ones_like(v), below)

    def g(self, x: Tensor) -> Tensor:
        if self.alpha == 0:
            return infinite_where(x < 0, torch.zeros_like(x))
        inside = x.clamp(min=-self.alpha, max=0)
        below = torch.xlogy(inside + self.alpha, 1 + inside / self.alpha) - inside - inside**2 / 2
        return infinite_where(x < -self.alpha, below)


@register_prior
@final
@dataclass(frozen=True)
class CeluPrior(NewtonPrior):
    """CELU: g(x) = alpha ((x + alpha) log(1 + x/alpha) - x) - x^2/2 on -alpha <= x < 0, and 0 above; alpha > 0.

    Its slope below 0 is ``exp(x/alpha) <= 1``.
    """

    alpha: float = 1.0

    name = "celu"

    def __post_init__(self) -> None:
        if not self.alpha > 0:
            raise NotProximalError(f"CELU is a proximal map only for alpha > 0; found {self.alpha!r}.")

    def activation(self, a: Tensor) -> Tensor:
        return functional.celu(a, self.alpha)

    def value_and_slope(self, v: Tensor) -> tuple[Tensor, Tensor]:
        below = torch.exp(v.clamp(max=0) / self.alpha)
        return functional.celu(v, self.alpha), torch.where(v > 0, torch.ones_like(v), below)

    def g(self, x: Tensor) -> Tensor:
        inside = x.clamp(min=-self.alpha, max=0)
        entropy = torch.xlogy(inside + self.alpha, 1 + inside / self.alpha) - inside
        return infinite_where(x < -self.alpha, self.alpha * entropy - inside**2 / 2)
