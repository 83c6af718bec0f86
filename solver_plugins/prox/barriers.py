"""The priors of the paper whose proximal maps *resemble* activations: log barriers and the shifted squared hinge.

Props. 3, 4 and 5 of "Deep Layers as Stochastic Solvers", at any step ``t`` and weight ``gamma``; ``c = t gamma``.
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from solver_plugins.errors import OptionError
from solver_plugins.prox.prior import Prior, Step, infinite_where, register_prior, step_like, widened

_GAP_STEPS = 6


@dataclass(frozen=True)
class _Weighted(Prior):
    """A prior with a positive weight ``gamma``, its first parameter."""

    gamma: float = 1.0

    tags = frozenset({"paper"})

    def __post_init__(self) -> None:
        if not self.gamma > 0:
            raise OptionError(f"{self.name} needs gamma > 0; found {self.gamma!r}.")


@register_prior
@final
@dataclass(frozen=True)
class SquaredHinge(_Weighted):
    """Squared hinge g(x) = gamma/2 max(-x - shift, 0)^2 (Prop. 3): a LeakyReLU of slope 1/(1 + gamma), shifted.

    The paper's ``lambda`` is ``shift``; the kink is at ``-shift``.
    """

    shift: float = 0.0

    name = "squared_hinge"

    @property
    def zero_argument(self) -> float:
        """0, or an argument below the kink if the kink lies above 0."""
        return 0.0 if self.shift >= 0 else self.gamma * self.shift

    def prox(self, a: Tensor, step: Step = 1.0) -> Tensor:
        """Returns ``argmin_x gamma/2 max(-x - shift, 0)^2 + |x - a|^2 / (2 t)`` (Table 1, Prop. 3)."""
        c = self.gamma * step_like(step, a)
        return torch.where(a >= -self.shift, a, (a - c * self.shift) / (1 + c))

    def derivative(self, a: Tensor, step: Step = 1.0) -> Tensor:
        below = torch.ones_like(a) / (1 + self.gamma * step_like(step, a))
        return torch.where(a >= -self.shift, torch.ones_like(a), below)

    def g(self, x: Tensor) -> Tensor:
        return self.gamma / 2 * (-x - self.shift).clamp(min=0) ** 2


@register_prior
@final
@dataclass(frozen=True)
class SoftplusBarrier(_Weighted):
    """Log barrier g(x) = -gamma log(x) (Prop. 4): resembles softplus."""

    name = "softplus_barrier"
    zero_argument = None

    def prox(self, a: Tensor, step: Step = 1.0) -> Tensor:
        """Returns ``argmin_x -gamma log(x) + |x - a|^2 / (2 t) = a/2 + sqrt(a^2/4 + t gamma)`` (eq. 10)."""
        wide = widened(a)
        c = self.gamma * step_like(step, wide)
        # The product of both roots is -c. Below 0, c over the other root gives the positive one without cancellation.
        larger = torch.where(wide < 0, -wide, wide) / 2 + torch.sqrt(wide**2 / 4 + c)
        return torch.where(wide < 0, c / larger, larger).to(a.dtype)

    def derivative(self, a: Tensor, step: Step = 1.0) -> Tensor:
        """Returns ``1/(1 + t g''(x)) = x^2/(x^2 + t gamma)``."""
        wide = widened(a)
        square = self.prox(wide, step) ** 2
        return (square / (square + self.gamma * step_like(step, wide))).to(a.dtype)

    def g(self, x: Tensor) -> Tensor:
        return infinite_where(x <= 0, -self.gamma * torch.log(torch.where(x > 0, x, torch.ones_like(x))))


@register_prior
@final
@dataclass(frozen=True)
class TanhBarrier(_Weighted):
    """Log barrier g(x) = -gamma log(1 - x^2) (Prop. 5): resembles tanh (gamma = 0.1 in Figure 2)."""

    name = "tanh_barrier"
    bounded = True

    def prox(self, a: Tensor, step: Step = 1.0) -> Tensor:
        """Returns ``argmin_x -gamma log(1 - x^2) + |x - a|^2 / (2 t)``.

        It is the root of ``x^3 - a x^2 - (1 + 2c) x + a = 0`` (eq. 12 with the general weight) in [-1, 1]. The closed
        form (eq. 18) cancels in float32 for large ``|a|``; :func:`_barrier_gap` does not.
        """
        wide = widened(a)
        sign, size = _sign_and_size(wide)
        return (sign * (1 - _barrier_gap(size, self.gamma * step_like(step, wide)))).to(a.dtype)

    def derivative(self, a: Tensor, step: Step = 1.0) -> Tensor:
        wide = widened(a)
        return _barrier_derivative(_sign_and_size(wide)[1], self.gamma * step_like(step, wide)).to(a.dtype)

    def g(self, x: Tensor) -> Tensor:
        inside = torch.where(x.abs() < 1, x, torch.zeros_like(x))
        return infinite_where(x.abs() >= 1, -self.gamma * (torch.log1p(-inside) + torch.log1p(inside)))


@register_prior
@final
@dataclass(frozen=True)
class SigmoidBarrier(_Weighted):
    """Log barrier g(x) = -gamma log(x) - gamma log(1 - x) (end of appendix C): resembles a sigmoid centred at 1/2.

    With ``y = 2x - 1`` it is the tanh barrier at ``2a - 1`` with four times the weight.
    """

    name = "sigmoid_barrier"
    bounded = True
    zero_argument = None

    def prox(self, a: Tensor, step: Step = 1.0) -> Tensor:
        """Returns ``argmin_x -gamma log(x) - gamma log(1 - x) + |x - a|^2 / (2 t)``."""
        wide = widened(a)
        sign, size = _sign_and_size(2 * wide - 1)
        gap = _barrier_gap(size, 4 * self.gamma * step_like(step, wide))
        return torch.where(sign > 0, 1 - gap / 2, gap / 2).to(a.dtype)

    def derivative(self, a: Tensor, step: Step = 1.0) -> Tensor:
        wide = widened(a)
        size = _sign_and_size(2 * wide - 1)[1]
        return _barrier_derivative(size, 4 * self.gamma * step_like(step, wide)).to(a.dtype)

    def g(self, x: Tensor) -> Tensor:
        outside = (x <= 0) | (x >= 1)
        inside = torch.where(outside, torch.full_like(x, 0.5), x)
        return infinite_where(outside, -self.gamma * (torch.log(inside) + torch.log1p(-inside)))


def _sign_and_size(a: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sign and size of ``a``; unlike ``abs``, the size has a derivative at 0."""
    sign = torch.where(a < 0, -torch.ones_like(a), torch.ones_like(a))
    return sign, sign * a


def _barrier_gap(size: Tensor, c: Step) -> Tensor:
    """Returns the gap ``w = 1 - x`` of the tanh barrier's prox ``x`` at ``size >= 0``, to full relative accuracy.

    ``w`` is the root in (0, 1] of ``psi(w) = w^2 + (size - 1) w - c + c w/(2 - w)``, which is convex there. Newton from
    above decreases to it, from ``min(w0, 1)`` with ``w0`` the root without the last term. As in
    :mod:`solver_plugins.prox.newton`, two more steps carry the derivatives.
    """
    with torch.no_grad():
        b = (size.detach() - 1) / 2
        weight = c.detach() if isinstance(c, Tensor) else c
        root = torch.sqrt(b**2 + weight)
        start = torch.where(b > 0, weight / (b.clamp(min=0) + root), root - b)
        w = start.clamp(max=1)
        for _ in range(_GAP_STEPS):
            w = _gap_step(w, size.detach(), weight)
    return _gap_step(_gap_step(w, size, c), size, c)


def _gap_step(w: Tensor, size: Tensor, c: Step) -> Tensor:
    value = w * (w + (size - 1)) - c * (2 - 2 * w) / (2 - w)
    return w - value / (2 * w + (size - 1) + 2 * c / (2 - w) ** 2)


def _barrier_derivative(size: Tensor, c: Step) -> Tensor:
    """Returns ``1/(1 + t g'') = w^2 / (w^2 + c (1 + w^2/(2 - w)^2))`` at the gap ``w``."""
    w = _barrier_gap(size, c)
    return w**2 / (w**2 + c * (1 + w**2 / (2 - w) ** 2))
