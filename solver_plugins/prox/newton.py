"""The proximal map of any monotone, 1-Lipschitz activation at any step, by one scalar Newton iteration.

Let ``rho = prox_g``. Then ``x = prox_{t g}(a)`` means ``(a - x)/t in dg(x)``, that is ``x = rho(v)`` with
``v = x + (a - x)/t``, or

    F(v) = t (v - rho(v)) + rho(v) - a = 0,      F'(v) = t + (1 - t) rho'(v)  in  [min(t, 1), max(t, 1)]

``F`` increases, so the root is unique and lies between ``a`` and ``a - F(a)/min(t, 1)``.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from solver_plugins.prox.prior import Step

ValueAndSlope = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Maps ``v`` to ``(rho(v), rho'(v))``."""

STEPS = 10
"""Enough for the smooth activations of torch at steps from 1e-4 to 1e3, in float64."""


def solve(value_and_slope: ValueAndSlope, a: Tensor, step: Step, steps: int = STEPS) -> Tensor:
    """Returns the root ``v`` of ``F``, differentiable in ``a``, in the step and in the parameters of ``rho``.

    The root is found outside autograd. Two plain Newton steps from there do not change its value, but give it its
    derivatives: the first step those of order one, the second those of order two and three. The number of steps is
    fixed because a stopping rule would read values and break a graph.
    """
    with torch.no_grad():
        v = _bracketed(value_and_slope, a.detach(), step.detach() if isinstance(step, Tensor) else step, steps)
    for _ in range(2):
        residual, slope = _residual(value_and_slope, v, a, step)
        v = v - residual / slope
    return v


def _bracketed(value_and_slope: ValueAndSlope, a: Tensor, step: Step, steps: int) -> Tensor:
    """Newton from ``a`` or 0, with bisection where it would leave the bracket or oscillate (S-shaped ``rho``)."""
    least = step.clamp(max=1.0) if isinstance(step, Tensor) else min(step, 1.0)
    zero = torch.zeros_like(a)
    residual, slope = _residual(value_and_slope, a, a, step)
    residual_0, slope_0 = _residual(value_and_slope, zero, a, step)
    # Both points bound the root. Intersecting the bounds matters for a large step, where F is only steep near 0.
    end, end_0 = a - residual / least, -residual_0 / least
    low = torch.maximum(torch.minimum(a, end), torch.minimum(zero, end_0))
    high = torch.minimum(torch.maximum(a, end), torch.maximum(zero, end_0))
    nearer = residual_0.abs() < residual.abs()
    v = torch.where(nearer, zero, a)
    residual, slope = torch.where(nearer, residual_0, residual), torch.where(nearer, slope_0, slope)
    flipped = torch.zeros_like(a, dtype=torch.bool)
    for _ in range(steps):
        newton = v - residual / slope
        # A step that stays on one side of the root may have any length; one that crosses it must beat bisection.
        wild = (newton < low) | (newton > high) | (flipped & ((newton - v).abs() > (high - low) / 2))
        v = torch.where(wild, low + (high - low) / 2, newton)
        before = residual
        residual, slope = _residual(value_and_slope, v, a, step)
        low, high = torch.where(residual < 0, v, low), torch.where(residual > 0, v, high)
        flipped = (before > 0) != (residual > 0)
    return v


def _residual(value_and_slope: ValueAndSlope, v: Tensor, a: Tensor, step: Step) -> tuple[Tensor, Tensor]:
    """Returns ``F(v)`` and ``F'(v)``."""
    value, slope = value_and_slope(v)
    # Written with v - rho(v), not as t v + (1 - t) rho(v): exact at t = 1, and no cancellation where rho(v) = v.
    return step * (v - value) + (value - a), step + (1 - step) * slope
