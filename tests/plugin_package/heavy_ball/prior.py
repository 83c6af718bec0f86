"""A ReLU that sets small numbers to zero, and the prior that it is the proximal map of."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from solver_plugins import declare_activation
from solver_plugins.errors import NotProximalError
from solver_plugins.prox import Prior, Step


class SparseReLU(nn.Module):
    """max(a - threshold, 0): an activation that solver_plugins does not know by itself."""

    def __init__(self, threshold: float = 0.1):
        super().__init__()
        self.threshold = threshold

    def forward(self, a: Tensor) -> Tensor:
        return torch.relu(a - self.threshold)


@dataclass(frozen=True)
class SparseReluPrior(Prior):
    """Sparse ReLU: g(x) = threshold x for x >= 0, and infinite below.

    Args:
        threshold: The price of one unit, not negative.
    """

    threshold: float = 0.1

    name = "sparse_relu"
    tags = frozenset({"activation", "third_party"})

    def __post_init__(self) -> None:
        if not self.threshold >= 0:
            raise NotProximalError(f"Expected a threshold >= 0; found {self.threshold!r}.")

    def prox(self, a: Tensor, step: Step = 1.0) -> Tensor:
        """Returns ``argmin_{x >= 0} threshold x + (x - a)^2 / (2 t)``: a shifted ReLU."""
        return torch.relu(a - step * self.threshold)

    def derivative(self, a: Tensor, step: Step = 1.0) -> Tensor:
        return (a > step * self.threshold).to(a.dtype)

    def g(self, x: Tensor) -> Tensor:
        return torch.where(x < 0, torch.inf, self.threshold * x)


declare_activation(SparseReLU, lambda module: SparseReluPrior(module.threshold))
