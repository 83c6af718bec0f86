"""A unit layer with its input put in: a map of the state alone. Pure functions, no ``nn.Module``."""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from solver_plugins.operators import LinearOperator
from solver_plugins.prox import Prior


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
        return self.offset if z is None else self.operator.apply(z) + self.offset

    def value(self, z: Tensor | None) -> Tensor:
        """Returns ``W^T s(W z + c)``."""
        return self.operator.adjoint(self.prior.prox(self.argument(z), 1.0))

    def step(self, z: Tensor | None, alpha: float) -> Tensor:
        """Returns ``alpha W^T s(W z + c) + (1 - alpha) z`` (equation 5)."""
        return _mixed(z, self.value(z), alpha)

    def step_and_slope(self, z: Tensor | None, alpha: float) -> tuple[Tensor, Tensor]:
        """Returns the step and ``D = s'(W z + c)``; the latter is not recorded."""
        argument = self.argument(z)
        with torch.no_grad():
            slope = self.prior.derivative(argument, 1.0)
        return _mixed(z, self.operator.adjoint(self.prior.prox(argument, 1.0)), alpha), slope

    def curvature(self, slope: Tensor, y: Tensor) -> Tensor:
        """Returns ``W^T D W y``, the Hessian of ``psi`` times ``y``."""
        return self.operator.adjoint(slope * self.operator.apply(y))

    def detached(self) -> "Unit":
        """Returns the linear part alone: no graph, and no offset that would be kept alive."""
        operator = dataclasses.replace(self.operator, weight=self.operator.weight.detach())
        return Unit(operator, self.offset.new_empty(0), self.prior)


def _mixed(z: Tensor | None, value: Tensor, alpha: float) -> Tensor:
    if z is None:
        return value if alpha == 1 else alpha * value
    return value if alpha == 1 else torch.lerp(z, value, alpha)
