"""Classes made at run time: a shell in front of a plain class, so that an object can change its class in place.

Tools that read a layer's class or source in place of calling it would miss its solver, so a block refuses them.
"""

import sys
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from solver_plugins.errors import UnsupportedLayerError

S = TypeVar("S", bound="Shell")

_MADE: dict[tuple[type, type], Any] = {}
_EXPORT = (
    "use torch.export.export(model, ...), or solver_plugins.export_model(model, path, to='onnx' or 'pt2'). A model that"
    " is plain again can be traced, too: merge_model(model) where every block is affine, or revert_model(model)"
)
_QUANTIZE = (
    "first make the layers plain: merge_model(model) keeps the function where every block is affine, "
    "revert_model(model) does not"
)


class Shell(nn.Module):
    """Mixin in front of a module's class. The object stays what it was, in class, place, Parameters and keys.

    Attributes:
        plain_class: The class behind the shell, which the object has again when the shell is taken off.
    """

    plain_class: ClassVar[type[nn.Module]]
    prefix: ClassVar[str]

    @classmethod
    def class_for(cls, plain: type[nn.Module]) -> "type[Shell]":
        """Returns the class that an object of class ``plain`` gets with this shell, called ``prefix + plain``."""
        return made_class(cls, plain, cls.prefix)

    @classmethod
    def restored_class(cls, plain: type[nn.Module]) -> "type[Shell]":
        """Returns the class of an object that was copied or pickled with this shell around ``plain``."""
        return cls.class_for(plain)

    def _reduce(self, protocol: Any) -> tuple[Any, ...]:
        return _blank, (type(self).__bases__[0], type(self).plain_class), self.__getstate__()


def made_class(shell: type[S], plain: type[nn.Module], prefix: str, **members: Any) -> type[S]:
    """Returns the class ``prefix + plain`` with the bases ``shell`` and ``plain``; made once."""
    if (shell, plain) not in _MADE:
        # A made class has no importable name: pickle and deepcopy make it again from its two bases.
        own = {"__module__": __name__, "__reduce_ex__": Shell._reduce, "__new__": _new, "plain_class": plain, **members}
        _MADE[shell, plain] = type(f"{prefix}{plain.__name__}", (shell, plain), own)
    return _MADE[shell, plain]


def _new(cls: type[Shell], *args: Any, **kwargs: Any) -> nn.Module:
    # PEFT makes an adapter's layers by type(layer)(...): such a call means another layer, not another solver.
    return cls.plain_class(*args, **kwargs) if args or kwargs else object.__new__(cls)


def _blank(shell: type[Shell], plain: type[nn.Module]) -> Shell:
    made: type[Shell] = shell.restored_class(plain)
    return made.__new__(made)


def hides_forward(module: nn.Module) -> bool:
    """Whether an instance has a forward of its own, which a change of class would not reach.

    What accelerate leaves behind when a hook is removed, the class's own forward, hides nothing.
    """
    own = vars(module).get("forward")
    same = getattr(own, "__func__", None) is type(module).forward and getattr(own, "__self__", None) is module
    return own is not None and not same


def take_off(module: Shell) -> nn.Module:
    """Gives a module its plain class again, where it stands."""
    module.__class__ = type(module).plain_class  # type: ignore[assignment]
    return module


class Refusing(Shell):
    """Mixin that raises where a tool would trace a solver wrongly, or replace its layer and leave it out."""

    @property
    def __jit_ignored_attributes__(self) -> list[str]:
        """Nothing; raises UnsupportedLayerError if TorchScript asks, as it does before it reads a module's source."""
        if sys._getframe(1).f_globals.get("__name__") == "torch.jit._recursive":
            raise UnsupportedLayerError(_cannot("TorchScript (torch.jit.script, torch.jit.trace)", "be compiled"))
        return []

    @property
    def qconfig(self) -> Any:
        """Not there: see the setter."""
        raise AttributeError(f"{type(self).__name__} has no qconfig.")

    @qconfig.setter
    def qconfig(self, value: Any) -> None:
        # torch.ao.quantization sets it on every module before it swaps those whose very class it knows.
        if value is not None or isinstance(self, nn.Linear):
            raise UnsupportedLayerError(
                "torch.ao.quantization swaps layers by their class, and would silently leave this "
                f"{type(self).__name__} in full precision: {_QUANTIZE}."
            )

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Registers a Parameter; raises UnsupportedLayerError for a quantized one, without the products of a solver."""
        if is_quantized(param):
            raise UnsupportedLayerError(
                f"A solver multiplies by its weight and by its transpose, which a quantized weight "
                f"({type(param).__name__} of torchao) does not offer: {_QUANTIZE}."
            )
        super().register_parameter(name, param)


def refuse_tracing(input: Any) -> None:
    """Raises UnsupportedLayerError while torch.jit.trace or torch.fx traces a forward with this input."""
    if torch._C._get_tracing_state() is not None:
        raise UnsupportedLayerError(
            _cannot("TorchScript (torch.jit.trace, torch.onnx.export with dynamo=False)", "be traced")
        )
    if not isinstance(input, Tensor) and type(input).__module__ == "torch.fx.proxy":
        raise UnsupportedLayerError(_cannot("torch.fx", "be traced symbolically"))


def is_quantized(weight: Any) -> bool:
    """Whether a weight is one of torchao's, whose type knows few operations."""
    return type(weight).__module__.partition(".")[0] == "torchao"


def _cannot(tool: str, verb: str) -> str:
    return f"A solver block chooses its way by its input's shape and cannot {verb} by {tool}: {_EXPORT}."
