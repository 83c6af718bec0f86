"""The only place where blocks are made and unmade: a conversion is applied to a model, read off it, and taken back."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from solver_plugins.blocks import (
    PassThrough,
    RoutedDropout,
    SolverBlock,
    blocks_of,
    guard,
    install_block,
    link_between,
    pass_through,
    restore,
    route,
)
from solver_plugins.prox import Prior, prox_for
from solver_plugins.registry import SOLVERS
from solver_plugins.surgery.conversion import BlockRecord, Conversion, Role, record_block
from solver_plugins.surgery.errors import ConversionError, naming
from solver_plugins.surgery.model_config import enter_into_config, refuse_quantized, remove_from_config
from solver_plugins.surgery.refusals import refuse_wrapped
from solver_plugins.wrappers import FSDP2, wrapper_of

_SPEC = "_conversion_spec"
"""Where a block keeps the spec that it was made by."""


def apply_conversion(model: nn.Module, conversion: Conversion, priors: Mapping[str, Prior] | None = None) -> nn.Module:
    """Converts a plain model as a conversion says; its weights are its own.

    Args:
        model: The model; it is converted in place.
        conversion: What to do.
        priors: The priors that the conversion has no name for, by the name of the layer.

    Returns:
        The model.

    Raises:
        ConversionError: If the model lacks a module that the conversion names, or is converted or wrapped already, or a
            prior is missing. The model is as it was then, as after every other error.
    """
    refuse_wrapped(model)
    refuse_quantized(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    missing = sorted(name for name in conversion.names if name not in modules)
    if missing:
        found = f"{type(model).__name__} has no {', '.join(missing[:5])}"
        raise ConversionError(f"Expected a model with the modules of the conversion; {found}.")
    try:
        for block in conversion.blocks:
            with naming(block.layer):
                made = _install(block, modules, (priors or {}).get(block.layer))
            rows = (block.gain, block.shift)
            made.set_scale(*(None if row is None else torch.tensor(row, dtype=torch.float64) for row in rows))
            made.set_blend(block.blend)
            made.routed = block.routed
            if conversion.spec is not None:
                vars(made)[_SPEC] = conversion.spec
        for name in conversion.passed_over:
            pass_through(modules[name])
        for name in conversion.routed:
            route(modules[name])
    except BaseException:
        _restore(model)
        raise
    guard(model)
    note_conversion(model)
    return model


def _install(block: BlockRecord, modules: dict[str, nn.Module], prior: Prior | None) -> SolverBlock:
    """Puts a solver into a layer, and an outlet where its argument is complete: its norm, or its activation."""
    if block.partner is not None:
        prior = prox_for(modules[block.partner])
    elif block.prior is not None:
        prior = block.make_prior()
    if prior is None:
        raise ConversionError(f"{block.layer}: its prior has no registered name and is not among the priors= given.")
    solver = SOLVERS.get(block.solver).from_options(**block.settings)
    link = None
    if block.role != "layer":
        assert block.scope is not None
        link = link_between(modules, block.layer, block.outlet, block.role, block.norm, block.scope)
    return install_block(modules[block.layer], prior, solver, link)


def conversion_of(model: nn.Module) -> Conversion:
    """Writes down what was done to a converted model.

    Raises:
        ConversionError: If it is not converted, or a prior is a function of the user's, which has no name.
    """
    blocks = blocks_of(model)
    if not blocks:
        raise ConversionError(f"Expected a converted model; found {type(model).__name__} without a solver block.")
    named = list(model.named_modules())
    names = {id(module): name for name, module in named}
    specs = [vars(block).get(_SPEC) for block in blocks.values()]
    return Conversion(
        # Parts of a model may have been converted one by one.
        spec=specs[0] if all(spec == specs[0] for spec in specs) else None,
        blocks=tuple(_record(name, block, names) for name, block in blocks.items()),
        passed_over=tuple(name for name, module in named if isinstance(module, PassThrough)),
        routed=tuple(name for name, module in named if isinstance(module, RoutedDropout)),
    )


def _record(name: str, block: SolverBlock, names: dict[int, str]) -> BlockRecord:
    prior, link, outlet, norm, scope = block.prior, block.link, name, None, None
    role: Role = "layer"
    if link is not None:
        role, outlet, scope = link.role, names[id(link.outlet.module)], names[id(link.scope)]
        norm = None if link.norm is None else names[id(link.norm.module)]
    written = record_block(
        name,
        outlet,
        role,
        block.solver,
        prior,
        partner=names.get(id(getattr(prior, "module", None))),
        norm=norm,
        scope=scope,
        routed=block.routed,
        blend=1.0 if block.blend is None else float(block.blend),
        gain=None if block.channel_gain is None else tuple(block.channel_gain.tolist()),
        shift=None if block.channel_shift is None else tuple(block.channel_shift.tolist()),
    )
    if written.prior is None:
        raise ConversionError(f"{name}: the prior {prior!r} has no registered name, so it cannot be written down.")
    return written


def note_conversion(model: nn.Module) -> None:
    """Lets the config of a transformers model write down its conversion."""
    enter_into_config(model, _written)


def _written(model: nn.Module) -> dict[str, Any]:
    try:
        return conversion_of(model).options()
    except ConversionError as error:
        # It works, but cannot be saved; loading what is saved all the same must fail, not give a plain network.
        return {"unwritable": str(error)}


def revert_model(model: nn.Module) -> nn.Module:
    """Turns every solver block of a model into its plain layer again, with the weights as they are now.

    Raises:
        ConversionError: If there is none, or the model is sharded.
    """
    if any(wrapper_of(module) is FSDP2 for module in model.modules()):
        # Its layers have a class that fully_shard made; taking a shell off would take that, too.
        raise ConversionError(
            "Expected a model that is not sharded; found modules of fully_shard. Save its full state dict, load it "
            "into the converted model before sharding, and revert that."
        )
    if not _restore(model):
        raise ConversionError(f"Expected a converted model; found {type(model).__name__} without a solver block.")
    remove_from_config(model)
    return model


def _restore(model: nn.Module) -> bool:
    """Makes every module plain again; returns whether there was a solver."""
    for module in model.modules():
        vars(module).pop(_SPEC, None)
    return restore(model)
