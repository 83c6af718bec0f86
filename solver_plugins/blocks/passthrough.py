"""A dropout whose work a sampling solver has taken over."""

from torch import Tensor, nn

from solver_plugins.blocks.made import Shell, made_class


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


def install_pass_through(dropout: nn.Module) -> None:
    """Makes a dropout pass its input on; the object stays."""
    if not isinstance(dropout, PassThrough):
        dropout.__class__ = PassThrough.class_for(type(dropout))
