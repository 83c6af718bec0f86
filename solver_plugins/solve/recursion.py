"""What a solver declares about its iterations, so that one kernel can run them with a backward pass written by hand.

    x_k = prox(v_k),    y_k = x_k + b_k (x_k - x_{k-1}),    v_{k+1} = M_k y_k + m (x_k - x_{k-1}) + f_k c,    v_1 = c
    M_k = (1 - t_k s lam) I - t_k s A D_k A^T,     t_k = f_k t

A solver whose iterations are of this form says which ``f_k``, ``b_k``, ``m`` and ``D_k`` it uses. With a reference
point ``r`` (variance reduction) an iteration multiplies ``y_k - r`` instead and adds to the step from ``r``. With a
sample of the outputs (coordinate descent) the other outputs keep their last ``x``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from solver_plugins.prox import Step


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

    factor: Callable[[int, Step], Step] | None = None
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
