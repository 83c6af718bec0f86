"""Classes made at run time: a shell in front of a plain class, so that an object can change its class in place."""

from typing import Any, ClassVar, TypeVar

from torch import nn

S = TypeVar("S", bound="Shell")

_MADE: dict[tuple[type, type], Any] = {}


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
