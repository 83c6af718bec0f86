"""What a solver declares about its iterations, and a whole solve as the kernel is given it.

    x_k = prox(v_k),    y_k = x_k + b_k (x_k - x_{k-1}),    v_{k+1} = M_k y_k + m (x_k - x_{k-1}) + f_k c,    v_1 = c
    M_k = (1 - t_k s lam) I - t_k s A D_k A^T,     t_k = f_k t

A solver whose iterations are of this form says which ``f_k``, ``b_k``, ``m`` and ``D_k`` it uses. With a reference
point ``r`` (variance reduction) an iteration multiplies ``y_k - r`` instead and adds to the step from ``r``. With a
sample of the outputs (coordinate descent) the other outputs keep their last ``x``.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from solver_plugins.operators import LinearMap, LinearOperator
from solver_plugins.prox import Prior, Step
from solver_plugins.solve.layout import Layout
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
        lam: The strong convexity, where it is a number.
        unit: Whether ``s = 1/L`` and ``t = 1`` (formulation ``normalized``), else ``s = 1`` and ``t = 1/L``.
        layout: How the output's dimensions are merged.
        samples: What was drawn, but for its tensors.
        low: Whether iterates are computed again in the backward pass instead of being kept.
        images: Of how many iterations, the first ones, ``z_k`` is kept.
        regrouped: Whether a two-step path sums ``G_k d_k^T`` where no ``z_k`` was kept, instead of computing it again.
        stacked: Whether all iterations may be kept in one buffer, where values are at hand.
        gated: Whether there is a gate.
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
    gated: bool = False

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
        gate: ``a``: 0-d, or one number per output feature; None for one.
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

    def flattened(self) -> "Given":
        """Returns the solve with its dimensions merged, as its layout says."""
        rule, layout = self.rule, self.rule.layout
        u, bias, inputs, outputs, picks = self.u, self.bias, self.inputs, self.outputs, self.picks
        # In the precision of what they choose from, once for all iterations.
        outputs = None if outputs is None else outputs.to(self.smoothness.dtype)
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


@dataclass(eq=False)
class Kept:
    """What a solve leaves for its backward pass: one entry per iteration, or one buffer for all.

    Attributes:
        iterates: ``x_k``; one by one and where ``c`` is given, without the first, ``prox(c)``.
        slopes: ``J_k`` where the iterate does not tell it; for a prior that is not separable, ``v_k``. As many.
        images: ``z_k`` of the first iterations; one by one, without the very first.
        momenta: ``b_k`` from the second iteration on, where they are tensors.
        moved: ``v_{k+1} - v_1`` before a gate acts on it.
        weights: What a chooser has drawn.
        matrix: What the products made of ``A A^T``, once for both passes.
        stacked: Whether there are buffers.
    """

    iterates: list[Tensor] = field(default_factory=list)
    slopes: list[Tensor] = field(default_factory=list)
    images: list[Tensor] = field(default_factory=list)
    momenta: list[Tensor] = field(default_factory=list)
    moved: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    matrix: Tensor | None = None
    stacked: bool = False

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Returns all of it, in the order of :meth:`split`."""
        return (self.matrix, *self.iterates, *self.slopes, *self.images, *self.momenta, *self.moved, *self.weights)

    @classmethod
    def split(cls, tensors: Sequence[Any], rule: Rule) -> "Kept":
        """Sorts what :meth:`tensors` returned."""
        matrix, *rest = tensors
        # A buffer has one more dimension than the rows of a matrix.
        if rule.stacked and rest and rest[0].dim() == 3:
            last = len(rest) - rule.gated
            return cls(rest[:1], images=rest[1:last], moved=rest[last:], matrix=matrix, stacked=True)
        count = rule.iterations - (1 if rule.draws_gradients else 2)
        unknown = rule.recursion.momenta(rule.iterations) is None
        slopes_kept = 0 if rule.prior.slope_from_value else count
        tensors_kept = unknown * (rule.iterations - 2), rule.gated * (rule.iterations - 1)
        counts = (count, slopes_kept, rule.images, *tensors_kept)
        ends = [0, *itertools.accumulate(counts), len(rest)]
        iterates, slopes, images, momenta, moved, weights = (rest[a:b] for a, b in itertools.pairwise(ends))
        return cls(iterates, slopes, images, momenta, moved, weights, matrix)

    def unstacked(self, rule: Rule) -> "Kept":
        """Returns the same one by one."""
        images = self.images[0].unbind()[int(rule.draws_gradients) :] if self.images else ()
        iterates = self.iterates[0].unbind()[int(not rule.draws_gradients) :]
        moved = [one for buffer in self.moved for one in buffer.unbind()]
        return Kept(list(iterates), images=list(images), moved=moved, matrix=self.matrix)
