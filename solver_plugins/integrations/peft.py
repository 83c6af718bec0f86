"""PEFT: adapters are not merged into solvers.

An adapter adds to what a block returns. Merging would move it into the weight that the solver iterates with, which
changes the outputs at more than one iteration. PEFT asks ``BaseTuner._check_merge_allowed`` before it merges.
"""

import functools
import sys
from typing import Any

from torch import nn

from solver_plugins.blocks import SolverBlock
from solver_plugins.surgery import ConversionError

_TUNER: Any = sys.modules["peft.tuners.tuners_utils"].BaseTuner


def refuse_merging(model: nn.Module) -> None:
    """Raises ConversionError if an adapter of a model is around a solver of more than one iteration."""
    found = [
        name
        for name, module in model.named_modules()
        if isinstance(getattr(module, "base_layer", None), SolverBlock) and not module.base_layer.computes_its_layer
    ]
    if found:
        raise ConversionError(
            f"Expected adapters around plain layers; found {len(found)} around solvers of more than one iteration, "
            f"such as {found[0]!r}. Merging would change the function: the adapter adds to what the solver returns, "
            "and would become a part of its problem. Call solver_plugins.merge_model(model) first, where blocks are "
            "affine in evaluation; or keep the adapter by itself."
        )


def _guarded(check: Any) -> Any:
    @functools.wraps(check)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        refuse_merging(self.model)
        return check(self, *args, **kwargs)

    return checked


_TUNER._check_merge_allowed = _guarded(_TUNER._check_merge_allowed)
