"""A whole solve as the kernel is given it: its tensors, and the rest."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from solver_plugins.operators import LinearMap, LinearOperator
from solver_plugins.prox import Prior
from solver_plugins.solve.layout import Layout
from solver_plugins.solve.recursion import Recursion, Samples


@dataclass(frozen=True, eq=False)
class Rule:
    """All of a solve that is not a tensor.

    Attributes:
        operator: ``A`` without a diagonal; its weight is a stand-in for that of :class:`Given`.
        dtype: The precision of the products; iterates have at least float32.
        path: "two_step", "gram", "masked" or "columns".
        recursion: The iterations.
        iterations: ``T``.
        prior: ``g``.
        lam: The strong convexity.
        unit: Whether ``s = 1/L`` and ``t = 1`` (formulation ``normalized``), else ``s = 1`` and ``t = 1/L``.
        layout: How the output's dimensions are merged.
        samples: What was drawn, but for its tensors.
        low: Whether iterates are computed again in the backward pass instead of being kept.
        images: Of how many iterations, the first ones, ``z_k`` is kept.
        regrouped: Whether a two-step path sums ``G_k d_k^T`` where no ``z_k`` was kept, instead of computing it again.
        stacked: Whether all iterations may be kept in one buffer, where values are at hand.
    """

    operator: LinearOperator
    dtype: torch.dtype
    path: str
    recursion: Recursion
    iterations: int
    prior: Prior
    lam: float
    unit: bool
    layout: Layout
    samples: Samples = field(default_factory=Samples)
    low: bool = False
    images: int = 0
    regrouped: bool = False
    stacked: bool = False

    @property
    def draws_gradients(self) -> bool:
        """Whether the samples are those of whole gradients, with the input in them."""
        return self.path in ("masked", "columns") and self.recursion.reference is None

    @property
    def is_flat(self) -> bool:
        """Whether products are those of rows with a matrix."""
        return isinstance(self.operator, LinearMap)

    def sample(self, k: int) -> int | None:
        """Returns the place of iteration ``k`` among the samples of the inputs; None for a full gradient."""
        if self.path not in ("masked", "columns"):
            return None
        inner = self.recursion.reference
        if inner is None:
            return k
        return None if k % inner == 0 else k - 1 - k // inner


class Given(NamedTuple):
    """A whole solve, in the order in which autograd is given it.

    Attributes:
        c: ``v_1``, where that is the layer's output; None where gradients are sampled.
        u: The input, where gradients are sampled.
        weight: ``A``.
        bias: ``b`` where gradients are sampled.
        smoothness: ``L``.
        gram: ``A A^T``, a constant, where it is known already.
        inputs: See :class:`~solver_plugins.solve.recursion.Samples`, as for the next two.
        outputs: Masks of the outputs.
        picks: Shares of the iterates in reference points.
        rule: All that is not a tensor.
    """

    c: Tensor | None
    u: Tensor | None
    weight: Tensor
    bias: Tensor | None
    smoothness: Tensor
    gram: Tensor | None
    inputs: Tensor | None
    outputs: Tensor | None
    picks: Tensor | None
    rule: Rule

    def flattened(self) -> "Given":
        """Returns the solve with its dimensions merged, as its layout says."""
        rule, layout = self.rule, self.rule.layout
        u, bias, inputs, outputs, picks = self.u, self.bias, self.inputs, self.outputs, self.picks
        if outputs is not None and layout.kind != "space":
            outputs = torch.stack([layout.flat(one.expand(layout.shape)) for one in outputs])
        if rule.is_flat:
            u = None if u is None else u.reshape(-1, u.shape[-1])
            if bias is not None and bias.dim() > 1:
                bias = layout.flat(bias.expand(layout.shape))
            if inputs is not None and rule.path == "masked" and inputs.dim() > 2:
                inputs = inputs.reshape(len(inputs), -1, inputs.shape[-1])
            picks = None if picks is None else picks.reshape(*picks.shape[:2], -1, 1)
        c = None if self.c is None else layout.flat(self.c)
        return self._replace(c=c, u=u, bias=bias, inputs=inputs, outputs=outputs, picks=picks)
