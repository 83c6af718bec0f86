"""A dropout whose work a sampling solver has taken over: for all that it serves, or for some of it."""

from torch import Tensor, nn

from solver_plugins.blocks.made import Shell, made_class
from solver_plugins.errors import SolverPluginsError

_BEFORE = "_solver_plugins_before_dropout"
_DONE = "_solver_plugins_already_dropped"


class PassThrough(Shell):
    """Mixin in front of a dropout's class: the module hands its input on."""

    @classmethod
    def class_for(cls, plain: type[nn.Module]) -> "type[PassThrough]":
        """Returns the class of a dropout of this kind that is passed over."""
        return made_class(cls, plain, "PassThrough")

    def forward(self, input: Tensor) -> Tensor:
        """Returns the input."""
        return input

    def extra_repr(self) -> str:
        """Returns the dropout's own line, and that it is passed over."""
        return f"{super().extra_repr()}, passed over: a solver samples in its place"


class RoutedDropout(Shell):
    """Mixin in front of the class of a dropout that serves solver blocks and plain layers alike.

    It drops as before, and its result remembers what it was made from, so that a solver block can undo it. What a
    coordinate solver has already drawn is handed on. Both travel with the tensor itself: whatever the order of calls, a
    recomputed (checkpointed) pass included, no block meets another one's input.
    """

    @classmethod
    def class_for(cls, plain: type[nn.Module]) -> "type[RoutedDropout]":
        """Returns the class of a dropout of this kind that is routed."""
        return made_class(cls, plain, "Routed")

    def forward(self, input: Tensor) -> Tensor:
        """Returns the dropout's output, unless a solver has drawn the input already."""
        if getattr(input, _DONE, False):
            return input
        output: Tensor = super().forward(input)
        # In evaluation a dropout may hand its input on, which is then its own origin.
        setattr(output, _BEFORE, None if output is input else input)
        return output

    def extra_repr(self) -> str:
        """Returns the dropout's own line, and that some of its calls are undone."""
        return f"{super().extra_repr()}, routed: a solver samples in its place where it serves one"


def undropped(input: Tensor) -> Tensor:
    """Returns what a routed dropout made this tensor from.

    Raises:
        SolverPluginsError: If it does not come from one: it would be dropped twice.
    """
    if not hasattr(input, _BEFORE):
        raise SolverPluginsError(
            "Expected the very output of this block's dropout, which it shares with other layers; found another "
            "tensor. Something between them (a sharded or wrapped layer, a copy) made a new one: convert all layers "
            "that share the dropout, or leave this one out with exclude=."
        )
    before: Tensor | None = getattr(input, _BEFORE)
    return input if before is None else before


def mark_as_drawn(output: Tensor) -> Tensor:
    """Tells a routed dropout behind a coordinate solver that its work is done."""
    setattr(output, _DONE, True)
    return output


def install_pass_through(dropout: nn.Module) -> None:
    """Makes a dropout pass its input on; the object stays."""
    if not isinstance(dropout, PassThrough):
        dropout.__class__ = PassThrough.class_for(type(dropout))


def install_route(dropout: nn.Module) -> None:
    """Makes a dropout one that solver blocks can undo; the object stays."""
    if not isinstance(dropout, RoutedDropout):
        dropout.__class__ = RoutedDropout.class_for(type(dropout))
