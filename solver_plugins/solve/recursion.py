"""What a solver declares about its iterations, and a whole solve as the kernel is given it.

    x_k = prox(v_k),    y_k = x_k + b_k (x_k - x_{k-1}),    v_{k+1} = M_k y_k + m (x_k - x_{k-1}) + f_k c,    v_1 = c
    M_k = (1 - t_k s lam) I - t_k s A D_k A^T,     t_k = f_k t

A solver whose iterations are of this form says which ``f_k``, ``b_k``, ``m`` and ``D_k`` it uses. With a reference
point ``r`` (variance reduction) an iteration multiplies ``y_k - r`` instead and adds to the step from ``r``. With a
sample of the outputs (coordinate descent) the other outputs keep their last ``x``.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from solver_plugins.prox import Prior, Step
from solver_plugins.solve.steps import Factor


class Momentum(Protocol):
    """How far an iteration extrapolates, ``b_k``: a constant for the backward pass."""

    def weight(
        self, x: Tensor, before: Tensor | None, ahead: Tensor | None, memory: Any, inner: Callable[..., Tensor]
    ) -> tuple[Step | None, Any]:
        """Returns ``b_k`` (None for zero) and what the next call is to remember.

        Args:
            x: ``x_k``.
            before: ``x_{k-1}``; None is zero.
            ahead: ``y_{k-1}``; None is zero.
            memory: What the call before returned; None in the first one.
            inner: The inner product of each problem, with its dimensions kept.
        """

    def numbers(self, iterations: int) -> tuple[float, ...] | None:
        """Returns ``b_k`` of every iteration but the first; None where they depend on the iterates."""


@dataclass(frozen=True)
class Recursion:
    """The iterations of a solver, beside its tensors.

    Attributes:
        factor: ``f_k`` as a function of ``k`` and of the constant that sets the step; None is one.
        momentum: Chooses ``b_k``; None is zero.
        inertia: ``m``.
        reference: After how many iterations the reference point of a sampled solve moves; None for no such point.
    """

    factor: Factor = None
    momentum: Momentum | None = None
    inertia: float = 0.0
    reference: int | None = None

    def momenta(self, iterations: int) -> tuple[float, ...] | None:
        """Returns ``b_k`` of every iteration but the first where these are numbers: full gradients are affine then."""
        return (0.0,) * (iterations - 1) if self.momentum is None else self.momentum.numbers(iterations)

    def is_constant(self, iterations: int) -> bool:
        """Whether every iteration is the same map of the one before."""
        return self.factor is None and not self.inertia and not any(self.momenta(iterations) or (1.0,))

    def full(self) -> "Recursion":
        """Returns the same with full gradients, which need no reference point."""
        return self if self.reference is None else replace(self, reference=None)


class Samples(NamedTuple):
    """What a solver has drawn for a solve.

    Attributes:
        inputs: The diagonals of ``D_k`` over ``share``, one for each sampled iteration, broadcastable to the input: a
            mask, or weights; or the indices of columns.
        share: The factor on all of them.
        outputs: Masks of the outputs, one for each iteration.
        picks: The shares of a loop's iterates in the next reference point, one row for each loop after the first;
            None takes the last iterate.
        chooser: Draws weights from the residual ``s A^T x - u``, where they depend on it; then ``inputs`` is None.
    """

    inputs: Tensor | None = None
    share: float = 1.0
    outputs: Tensor | None = None
    picks: Tensor | None = None
    chooser: Callable[[Tensor], Tensor] | None = None


@dataclass(eq=False)
class Rule:
    """All of a solve that is not a tensor.

    Attributes:
        path: "two_step", "gram", "masked" or "columns".
        recursion: The iterations.
        iterations: ``T``.
        prior: ``g``.
        dtype: The precision of the products; iterates have at least float32.
        unit: Whether ``s = 1/L`` and ``t = 1`` (formulation ``normalized``), else ``s = 1`` and ``t = 1/L``.
        lam: The strong convexity, where it is a number.
        inner: The inner product of each problem.
        operator: What multiplies, a convolution; its weight is a stand-in. None where the weight is a matrix.
        share: The factor on all samples of the inputs.
        chooser: Draws samples from a residual.
        low: Whether iterates are computed again in the backward pass instead of being kept.
        images: Of how many iterations, the first ones, ``z_k`` is kept.
        regrouped: Whether a two-step path sums ``G_k d_k^T`` where no ``z_k`` was kept, instead of computing it again.
        stacked: Whether all iterations may be kept in one buffer, where values are at hand.
        samples_inputs: Whether inputs are sampled, and ``sampled`` whether whole gradients are, with the input in them.
    """

    path: str
    recursion: Recursion
    iterations: int
    prior: Prior
    dtype: torch.dtype
    unit: bool
    lam: float
    inner: Callable[[Tensor, Tensor], Tensor]
    operator: Any = None
    share: float = 1.0
    chooser: Callable[[Tensor], Tensor] | None = None
    low: bool = False
    images: int = 0
    regrouped: bool = False
    stacked: bool = False

    def __post_init__(self) -> None:
        self.samples_inputs = self.path in ("masked", "columns")
        self.sampled = self.samples_inputs and self.recursion.reference is None

    def sample(self, k: int) -> int | None:
        """Returns the place of iteration ``k`` among the samples of the inputs; None for a full gradient."""
        inner = self.recursion.reference
        if not self.samples_inputs or inner is None:
            return k if self.samples_inputs else None
        return None if k % inner == 0 else k - 1 - k // inner


class Given(NamedTuple):
    """A whole solve, its dimensions merged, in the order in which autograd is given it.

    Attributes:
        c: ``v_1``, where that is the layer's output; None where gradients are sampled.
        u: The input, where gradients are sampled.
        weight: ``A``: a matrix, one for each group, or the kernel of a convolution.
        bias: ``b`` where gradients are sampled.
        gate: ``a``, broadcastable to the output; None for one.
        smoothness: ``L``.
        lam: The strong convexity, where it depends on the weights.
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
    gate: Tensor | None
    smoothness: Tensor
    lam: Tensor | None
    gram: Tensor | None
    inputs: Tensor | None
    outputs: Tensor | None
    picks: Tensor | None
    rule: Rule
