"""A dropout whose work a sampling solver has taken over: for all that it serves, or for some of it."""

from torch import Tensor, nn

from solver_plugins.blocks.link import Handed, find, put
from solver_plugins.blocks.shell import Shell
from solver_plugins.errors import SolverPluginsError

TAKEN = "_rates_taken_over"
"""Where a module keeps the rates that its attributes had, which functional dropouts read."""
_DROPPED = "dropped"
"""The mark of what a shared dropout returns: it says what the dropout was given."""
_DRAWN = "drawn"
"""The mark of what a solver returns that has done the work of the dropout behind it."""


class PassThrough(Shell):
    """Mixin in front of a dropout's class: the module hands its input on."""

    prefix = "PassThrough"

    def forward(self, input: Tensor) -> Tensor:
        return input

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, passed over: a solver samples in its place"


class RoutedDropout(Shell):
    """Mixin in front of the class of a dropout that serves solver blocks and plain layers alike.

    It drops as before, and marks its result with what it was made from, so that a solver block can undo it. It hands on
    what a coordinate solver has already drawn.
    """

    prefix = "Routed"

    def forward(self, input: Tensor) -> Tensor:
        """Returns the dropout's output, unless a solver has drawn the input already."""
        drawn = find(input, _DRAWN)
        if drawn is not None and not drawn.broken:
            return input
        output: Tensor = super().forward(input)
        # In evaluation a dropout may hand its input on, which is then its own origin.
        return put(output, Handed(_DROPPED, input=None if output is input else input))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, routed: a solver samples in its place where it serves one"


def undropped(input: Tensor) -> Tensor:
    """Returns what a routed dropout made this tensor from.

    Raises:
        SolverPluginsError: If it does not come from one: it would be dropped twice.
    """
    handed = find(input, _DROPPED)
    if handed is None or handed.broken:
        raise SolverPluginsError(
            "Expected the very output of this block's dropout, which it shares with other layers; found another "
            "tensor. Something between them (a sharded or wrapped layer, a copy) made a new one: convert all layers "
            "that share the dropout, or leave this one out with exclude=."
        )
    return input if handed.input is None else handed.input


def mark_as_drawn(output: Tensor) -> Tensor:
    """Tells a routed dropout behind a coordinate solver that its work is done."""
    return put(output, Handed(_DRAWN))


def check_rates(name: str, module: nn.Module) -> None:
    """Raises SolverPluginsError in training if a rate that a solver has taken over is above zero again."""
    for attribute in vars(module).get(TAKEN, ()) if module.training else ():
        rate = getattr(module, attribute)
        if rate:
            path = f"{name}.{attribute}" if name else attribute
            raise SolverPluginsError(
                f"{path!r} was set to {rate} after the conversion, but a solver samples in place of this dropout, and "
                "features would be dropped twice. Set it to 0 and give the solver the rate (p=), or call "
                "revert_model(model) first."
            )


def pass_through(dropout: nn.Module) -> None:
    """Makes a dropout pass its input on; the object stays."""
    if not isinstance(dropout, PassThrough):
        dropout.__class__ = PassThrough.class_for(type(dropout))


def route(dropout: nn.Module) -> None:
    """Makes a dropout one that solver blocks can undo; the object stays."""
    if not isinstance(dropout, RoutedDropout):
        dropout.__class__ = RoutedDropout.class_for(type(dropout))
