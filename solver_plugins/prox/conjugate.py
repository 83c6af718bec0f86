"""The penalty ``g`` of an activation ``rho = prox_g`` without a closed form, by quadrature.

With ``R' = rho`` and ``R(0) = 0``, ``g = R* - |.|^2/2`` (Moreau), and the conjugate is attained at ``rho(v) = x``:

    g(x) = x v - R(v) - x^2/2,      rho(v) = x

Use it to report an objective, not in inner loops: it evaluates ``rho`` several hundred times.
"""

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from solver_plugins.prox.prior import in_float64, infinite_where

# Both the search and the quadrature work in s = asinh(v), which resolves v near 0 and reaches |v| = 2.4e8.
_REACH = 20.0
_BISECTIONS = 64
_PANELS, _NODES = 20, 12


def inverse(rho: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Returns ``v`` with ``rho(v) = x`` by bisection, or the end of the searched range if there is none."""
    low, high = torch.full_like(x, -_REACH), torch.full_like(x, _REACH)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        below = rho(torch.sinh(middle)) < x
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return torch.sinh((low + high) / 2)


def conjugate_penalty(rho: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Returns ``g(x)`` elementwise up to a constant, infinite where ``rho`` does not reach ``x``."""
    wide = in_float64(x)
    v = inverse(rho, wide)
    end = torch.asinh(v)
    nodes, weights = (values.to(wide.device) for values in _rule())
    s = end[..., None] * nodes
    integral = (rho(torch.sinh(s)) * torch.cosh(s) * weights).sum(-1) * end
    reach = torch.full_like(wide, _REACH).sinh()
    slack = 1e-12 * (1 + wide.abs())
    outside = (wide > rho(reach) + slack) | (wide < rho(-reach) - slack)
    return infinite_where(outside, wide * v - integral - wide**2 / 2).to(x)


@functools.cache
def _rule() -> tuple[Tensor, Tensor]:
    """Composite Gauss-Legendre nodes and weights on [0, 1]."""
    points, weights = np.polynomial.legendre.leggauss(_NODES)
    nodes = (np.arange(_PANELS)[:, None] + (points + 1) / 2) / _PANELS
    return torch.from_numpy(nodes.ravel()), torch.from_numpy(np.tile(weights / (2 * _PANELS), _PANELS))
