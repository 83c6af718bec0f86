"""Copies of a module tree that own no weights, so that a forward pass can leave no trace on the model.

Every module is copied and every tensor is replaced. On the meta device it is replaced by one of the same shape. For a
pass on the model's own device, Parameters stay themselves and other tensors are copied. Modules that the model reaches
in other ways than by registration (lists, bound methods, partials) are replaced by their copies, too.
"""

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Replace = Callable[[Tensor], Tensor]


class _ReplaceTensors(TorchFunctionMode):
    """Makes ``copy.deepcopy`` of a tensor return its replacement."""

    def __init__(self, replace: Replace):
        self.replace = replace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = self.replace(tensor)
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


def to_meta(tensor: Tensor) -> Tensor:
    """Returns a tensor like this one on the meta device."""
    made = torch.empty_like(tensor, device="meta", requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made


def to_own(tensor: Tensor) -> Tensor:
    """Returns Parameters themselves, and copies of all other tensors."""
    return tensor if isinstance(tensor, nn.Parameter) else tensor.detach().clone()


def clone(model: nn.Module, replace: Replace) -> tuple[nn.Module, dict[nn.Module, nn.Module]]:
    """Copies a module tree; returns the copy, and for each of its modules the original.

    ``replace`` returns the tensor that stands in for another one. It is called once per tensor, so sharing survives.
    """
    memo: dict[int, Any] = {}
    pairs: list[tuple[nn.Module, nn.Module]] = []
    for module in model.modules():
        # A scripted module lives in C++; it is shared. A traced graph's own __new__ would make another class.
        made = module if isinstance(module, torch.jit.ScriptModule) else object.__new__(type(module))
        memo[id(module)] = made
        pairs.append((module, made))
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and id(tensor) not in memo:
                memo[id(tensor)] = replace(tensor)
    with _ReplaceTensors(replace):
        for module, made in pairs:
            if made is not module:
                for name, value in vars(module).items():
                    made.__dict__[name] = _copy(value, memo)
    return memo[id(model)], {made: module for module, made in pairs}


def shorten_recurrence(made: nn.Module) -> None:
    """Makes recurrent layers of a copy on the meta device return outputs of the right shape instead of running."""
    for module in made.modules():
        if isinstance(module, nn.RNNBase):
            module.__dict__["forward"] = functools.partial(_recurrent_shapes, module)


def _recurrent_shapes(layer: nn.RNNBase, input: Any, hx: Any = None) -> Any:
    if not isinstance(input, Tensor):
        return type(layer).forward(layer, input, hx)
    directions = 2 if layer.bidirectional else 1
    width = layer.proj_size or layer.hidden_size
    batch = () if input.dim() == 2 else (input.shape[0 if layer.batch_first else 1],)
    hidden = input.new_empty(layer.num_layers * directions, *batch, width)
    output = input.new_empty(*input.shape[:-1], directions * width)
    if isinstance(layer, nn.LSTM):
        return output, (hidden, input.new_empty(layer.num_layers * directions, *batch, layer.hidden_size))
    return output, hidden


def _copy(value: Any, memo: dict[int, Any]) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    # Most attributes of most modules: empty dictionaries of hooks.
    if type(value) in (dict, OrderedDict) and not value:
        return type(value)()
    known = memo.get(id(value))
    if known is not None:
        return known
    if type(value) in (dict, OrderedDict):
        made = memo[id(value)] = type(value)()
        for key, item in value.items():
            made[key] = _copy(item, memo)
        return made
    try:
        return copy.deepcopy(value, memo)
    except Exception:
        # A lock, a process group or a Python module: a forward pass does not change it.
        return value
