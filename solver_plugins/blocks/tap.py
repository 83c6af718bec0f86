"""A linear layer that remembers its last input and output for a solver that sits further down the chain."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from solver_plugins.blocks.made import Shell, made_class, take_off
from solver_plugins.errors import SolverPluginsWarning, warn
from solver_plugins.operators import Reader, reader_for


@dataclass
class Stash:
    """Input and output of one call, until the solver takes them. Copies and pickles of it are empty."""

    pair: tuple[Tensor, Tensor] | None = None

    def take(self) -> tuple[Tensor, Tensor] | None:
        """Returns the pair and forgets it, so that no graph outlives its step."""
        pair, self.pair = self.pair, None
        return pair

    def __deepcopy__(self, memo: Any) -> "Stash":
        return Stash()

    def __reduce__(self) -> tuple[Any, ...]:
        return Stash, ()


class Tap(Shell):
    """Mixin in front of a linear layer's class: computes what the layer computes, and keeps it in ``tap``."""

    kernel_reader: Reader
    tap: Stash

    @classmethod
    def class_for(cls, plain: type[nn.Module]) -> "type[Tap]":
        """Returns the class of a layer of this kind that is tapped."""
        return made_class(cls, plain, "Tapped", kernel_reader=staticmethod(reader_for(plain)))

    def forward(self, input: Tensor) -> Tensor:
        """Returns the layer's output."""
        output: Tensor = super().forward(input)
        if self.tap.pair is not None and not torch.compiler.is_compiling():
            warn(
                "The solver behind this layer did not run in the last forward pass. Was its norm replaced after the "
                "conversion (SyncBatchNorm)? Call revert_model, replace it, and convert again.",
                SolverPluginsWarning,
            )
        self.tap.pair = (input, output)
        return output


def install_tap(layer: nn.Module) -> None:
    """Taps a layer; the object stays."""
    layer.__class__ = Tap.class_for(type(layer))
    tapped: Tap = layer  # type: ignore[assignment]
    tapped.tap = Stash()


def remove_tap(layer: Tap) -> None:
    """Makes it a plain layer again."""
    del layer.tap
    take_off(layer)
