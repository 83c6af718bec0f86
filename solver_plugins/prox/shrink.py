"""Softshrink (the l1 norm) and Tanhshrink."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn import functional

from solver_plugins.errors import NotProximalError
from solver_plugins.prox.conjugate import inverse
from solver_plugins.prox.monotone import NewtonPrior
from solver_plugins.prox.prior import Prior, Step, in_float64, is_unit, register_prior, step_like


@register_prior
@final
@dataclass(frozen=True)
class SoftshrinkPrior(Prior):
    """Softshrink: g(x) = lambd |x|, lambd >= 0."""

    lambd: float = 0.5

    name = "softshrink"
    tags = frozenset({"activation"})

    def __post_init__(self) -> None:
        if not self.lambd >= 0:
            raise NotProximalError(f"Softshrink is a proximal map only for lambd >= 0; found {self.lambd!r}.")

    def prox(self, a: Tensor, step: Step = 1.0) -> Tensor:
        """Returns ``argmin_x lambd |x| + |x - a|^2 / (2 t)``: soft thresholding at ``t lambd``."""
        if is_unit(step):
            return functional.softshrink(a, self.lambd)
        threshold = self.lambd * step_like(step, a)
        return a - torch.clamp(a, -threshold, threshold)  # type: ignore[arg-type]

    def derivative(self, a: Tensor, step: Step = 1.0) -> Tensor:
        return (a.abs() > self.lambd * step_like(step, a)).to(a.dtype)

    def g(self, x: Tensor) -> Tensor:
        return self.lambd * x.abs()


@register_prior
@final
@dataclass(frozen=True)
class TanhshrinkPrior(NewtonPrior):
    """Tanhshrink v - tanh(v): g(x) = log(cosh(v)) - tanh(v)^2/2 at v - tanh(v) = x, the conjugate of tanh's g."""

    name = "tanhshrink"

    def activation(self, a: Tensor) -> Tensor:
        return functional.tanhshrink(a)

    def value_and_slope(self, v: Tensor) -> tuple[Tensor, Tensor]:
        value = torch.tanh(v)
        return v - value, value * value

    def g(self, x: Tensor) -> Tensor:
        v = inverse(functional.tanhshrink, in_float64(x)).to(x)
        return torch.logaddexp(v, -v) - torch.log(torch.full_like(v, 2.0)) - torch.tanh(v) ** 2 / 2
