"""The scale of a block: gains and shifts per output feature, and the blend with the plain layer."""

import numbers
from typing import Any

import torch
from torch import Tensor

from solver_plugins.blocks.stepsize import TrackedStep
from solver_plugins.errors import OptionError
from solver_plugins.solve import Observer, Solver

SCALE_BUFFERS = ("channel_gain", "channel_shift", "blend")


def check_blend(blend: Any) -> None:
    """Raises OptionError for a blend that is not a number in [0, 1]."""
    number = isinstance(blend, numbers.Real) and not isinstance(blend, bool)
    if not number or not 0 <= blend <= 1:
        raise OptionError(f"Expected a blend in [0, 1]; found {blend!r}.")


class Scaled(TrackedStep):
    """Mixin that owns the scale of a block.

    Attributes:
        channel_gain: One factor per output feature on the solver's argument, from :func:`solver_plugins.calibrate`;
            None for ones.
        channel_shift: What is added to that, one number per output feature; None for zeros.
        blend: ``a`` in ``(1 - a) v_1 + a v_K``, between the first iterate and the last; None for one.
        observer: Looks at solves while a model is calibrated.
    """

    channel_gain: Tensor | None
    channel_shift: Tensor | None
    blend: Tensor | None
    observer: Observer | None
    solver: Solver

    @property
    def computes_its_layer(self) -> bool:
        """Whether evaluation computes just what the plain layer does: after one iteration, or closed."""
        config = self.solver.config
        unscaled = self.channel_gain is None and self.channel_shift is None
        if config.formulation != "normalized" or self.solver.samples_in_evaluation:
            return False
        if self.blend is not None and not self.blend.is_meta and float(self.blend) == 0:
            return True
        return unscaled and (config.iters == 1 or self._is_closed)

    @property
    def _is_closed(self) -> bool:
        """Whether a gate keeps the solver from changing anything."""
        return False

    def set_scale(self, gain: Tensor | None, shift: Tensor | None = None) -> None:
        """Sets factors on the solver's argument and what is added to it; None for ones, and for zeros."""
        count = self._kernel_at_rest().shape[0]
        for name, row in (("gains", gain), ("shifts", shift)):
            if row is not None and (row.shape != (count,) or not bool(torch.isfinite(row).all())):
                raise OptionError(f"Expected {count} finite {name}, one per output feature; found {tuple(row.shape)}.")
        self.channel_gain = None if gain is None else gain.detach().to(self.L)
        self.channel_shift = None if shift is None else shift.detach().to(self.L)

    def set_blend(self, blend: float) -> None:
        """Sets how much of the solver there is: 0 is the original layer, 1 the solver."""
        check_blend(blend)
        if self.blend is not None and not self.blend.is_meta:
            # In place: a compiled graph holds this buffer, and a schedule may change it at every step.
            self.blend.fill_(blend)
        else:
            self.blend = None if blend == 1 else torch.full_like(self.L, blend)
