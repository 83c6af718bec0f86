"""Indicator functions of intervals: identity, ReLU, ReLU6, Hardtanh. Their proximal maps do not depend on the step."""

import math
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from torch.nn import functional

from solver_plugins.errors import NotProximalError
from solver_plugins.prox.prior import Prior, Step, infinite_where, register_prior


class _Indicator(Prior):
    """The indicator function of a closed interval."""

    tags = frozenset({"activation", "indicator"})
    scale_free = True
    slope_from_value = True

    def argument(self, a: Tensor, step: Step = 1.0) -> Tensor:
        return a


@register_prior
@final
@dataclass(frozen=True)
class IdentityPrior(_Indicator):
    """g = 0: no activation."""

    name = "identity"

    def prox(self, a: Tensor, step: Step = 1.0) -> Tensor:
        """Returns ``argmin_x |x - a|^2 / (2 t) = a``."""
        return a

    def derivative(self, a: Tensor, step: Step = 1.0) -> Tensor:
        return torch.ones_like(a)

    def vjp(self, a: Tensor, step: Step, grad: Tensor) -> Tensor:
        return grad

    def g(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


@register_prior
@final
@dataclass(frozen=True)
class ReluPrior(_Indicator):
    """ReLU: the indicator function of x >= 0 (Table 1)."""

    name = "relu"
    tags = frozenset({"activation", "indicator", "paper"})

    def prox(self, a: Tensor, step: Step = 1.0) -> Tensor:
        """Returns ``argmin_{x >= 0} |x - a|^2 / (2 t) = max(a, 0)``."""
        return functional.relu(a)

    def prox_(self, a: Tensor, step: Step = 1.0) -> Tensor:
        return a.relu_()

    def derivative(self, a: Tensor, step: Step = 1.0) -> Tensor:
        return (a > 0).to(a.dtype)

    def vjp(self, a: Tensor, step: Step, grad: Tensor) -> Tensor:
        """Returns ``grad`` where ``a > 0``, else 0, in one pass over memory."""
        return torch.ops.aten.threshold_backward(grad, a, 0)

    def vjp_(self, a: Tensor, step: Step, grad: Tensor) -> Tensor:
        return torch.ops.aten.threshold_backward.grad_input(grad, a, 0, grad_input=grad)

    def g(self, x: Tensor) -> Tensor:
        return infinite_where(x < 0, torch.zeros_like(x))


class _Box(_Indicator):
    """The indicator function of min_val <= x <= max_val."""

    min_val: float
    max_val: float

    @property
    def bounded(self) -> bool:
        return math.isfinite(self.min_val) and math.isfinite(self.max_val)

    @property
    def zero_argument(self) -> float | None:
        return 0.0 if self.min_val <= 0 <= self.max_val else None

    def prox(self, a: Tensor, step: Step = 1.0) -> Tensor:
        """Returns ``argmin_{min_val <= x <= max_val} |x - a|^2 / (2 t)``."""
        return functional.hardtanh(a, self.min_val, self.max_val)

    def prox_(self, a: Tensor, step: Step = 1.0) -> Tensor:
        return a.clamp_(self.min_val, self.max_val)

    def derivative(self, a: Tensor, step: Step = 1.0) -> Tensor:
        return ((a > self.min_val) & (a < self.max_val)).to(a.dtype)

    def g(self, x: Tensor) -> Tensor:
        return infinite_where((x < self.min_val) | (x > self.max_val), torch.zeros_like(x))


@register_prior
@final
@dataclass(frozen=True)
class Relu6Prior(_Box):
    """ReLU6: the indicator function of 0 <= x <= 6."""

    name = "relu6"
    min_val: ClassVar[float] = 0.0  # type: ignore[misc]
    max_val: ClassVar[float] = 6.0  # type: ignore[misc]


@register_prior
@final
@dataclass(frozen=True)
class HardtanhPrior(_Box):
    """Hardtanh: the indicator function of min_val <= x <= max_val, either of which may be infinite."""

    min_val: float = -1.0
    max_val: float = 1.0

    name = "hardtanh"

    def __post_init__(self) -> None:
        if not self.min_val < self.max_val:
            raise NotProximalError(f"A box needs min_val < max_val; found {self.min_val!r} and {self.max_val!r}.")
