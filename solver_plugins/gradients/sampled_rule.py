"""What a sampled, unrolled solve is, beside its tensors."""

from dataclasses import dataclass

import torch

from solver_plugins.operators import LinearOperator
from solver_plugins.prox import Prior


@dataclass(frozen=True, eq=False)
class Rule:
    """All of a sampled solve that is no tensor.

    Attributes:
        operator: ``A`` without a diagonal; its weight is a stand-in.
        dtype: The precision of the products.
        columns: Whether the samples are indices of columns, else masks.
        prior: ``g``.
        lam: The strong convexity.
        share: ``q = n1/tau``.
        unit: Whether ``s = 1/L`` (formulation ``normalized``), else it is one.
        steps: ``t_k``, one for each iteration, where they are numbers; else they are a tensor.
        iterations: ``T``.
        low: Whether iterates are computed again in the backward pass instead of being kept.
        stacked: Whether :mod:`solver_plugins.gradients.sampled_stacked` may run it, where values are at hand.
    """

    operator: LinearOperator
    dtype: torch.dtype
    columns: bool
    prior: Prior
    lam: float
    share: float
    unit: bool
    steps: tuple[float, ...]
    iterations: int
    low: bool
    stacked: bool = False
