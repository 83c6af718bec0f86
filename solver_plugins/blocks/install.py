"""Blocks in a model: which there are, how they are put in and taken out, and whether all are still there."""

import functools
import threading
from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import nn

from solver_plugins.blocks.block import SolverBlock, become_block, become_layer
from solver_plugins.blocks.dropout import TAKEN, PassThrough, RoutedDropout, check_rates
from solver_plugins.blocks.fold import check_foldable
from solver_plugins.blocks.link import Link, Place, Role, Scope, open_scope
from solver_plugins.blocks.outlet import Outlet, close, open_ends
from solver_plugins.blocks.shell import hides_forward, take_off
from solver_plugins.errors import OptionError, SolverPluginsError, UnsupportedLayerError
from solver_plugins.solve import Activation, Solver


def blocks_of(model: nn.Module) -> dict[str, SolverBlock]:
    """Returns the solver blocks of a model by name ("" for a block itself)."""
    if not isinstance(model, nn.Module):
        raise OptionError(f"Expected a torch.nn.Module; found {type(model).__name__}.")
    return {name: module for name, module in model.named_modules() if isinstance(module, SolverBlock)}


def require_blocks(model: nn.Module) -> dict[str, SolverBlock]:
    """Returns the solver blocks of a model; OptionError if there is none."""
    blocks = blocks_of(model)
    if not blocks:
        raise OptionError(
            f"Expected a converted model or a solver block; found {type(model).__name__} without a solver block."
        )
    return blocks


def link_between(
    modules: dict[str, nn.Module], layer: str, outlet: str, role: Role, norm: str | None, scope: str
) -> Link:
    """Returns the link from a layer to the module in which its solver will run, all by their names in a model."""
    norms = [norm] if role == "activation" else [outlet]
    for name in norms:
        check_foldable(None if name is None else modules[name])
    for name in (outlet, norm, scope):
        if name is not None and (isinstance(modules[name], SolverBlock) or hides_forward(modules[name])):
            raise UnsupportedLayerError(
                f"{name or 'The model'} is a solver or has a forward of its own on the instance already, so that the "
                f"solver of {layer!r} cannot run behind it."
            )
    between = _place(norm, modules) if norm is not None and role == "activation" else None
    path = scope.split(".") if scope else []
    scopes = tuple(modules[".".join(path[:depth])] for depth in range(len(path) + 1))
    return Link(layer, role, _place(layer, modules), _place(outlet, modules), between, scopes)


def _place(name: str, modules: dict[str, nn.Module]) -> Place:
    parent, _, child = name.rpartition(".")
    return Place(modules[parent], child)


def install_block(layer: nn.Module, activation: Activation, solver: Solver, link: Link | None = None) -> SolverBlock:
    """Turns a layer into a block where it stands, and opens the way to where its solver runs.

    After an error the layer is as it was; :func:`restore` closes its way.
    """
    if link is not None:
        open_ends(link)
        open_scope(link)
    return become_block(layer, activation, solver, link)


def restore(model: nn.Module, chosen: Container[SolverBlock] | None = None) -> bool:
    """Makes every module of a model plain again; returns whether there was a solver.

    With ``chosen`` only these blocks become layers, with what serves them alone; dropouts stay replaced as long as
    another block samples.
    """
    blocks = [block for block in model.modules() if isinstance(block, SolverBlock)]
    left = [block for block in blocks if chosen is not None and block not in chosen]
    needed = {id(block.link) for block in left if block.link is not None}
    sampling, guarded = any(block.solver.samples != "nothing" for block in left), []
    for module in list(model.modules()):
        if isinstance(module, SolverBlock):
            if module not in left:
                become_layer(module)
        elif isinstance(module, Outlet):
            module.links = tuple(link for link in module.links if id(link) in needed)
            if not module.links:
                close(module)
        elif isinstance(module, (PassThrough, RoutedDropout)) and not sampling:
            take_off(module)
        # A module may be a scope and carry the guard of the whole model.
        if isinstance(module, Scope):
            module.links = tuple(link for link in module.links if id(link) in needed)
            if not module.links:
                del module.links
                take_off(module)
        unwatch(module)
        for key in [key for key, hook in module._forward_pre_hooks.items() if isinstance(hook, Guard)]:
            del module._forward_pre_hooks[key]
            guarded.append(module)
    for module in guarded:
        if blocks_of(module):
            guard(module)
    return bool(blocks)


class Guard:
    """A hook before a converted model: raises where a converted layer is no longer a part of it, or drops twice.

    ``timm.utils.reparameterize_model`` fuses layers with their norms, and other tools replace modules that hold
    converted layers. Without its solvers the network would compute something else.
    """

    def __init__(self, model: nn.Module) -> None:
        self.blocks = blocks_of(model)
        modules = dict(model.named_modules())
        self.places = {name: _place(name, modules) for name in self.blocks}
        self.seen = _steps_to(model, self.blocks.values())
        self.rated = [(name, module) for name, module in modules.items() if TAKEN in vars(module)]
        self.model = model

    def __call__(self, model: nn.Module, args: Any) -> None:
        """Looks whether every layer stands where it stood, and for those that do not, whether that is all right."""
        for name, module in self.rated:
            check_rates(name, module)
        # The compiler follows this loop, and guards its code by what the loop has read.
        for parent, key, child in self.seen:
            if parent._modules.get(key) is not child:
                self.look()
                return

    @torch.compiler.assume_constant_result
    def look(self) -> bool:
        """Raises for a layer that is gone and whose solver ran behind a sum or norm; others may be replaced."""
        present = {id(module) for module in self.model.modules()}
        replaced = [name for name, block in self.blocks.items() if id(block) not in present]
        for name in replaced:
            if self.blocks[name].link is not None or id(self.places[name].parent) not in present:
                raise SolverPluginsError(
                    f"The converted layer {name!r} is no longer a part of this {type(self.model).__name__}: it was "
                    "replaced or fused after the conversion (timm.utils.reparameterize_model?), and without its solver "
                    "the outputs would change. Call revert_model(model) before such a change."
                )
        for name, place in self.places.items():
            there = place.module
            if there is self.blocks.get(name):
                unwatch(there)
            elif name and any(module is self.blocks.get(name) for module in there.modules()):
                watch(name, there)
        # A compiler's guards are made from what there was before.
        if not torch.compiler.is_compiling():
            self.blocks = {name: block for name, block in self.blocks.items() if name not in replaced}
            self.seen = _steps_to(self.model, self.blocks.values())
        return True


def _steps_to(model: nn.Module, blocks: Iterable[nn.Module]) -> list[tuple[nn.Module, str, nn.Module]]:
    """Returns all steps from a model to its blocks, each from a module to a child."""
    wanted = {id(block) for block in blocks}
    steps: list[tuple[nn.Module, str, nn.Module]] = []

    def walk(module: nn.Module, seen: set[int]) -> bool:
        leads = id(module) in wanted
        if id(module) in seen:
            return leads
        seen.add(id(module))
        for key, child in module._modules.items():
            if child is not None and walk(child, seen):
                steps.append((module, key, child))
                leads = True
        return leads

    walk(model, set())
    return steps


def guard(model: nn.Module) -> None:
    """Has a converted model look after its layers; see :class:`Guard`."""
    model.register_forward_pre_hook(Guard(model))


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
