"""A unit layer for a fixed input, as a map of the state alone; no ``nn.Module``."""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from solver_plugins.operators import LinearOperator
from solver_plugins.prox import Prior


@dataclass(frozen=True, eq=False)
class Slope:
    """The diagonal ``D = s'(v)`` at a point.

    Attributes:
        value: ``s(v)``.
        derivative: ``D``; None if the prior knows it from the value.
    """

    value: Tensor
    derivative: Tensor | None


@dataclass(frozen=True, eq=False)
class Unit:
    """``z -> W^T s(W z + c)``, the gradient of the convex ``psi(z) = 1^T S(W z + c)`` (Theorem 1).

    Attributes:
        operator: ``W``.
        offset: ``c = U x + b``.
        prior: The prior whose proximal map is the activation ``s``.
    """

    operator: LinearOperator
    offset: Tensor
    prior: Prior

    def argument(self, z: Tensor | None) -> Tensor:
        """Returns ``W z + c``; None is zero."""
        return self.offset if z is None else _added(self.operator.apply(z), self.offset)

    def value(self, z: Tensor | None) -> Tensor:
        """Returns ``W^T s(W z + c)``."""
        return self.operator.adjoint(self.prior.prox(self.argument(z), 1.0))

    def step(self, z: Tensor | None, alpha: float) -> Tensor:
        """Returns ``alpha W^T s(W z + c) + (1 - alpha) z`` (equation 5)."""
        return mixed(z, self.value(z), alpha)

    def step_with_slope(self, z: Tensor | None, alpha: float) -> "tuple[Tensor, Slope]":
        """Returns the step and ``D = s'(W z + c)``, which has no gradient."""
        argument = self.argument(z)
        value = self.prior.prox(argument, 1.0)
        with torch.no_grad():
            # ReLU, for example, multiplies by its slope in one pass over memory, given the value that is kept anyway.
            known = self.prior.slope_from_value and type(self.prior).vjp is not Prior.vjp
            slope = Slope(value.detach(), None if known else self.prior.derivative(argument, 1.0))
        return mixed(z, self.operator.adjoint(value), alpha), slope

    def scaled(self, slope: "Slope", v: Tensor) -> Tensor:
        """Returns ``D v``."""
        return self.prior.vjp(slope.value, 1.0, v) if slope.derivative is None else slope.derivative * v

    def curvature(self, slope: "Slope", y: Tensor) -> Tensor:
        """Returns ``W^T D W y``, the Hessian of ``psi`` times ``y``."""
        return self.operator.adjoint(self.scaled(slope, self.operator.apply(y)))

    def channels_last(self) -> "Unit":
        """Returns the same unit of feature maps without gradients, in the memory format channels_last."""
        weight, offset = (
            tensor.detach().contiguous(memory_format=torch.channels_last)
            for tensor in (self.operator.weight, self.offset)
        )
        return Unit(dataclasses.replace(self.operator, weight=weight), offset, self.prior)

    def detached(self) -> "Unit":
        """Returns the linear part alone: no graph, and no offset that would be kept alive."""
        operator = dataclasses.replace(self.operator, weight=self.operator.weight.detach())
        return Unit(operator, self.offset.new_empty(0), self.prior)


def mixed(z: Tensor | None, value: Tensor, alpha: float) -> Tensor:
    """Returns ``alpha value + (1 - alpha) z``; None is zero. Without gradients it overwrites ``value``."""
    if alpha == 1:
        return value
    if z is None:
        return alpha * value
    return torch.lerp(z, value, alpha) if torch.is_grad_enabled() else value.lerp_(z, 1 - alpha)


def _added(product: Tensor, offset: Tensor) -> Tensor:
    """Returns the sum; without gradients it overwrites the product, because new memory costs more than the sum."""
    if torch.is_grad_enabled() or product.dtype != offset.dtype or product.shape != offset.shape:
        return product + offset
    return product.add_(offset)
