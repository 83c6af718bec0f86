"""What is done to a solve and its result: a gate, a gain and a shift per output feature, a blend with the layer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

GateKind = Literal["scalar", "channel"]
Observer = Callable[[Tensor, int], tuple[Tensor, Tensor] | None]
"""Sees the argument of a solve and the dimension of its features; returns the gain and shift to use."""


@dataclass(frozen=True)
class Scale:
    """``(1 - blend) v_1 + blend (gain * v_T + shift)``, with a gate in every iteration of the solve.

    A gate ``a`` in [0, 1] makes each iteration ``v_{k+1} = v_1 + a (T(y_k) - v_1)``: at zero the block is the plain
    layer to the bit, at one the solver. Its ``proxgd`` is ``x <- prox(c + a (I - (A A^T + lam)/L) x)``, which minimises

        1/2 x^T ((A A^T + lam)/L + diag((1 - a)/a)) x - <c/a, x> + sum_i g_i(x_i)/a_i.

    Attributes:
        gain: One factor per output feature on the last argument; None for ones.
        shift: What is added to that; None for zeros.
        blend: A 0-d tensor; None is one.
        gate: ``a``, a 0-d tensor or one number per output feature, which may be trained; None is one.
        observer: Sees the last argument, and may choose gain and shift.
    """

    gain: Tensor | None = None
    shift: Tensor | None = None
    blend: Tensor | None = None
    gate: Tensor | None = None
    observer: Observer | None = None

    @property
    def is_one(self) -> bool:
        """Whether it changes nothing of a result; a gate is part of the solve."""
        return self.gain is None and self.shift is None and self.blend is None

    @property
    def gate_kind(self) -> GateKind | None:
        """Whether there is one gate, or one per output feature; None for no gate."""
        return None if self.gate is None else "channel" if self.gate.dim() else "scalar"

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Returns all tensors of it."""
        return self.gain, self.shift, self.blend, self.gate

    def observed(self, last: Callable[[], Tensor], dim: int) -> "Scale":
        """Returns the scale that an observer of the last argument chooses; this one if there is no observer."""
        if self.observer is None:
            return self
        gain, shift = self.observer(last(), dim) or (None, None)
        return Scale(gain, shift, self.blend, self.gate)

    def of(
        self, last: Tensor, first: Tensor | None, per_feature: Callable[[Tensor], Tensor], *, shifted: bool = True
    ) -> Tensor:
        """Returns the scaled result.

        Args:
            last: ``v_T``.
            first: ``v_1``, where there is a blend.
            per_feature: Views one number per feature so that it broadcasts along those of ``last``.
            shifted: Whether the shift is added: it is not part of a weight.
        """
        if self.gain is not None:
            last = last * per_feature(self.gain).to(last.dtype)
        if self.shift is not None and shifted:
            last = last + per_feature(self.shift).to(last.dtype)
        if self.blend is None:
            return last
        assert first is not None
        return torch.lerp(first, last, self.blend.to(last.dtype))
