"""Watches what stands in a converted layer's place: an adapter that reads the weight, and does not call the layer.

Most adapters add to what a layer returns. Some (PEFT's HRA) compute with a changed weight of their own, so that the
layer's solver would be left out without a word.
"""

import functools
import threading
from typing import Any

import torch
from torch import nn

from solver_plugins.blocks.block import SolverBlock
from solver_plugins.errors import SolverPluginsError

_CALLED = "called_in"
"""A block's own note of the threads in which it has run since what stands around it was called."""


def watch(name: str, module: nn.Module) -> None:
    """Has what stands in a converted layer's place raise where it has called none of the blocks inside of it."""
    if any(_is_ours(hook) for hook in module._forward_pre_hooks.values()):
        return
    module.register_forward_pre_hook(_begins)
    module.register_forward_hook(functools.partial(_ends, name))
    for block in module.modules():
        if isinstance(block, SolverBlock):
            vars(block)[_CALLED] = {}
            block.register_forward_hook(_calls)


def unwatch(module: nn.Module) -> None:
    """Removes all of this from a module."""
    vars(module).pop(_CALLED, None)
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if _is_ours(hook)]:
            del hooks[key]


def _is_ours(hook: Any) -> bool:
    return getattr(hook, "func", hook) in (_begins, _calls, _ends)


def _blocks_in(module: nn.Module) -> list[SolverBlock]:
    # A copy of a block (PEFT's modules_to_save) has its hook and its note.
    return [one for one in module.modules() if isinstance(one, SolverBlock) and _CALLED in vars(one)]


def _thread() -> int:
    # A compiled graph is traced in one.
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


def _begins(module: nn.Module, args: Any) -> None:
    for block in _blocks_in(module):
        vars(block)[_CALLED].pop(_thread(), None)


def _calls(block: nn.Module, args: Any, output: Any) -> None:
    vars(block)[_CALLED][_thread()] = True


def _ends(name: str, module: nn.Module, args: Any, output: Any) -> None:
    blocks = _blocks_in(module)
    if all(block.computes_its_layer for block in blocks) or any(_thread() in vars(one)[_CALLED] for one in blocks):
        return
    raise SolverPluginsError(
        f"The {type(module).__name__} in the place of the converted layer {name!r} computes with its weight and does "
        "not call it, so its solver would be left out. Adapt other layers, use an adapter that calls its layer (LoRA), "
        f"convert with iters=1, or convert with exclude=[{name!r}]."
    )
