"""Softplus, LogSigmoid and the square root of softplus."""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn import functional

from solver_plugins.errors import NotProximalError
from solver_plugins.prox.conjugate import conjugate_penalty
from solver_plugins.prox.monotone import NewtonPrior
from solver_plugins.prox.prior import infinite_where, register_prior

_BERNOULLI = {2: 1 / 6, 4: -1 / 30, 6: 1 / 42, 8: -1 / 30, 10: 5 / 66, 12: -691 / 2730, 14: 7 / 6}


def dilogarithm_exp(y: Tensor) -> Tensor:
    """Returns ``Li2(exp(-y)) = sum_k exp(-k y)/k^2`` for ``y >= 0``; NaN below.

    With ``w = -log(1 - z)``, ``Li2(z) = w - w^2/4 + sum_n B_2n w^(2n+1)/(2n+1)!`` converges like ``(w/2 pi)^(2n)``;
    it is used for ``z <= 1/2``, and the reflection ``Li2(z) = pi^2/6 - log(z) log(1 - z) - Li2(1 - z)`` above.
    """
    near = y < math.log(2)  # z > 1/2; there -log(1 - (1 - z)) = y
    w = torch.where(near, y, -torch.log1p(-torch.exp(-y)))
    series = w - w**2 / 4 + sum(b * w ** (n + 1) / math.factorial(n + 1) for n, b in _BERNOULLI.items())
    return torch.where(near, math.pi**2 / 6 + torch.xlogy(y, -torch.expm1(-y)) - series, series)


# F.softplus jumps down by log(1 + exp(-threshold))/beta where it becomes linear. Above this, float32 cannot resolve it.
_LEAST_THRESHOLD = 15.0
# Above this, float64 cannot resolve it either.
_SMOOTH_THRESHOLD = 40.0


@register_prior
@final
@dataclass(frozen=True)
class SoftplusPrior(NewtonPrior):
    """Softplus: g(x) = Li2(exp(-beta x)) / beta^2 on x >= 0.

    Other steps than 1 use the smooth softplus; torch's own differs from it by ``log(1 + exp(-threshold))/beta`` (2e-9)
    just above ``beta x = threshold``.

    Args:
        beta: Its sharpness, positive.
        threshold: Where torch switches to the linear function, at least 15: a lower one causes a visible jump down.
    """

    beta: float = 1.0
    threshold: float = 20.0

    name = "softplus"
    zero_argument = None

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise NotProximalError(f"Softplus is increasing only for beta > 0; found {self.beta!r}.")
        if not self.threshold >= _LEAST_THRESHOLD:
            drop = math.log1p(math.exp(-self.threshold)) / self.beta
            raise NotProximalError(
                f"Softplus with threshold {self.threshold!r} drops by {drop:.2g} there, so it is not monotone; "
                f"a proximal map needs a threshold of at least {_LEAST_THRESHOLD:g} (torch's default is 20)."
            )

    def activation(self, a: Tensor) -> Tensor:
        return functional.softplus(a, self.beta, self.threshold)

    def value_and_slope(self, v: Tensor) -> tuple[Tensor, Tensor]:
        return functional.softplus(v, self.beta, max(self.threshold, _SMOOTH_THRESHOLD)), torch.sigmoid(self.beta * v)

    def g(self, x: Tensor) -> Tensor:
        return infinite_where(x < 0, dilogarithm_exp(self.beta * x.clamp(min=0)) / self.beta**2)


@register_prior
@final
@dataclass(frozen=True)
class LogSigmoidPrior(NewtonPrior):
    """LogSigmoid: g(x) = Li2(exp(x)) on x <= 0."""

    name = "logsigmoid"
    zero_argument = None

    def activation(self, a: Tensor) -> Tensor:
        return functional.logsigmoid(a)

    def value_and_slope(self, v: Tensor) -> tuple[Tensor, Tensor]:
        return functional.logsigmoid(v), torch.sigmoid(-v)

    def g(self, x: Tensor) -> Tensor:
        return infinite_where(x > 0, dilogarithm_exp((-x).clamp(min=0)))


@register_prior
@final
@dataclass(frozen=True)
class SqrtSoftplusPrior(NewtonPrior):
    """Square root of softplus: increasing, with slopes below 1/3; g by quadrature, on x >= 0."""

    name = "sqrt_softplus"
    zero_argument = None

    def activation(self, a: Tensor) -> Tensor:
        return functional.softplus(a).sqrt()

    def value_and_slope(self, v: Tensor) -> tuple[Tensor, Tensor]:
        # softplus(v) = exp(v) far below, where its square root would underflow and its slope become 0/0.
        far = v < -40
        near = v.clamp(min=-40)
        root = functional.softplus(near, threshold=_SMOOTH_THRESHOLD).sqrt()
        tail = torch.exp(v.clamp(max=0) / 2)
        return torch.where(far, tail, root), torch.where(far, tail / 2, torch.sigmoid(near) / (2 * root))

    def g(self, x: Tensor) -> Tensor:
        return infinite_where(x < 0, conjugate_penalty(lambda v: self.value_and_slope(v)[0], x))
