"""Estimates the characteristic matrix of masks that can only be drawn, with error bars."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from solver_plugins.errors import OptionError

_CHUNK = 2**22
"""The number of units that are drawn at once."""


@dataclass(frozen=True)
class Estimate:
    """A Monte Carlo estimate of ``Cbar`` (eq. 16) from ``samples`` masks, in float64.

    ``error`` is its standard error per entry (by the delta method if the mean is estimated, too), ``mean`` the mean of
    the mask, one number per unit, and ``mean_error`` the standard error of that, zero if the mean was given.
    """

    matrix: Tensor
    error: Tensor
    mean: Tensor
    mean_error: Tensor
    samples: int


def estimate(draw: Callable[[int], Tensor], d: int, samples: int, mean: float | Tensor | None) -> Estimate:
    """Estimates ``Cbar`` from masks of ``d`` units, of which ``draw(n)`` returns ``n``, and their mean if known."""
    if samples < 2:
        raise OptionError(f"Expected at least two samples; found {samples}.")
    # With x = z/mu, Cbar = E[x x^T] - 1. Its variance needs the moments E[x_i^2 x_j^2] and E[x_i^2 x_j].
    first, second = torch.zeros(d, dtype=torch.float64), torch.zeros(d, d, dtype=torch.float64)
    mixed, fourth = torch.zeros_like(second), torch.zeros_like(second)
    left = samples
    while left:
        n = min(left, max(1, _CHUNK // d))
        z = draw(n).reshape(n, d).to("cpu", torch.float64)
        first += z.sum(0)
        second += z.mT @ z
        mixed += z.square().mT @ z
        fourth += z.square().mT @ z.square()
        left -= n
    found = first / samples
    mu = found if mean is None else torch.as_tensor(mean, dtype=torch.float64).cpu().expand(d).reshape(d)
    if not bool((mu != 0).all()):
        never = int((mu == 0).nonzero()[0])
        raise OptionError(f"Unit {never} has the mean 0 over {samples} masks and cannot be rescaled; draw more masks.")
    scale = mu[:, None] * mu
    c = second / samples / scale
    if mean is None:
        # The variance of x_i x_j - c (x_i + x_j - 1), because the mean in the denominator is estimated, too.
        power = torch.diagonal(c)
        cross = mixed / samples / (mu.square()[:, None] * mu)
        spread = fourth / samples / scale.square() + c.square() * (power[:, None] + power - 3 + 2 * c)
        spread = spread - 2 * c * (cross + cross.mT - c)
        mean_error = ((torch.diagonal(second) / samples - found.square()).clamp(min=0) / samples).sqrt()
    else:
        spread = fourth / samples / scale.square() - c.square()
        mean_error = torch.zeros_like(mu)
    return Estimate(c - 1, (spread.clamp(min=0) / samples).sqrt(), mu, mean_error, samples)
