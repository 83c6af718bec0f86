"""Bounded S-shaped activations, exactly: tanh, sigmoid, atan, softsign, hardsigmoid."""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn import functional

from solver_plugins.prox.monotone import NewtonPrior
from solver_plugins.prox.prior import Prior, Step, infinite_where, is_unit, register_prior, step_like


@register_prior
@final
@dataclass(frozen=True)
class TanhPrior(NewtonPrior):
    """Tanh: g(x) = x atanh(x) + log(1 - x^2)/2 - x^2/2 on [-1, 1]."""

    name = "tanh"
    bounded = True

    def activation(self, a: Tensor) -> Tensor:
        return torch.tanh(a)

    def value_and_slope(self, v: Tensor) -> tuple[Tensor, Tensor]:
        value = torch.tanh(v)
        return value, (1 - value) * (1 + value)

    def g(self, x: Tensor) -> Tensor:
        # Written as a binary entropy, which has the limit log(2) - 1/2 at both ends.
        inside = x.clamp(-1, 1)
        entropy = torch.special.xlog1py(1 + inside, inside) + torch.special.xlog1py(1 - inside, -inside)
        return infinite_where(x.abs() > 1, entropy / 2 - inside**2 / 2)


@register_prior
@final
@dataclass(frozen=True)
class SigmoidPrior(NewtonPrior):
    """Sigmoid: g(x) = x log(x) + (1 - x) log(1 - x) - x^2/2 on [0, 1]."""

    name = "sigmoid"
    bounded = True
    zero_argument = None

    def activation(self, a: Tensor) -> Tensor:
        return torch.sigmoid(a)

    def value_and_slope(self, v: Tensor) -> tuple[Tensor, Tensor]:
        value = torch.sigmoid(v)
        return value, value * (1 - value)

    def g(self, x: Tensor) -> Tensor:
        inside = x.clamp(0, 1)
        entropy = torch.xlogy(inside, inside) + torch.special.xlog1py(1 - inside, -inside)
        return infinite_where((x < 0) | (x > 1), entropy - inside**2 / 2)


@register_prior
@final
@dataclass(frozen=True)
class AtanPrior(NewtonPrior):
    """Arcus tangent: g(x) = -log(cos(x)) - x^2/2 on |x| < pi/2."""

    name = "atan"
    bounded = True

    def activation(self, a: Tensor) -> Tensor:
        return torch.atan(a)

    def value_and_slope(self, v: Tensor) -> tuple[Tensor, Tensor]:
        return torch.atan(v), 1 / (1 + v * v)

    def g(self, x: Tensor) -> Tensor:
        outside = x.abs() >= math.pi / 2
        inside = torch.where(outside, torch.zeros_like(x), x)
        return infinite_where(outside, -torch.log(torch.cos(inside)) - inside**2 / 2)


@register_prior
@final
@dataclass(frozen=True)
class SoftsignPrior(NewtonPrior):
    """Softsign: g(x) = -|x| - log(1 - |x|) - x^2/2 on |x| < 1."""

    name = "softsign"
    bounded = True

    def activation(self, a: Tensor) -> Tensor:
        return functional.softsign(a)

    def value_and_slope(self, v: Tensor) -> tuple[Tensor, Tensor]:
        return functional.softsign(v), (1 + v.abs()) ** -2

    def g(self, x: Tensor) -> Tensor:
        size = x.abs()
        inside = torch.where(size < 1, size, torch.zeros_like(x))
        return infinite_where(size >= 1, -inside - torch.log1p(-inside) - inside**2 / 2)

    def _root(self, a: Tensor, step: Step) -> Tensor:
        """Needs no iteration: ``t v + (1 - t) rho(v) = a`` is ``t v^2 + (1 - a) v - a = 0`` for ``a >= 0``."""
        step = step_like(step, a)
        # Not abs(), whose derivative at 0 is 0; that of the root is not.
        size = torch.where(a < 0, -a, a)
        root = torch.sqrt((1 - size) ** 2 + 4 * step * size)
        # Each form is used where it adds two numbers of the same sign.
        small = 2 * size / ((1 - size).clamp(min=0) + root)
        large = ((size - 1).clamp(min=0) + root) / (2 * step)
        v = torch.where(size < 1, small, large)
        return torch.where(a < 0, -v, v)


@register_prior
@final
@dataclass(frozen=True)
class HardsigmoidPrior(Prior):
    """Hardsigmoid: g(x) = 5 x^2/2 - 3 x on [0, 1]."""

    name = "hardsigmoid"
    tags = frozenset({"activation"})
    bounded = True
    zero_argument = -3.0

    def prox(self, a: Tensor, step: Step = 1.0) -> Tensor:
        """Returns ``argmin_{0 <= x <= 1} 5 x^2/2 - 3 x + |x - a|^2 / (2 t)``, the clipped ``(a + 3 t)/(1 + 5 t)``."""
        if is_unit(step):
            return functional.hardsigmoid(a)
        return self._line(a, step).clamp(0, 1)

    def derivative(self, a: Tensor, step: Step = 1.0) -> Tensor:
        x = self._line(a, step)
        inside = torch.ones_like(a) / (1 + 5 * step_like(step, a))
        return torch.where((x > 0) & (x < 1), inside, torch.zeros_like(a))

    def g(self, x: Tensor) -> Tensor:
        return infinite_where((x < 0) | (x > 1), 2.5 * x**2 - 3 * x)

    def _line(self, a: Tensor, step: Step) -> Tensor:
        step = step_like(step, a)
        return (a + 3 * step) / (1 + 5 * step)
