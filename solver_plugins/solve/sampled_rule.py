"""What a sampled, unrolled solve is: its tensors, and the rest."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

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
        stacked: Whether :mod:`solver_plugins.solve.sampled_stacked` may run it, where values are at hand.
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


class Given(NamedTuple):
    """A whole sampled solve, in the order in which autograd is given it.

    Attributes:
        u: The input.
        weight: ``A``.
        bias: ``b``, for all rows or for each.
        samples: The masks, or the indices of columns, one per iteration.
        smoothness: ``L``.
        steps: ``t_k`` where they are no numbers.
        rule: All that is no tensor.
    """

    u: Tensor
    weight: Tensor
    bias: Tensor | None
    samples: Tensor
    smoothness: Tensor
    steps: Tensor | None
    rule: Rule
