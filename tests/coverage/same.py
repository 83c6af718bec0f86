"""Whether two models are one network under two names.

Many of timm's names differ in the pretrained weights or the image size only: at one size they are the same modules with
the same options, and a check of one is a check of the other.
"""

import enum
import functools
import hashlib
import types
from typing import Any

import torch
from torch import Tensor, nn

from solver_plugins.surgery import Inputs

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_ABOUT_WEIGHTS = frozenset({"pretrained_cfg", "default_cfg"})
_DEEPEST = 8


class _UnknownError(Exception):
    """A value that cannot be written as text."""


def network_id(model: nn.Module, inputs: Inputs) -> str | None:
    """Returns a hash of everything that a network computes with except its weights, or None if that cannot be told.

    It covers, module by module, the class, every attribute (including functions and what they hold), names, shapes and
    types of the Parameters, contents of the buffers, and what is shared; and the shapes of the inputs.
    """
    text = hashlib.sha256()
    modules: dict[int, str] = {}
    parameters: dict[int, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        modules.setdefault(id(module), name)
        for own, parameter in module._parameters.items():
            if parameter is not None:
                parameters.setdefault(id(parameter), f"{name}.{own}")
    writer = _Writer(modules, parameters)
    try:
        for tensor in (*inputs.args, *inputs.kwargs.values()):
            text.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        for name, module in model.named_modules(remove_duplicate=False):
            text.update(f"\n{name} {modules[id(module)]} ".encode())
            text.update(writer.module(module).encode())
    except _UnknownError:
        return None
    return text.hexdigest()[:20]


class _Writer:
    """Writes values as text, different values as different texts."""

    def __init__(self, modules: dict[int, str], parameters: dict[int, str]):
        self.modules = modules
        self.parameters = parameters

    def module(self, module: nn.Module) -> str:
        own = {key: value for key, value in vars(module).items() if key not in _OF_EVERY_MODULE | _ABOUT_WEIGHTS}
        parameters = {
            key: parameter if parameter is None else (parameter, tuple(parameter.shape), parameter.requires_grad)
            for key, parameter in module._parameters.items()
        }
        hooks = [value for key, value in vars(module).items() if key.endswith("_hooks") and value]
        parts = (type(module), own, parameters, module._buffers, list(module._modules.items()), hooks)
        return self.text(parts)

    def text(self, value: Any, depth: int = 0) -> str:
        if depth > _DEEPEST:
            raise _UnknownError
        if value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype | torch.device):
            return f"{type(value).__name__} {value!r}"
        if isinstance(value, nn.Module | nn.Parameter):
            known = self.modules if isinstance(value, nn.Module) else self.parameters
            if id(value) not in known:
                raise _UnknownError
            return f"{known[id(value)]} {value.dtype if isinstance(value, nn.Parameter) else ''}"
        if isinstance(value, Tensor):
            content = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            return f"{tuple(value.shape)} {value.dtype} {hashlib.sha256(content).hexdigest()}"
        parts = self._parts(value)
        return f"{type(value).__qualname__}({', '.join(self.text(part, depth + 1) for part in parts)})"

    def _parts(self, value: Any) -> list[Any]:
        """Returns the parts of a value that is not written as it is."""
        if isinstance(value, dict):
            return [item for pair in value.items() for item in pair]
        if isinstance(value, list | tuple):
            return list(value)
        if isinstance(value, set | frozenset):
            return sorted(map(repr, value))
        if isinstance(value, enum.Enum):
            return [value.name]
        if isinstance(value, type | types.BuiltinFunctionType):
            return [value.__module__, value.__qualname__]
        if isinstance(value, functools.partial):
            return [value.func, value.args, value.keywords]
        if isinstance(value, types.MethodType):
            return [value.__func__, value.__self__]
        if isinstance(value, types.FunctionType):
            held = [cell.cell_contents for cell in value.__closure__ or ()]
            code = value.__code__
            return [value.__module__, value.__qualname__, code.co_code, value.__defaults__, value.__kwdefaults__, held]
        if hasattr(value, "__dict__") and not isinstance(value, types.ModuleType):
            return [type(value), vars(value)]
        raise _UnknownError
