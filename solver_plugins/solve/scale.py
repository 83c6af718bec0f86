"""What is done to a solve's result: a gain and a shift per output feature, and a blend with the plain layer."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Observer = Callable[[Tensor, int], tuple[Tensor, Tensor] | None]
"""Sees the argument of a solve and the dimension of its features; returns the gain and shift to use."""


@dataclass(frozen=True)
class Scale:
    """``(1 - a) v_1 + a (gain * v_T + shift)``.

    Attributes:
        gain: One factor per output feature on the last argument; None for ones.
        shift: What is added to that; None for zeros.
        blend: ``a``, a 0-d tensor; None is one.
        observer: Sees the last argument, and may choose gain and shift.
    """

    gain: Tensor | None = None
    shift: Tensor | None = None
    blend: Tensor | None = None
    observer: Observer | None = None

    @property
    def is_one(self) -> bool:
        """Whether it changes nothing."""
        return self.gain is None and self.shift is None and self.blend is None

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Returns all tensors of it."""
        return self.gain, self.shift, self.blend

    def observed(self, last: Callable[[], Tensor], dim: int) -> "Scale":
        """Returns the scale that an observer of the last argument chooses; this one if there is no observer."""
        if self.observer is None:
            return self
        gain, shift = self.observer(last(), dim) or (None, None)
        return Scale(gain, shift, self.blend)

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
