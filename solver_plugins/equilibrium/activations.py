"""The activations that an equilibrium may have, and their antiderivatives.

Assumption 1 of the paper with ``L_sigma = 1``: elementwise, monotone, slopes in [0, 1]. These are the proximal maps of
separable convex functions, so the table of :mod:`solver_plugins.prox` decides.
"""

from typing import Any

import torch
from torch import Tensor

from solver_plugins.errors import NotProximalError
from solver_plugins.prox import Prior, prox_for
from solver_plugins.prox.activations import Activation


def allowed_activation(activation: Activation, **parameters: Any) -> Prior:
    """Returns the prior whose proximal map at the unit step is ``activation``, given as for ``prox_for``.

    NotProximalError if it is not elementwise, monotone and 1-Lipschitz (GELU, SiLU, softmax, ...).
    """
    prior = prox_for(activation, **parameters)
    if not prior.separable:
        raise NotProximalError(
            f"Expected an activation that acts on each feature alone, is monotone and has slopes in [0, 1]; found "
            f"{prior.name!r}, which mixes features. Use relu, tanh, softplus or any other of list_priors('activation')."
        )
    return prior


def antiderivative(prior: Prior, v: Tensor) -> Tensor:
    """Returns ``S(v) = int_0^v s(t) dt`` elementwise, ``s = prox_g``.

    By Moreau, ``S(v) = s v - s^2/2 - g(s)`` with ``s = s(v)``, up to a constant that makes ``S(0) = 0``.
    """

    def envelope(v: Tensor) -> Tensor:
        # The derivative by v is s: the expression is maximised over s, so only the explicit v counts (Danskin).
        s = prior.prox(v, 1.0).detach()
        return s * v - s * s / 2 - prior.g(s)

    return envelope(v) - envelope(torch.zeros_like(v))
