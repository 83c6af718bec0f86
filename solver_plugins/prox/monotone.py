"""Priors of monotone, 1-Lipschitz activations: their common Newton form, and a prior for a user's own function."""

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from solver_plugins.errors import NotProximalError
from solver_plugins.prox.conjugate import conjugate_penalty
from solver_plugins.prox.newton import STEPS, solve
from solver_plugins.prox.prior import Prior, Step, is_unit, register_prior, step_like, widened

Elementwise = Callable[[Tensor], Tensor]


class NewtonPrior(Prior):
    """A prior given by its activation ``rho``: ``prox_{t g}(a) = rho(v)`` with ``t v + (1 - t) rho(v) = a``."""

    tags = frozenset({"activation"})

    @property
    def newton_steps(self) -> int:
        return STEPS

    @abc.abstractmethod
    def activation(self, a: Tensor) -> Tensor:
        """Returns ``rho(a) = prox_g(a)``, by the same call that the network makes."""

    @abc.abstractmethod
    def value_and_slope(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns ``rho(v)`` and ``rho'(v)``, finite and differentiable at any finite ``v``."""

    def prox(self, a: Tensor, step: Step = 1.0) -> Tensor:
        """Returns ``argmin_x g(x) + |x - a|^2 / (2 t)``: the activation itself at the unit step, else by Newton."""
        if is_unit(step):
            return self.activation(a)
        wide = widened(a)
        return self.value_and_slope(self._root(wide, step))[0].to(a.dtype)

    def derivative(self, a: Tensor, step: Step = 1.0) -> Tensor:
        """Returns ``rho'(v) / (t + (1 - t) rho'(v))``."""
        wide = widened(a)
        if is_unit(step):
            return self.value_and_slope(wide)[1].to(a.dtype)
        slope = self.value_and_slope(self._root(wide, step))[1]
        step = step_like(step, wide)
        return (slope / (step + (1 - step) * slope)).to(a.dtype)

    def argument(self, a: Tensor, step: Step = 1.0) -> Tensor:
        return a if is_unit(step) else self._root(widened(a), step).to(a.dtype)

    def _root(self, a: Tensor, step: Step) -> Tensor:
        return solve(self.value_and_slope, a, step_like(step, a), self.newton_steps)


@register_prior
@final
@dataclass(frozen=True)
class Monotone(NewtonPrior):
    """Any elementwise function that the user declares to be monotone with slopes in [0, 1].

    The declaration is trusted; :func:`check_monotone` tests it on a grid.

    Args:
        function: The activation ``rho``, elementwise and not in place. It must be importable to be pickled.
        slope: ``rho'``, by default found by autograd. Give it if autograd's is not finite (0/0 in a branch not taken).
        penalty: The terms of ``g``, by default found by quadrature, up to a constant.
        bounded: Whether ``rho`` has a bounded range.
        zero_argument: A number ``v`` with ``rho(v) = 0``, if there is one.
        newton_steps: How many Newton steps: more than for built-in activations, because Newton can jump between several
            steep parts of a function.
    """

    function: Elementwise
    slope: Elementwise | None = None
    penalty: Elementwise | None = None
    bounded: bool = False
    zero_argument: float | None = None
    newton_steps: int = 16

    name = "monotone"
    opaque = True

    def activation(self, a: Tensor) -> Tensor:
        return self.function(a)

    def value_and_slope(self, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.slope is not None:
            return self.function(v), self.slope(v)
        value, pull = torch.func.vjp(self.function, v)  # type: ignore[misc]  # three results with has_aux only
        return value, pull(torch.ones_like(value))[0]

    def g(self, x: Tensor) -> Tensor:
        return conjugate_penalty(self.function, x) if self.penalty is None else self.penalty(x)


def check_monotone(function: Elementwise, lower: float = -30.0, upper: float = 30.0, points: int = 20001) -> None:
    """Tests on a grid that an elementwise function is increasing and 1-Lipschitz: the prox of some ``g`` (Moreau).

    NotProximalError says where it decreases, or rises by more than the distance.
    """
    v = torch.linspace(lower, upper, points, dtype=torch.float64)
    with torch.no_grad():
        rates = torch.diff(function(v)) / torch.diff(v)
    for bad, what in ((rates.isnan(), "is NaN"), (rates < -1e-9, "decreases"), (rates > 1 + 1e-9, "is steeper than 1")):
        if bad.any():
            raise NotProximalError(f"Not a proximal map: the function {what} near {v[bad.int().argmax()].item():.4g}.")
