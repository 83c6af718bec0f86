"""Softmax: the only activation here whose coordinates are coupled."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from solver_plugins.errors import OptionError
from solver_plugins.prox.prior import Prior, Step, infinite_where, is_unit, register_prior


@register_prior
@final
@dataclass(frozen=True)
class SoftmaxPrior(Prior):
    """Softmax: g(x) = sum_i x_i log(x_i) - |x|^2/2 on the probability simplex, at the unit step only."""

    dim: int = -1

    name = "softmax"
    tags = frozenset({"activation"})
    separable = False
    unit_step_only = True
    bounded = True
    zero_argument = None

    def prox(self, a: Tensor, step: Step = 1.0) -> Tensor:
        """Returns ``argmin_x sum_i x_i log(x_i) - |x|^2/2 + |x - a|^2/2`` over the simplex."""
        self._check(step)
        return torch.softmax(a, self.dim)

    def derivative(self, a: Tensor, step: Step = 1.0) -> Tensor:
        """Raises: the Jacobian ``diag(p) - p p^T`` is not diagonal."""
        raise OptionError("Softmax is not separable, so it has a Jacobian matrix and no derivative; use vjp.")

    def vjp(self, a: Tensor, step: Step, grad: Tensor) -> Tensor:
        """Returns ``(diag(p) - p p^T) grad`` with ``p = softmax(a)``."""
        p = self.prox(a, step)
        return p * (grad - (p * grad).sum(self.dim, keepdim=True))

    def argument(self, a: Tensor, step: Step = 1.0) -> Tensor:
        self._check(step)
        return a

    def g(self, x: Tensor) -> Tensor:
        excess = (x.sum(self.dim, keepdim=True) - 1).abs()
        outside = (x < 0) | (excess > torch.finfo(x.dtype).eps ** 0.5)
        return infinite_where(outside, torch.xlogy(x, x.clamp(min=0)) - x**2 / 2)

    def _check(self, step: Step) -> None:
        if not is_unit(step):
            raise OptionError(
                f"The proximal map of softmax's prior is known for step 1 only; found {step!r}. "
                "Use the normalized formulation, whose step is the number 1."
            )
