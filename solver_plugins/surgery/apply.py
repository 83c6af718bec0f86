"""The only place where blocks are made and unmade: a conversion is applied to a model, read off it, and taken back."""

import math
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

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
from solver_plugins.errors import SolverPluginsWarning, some, warn
from solver_plugins.prox import Prior, prox_for
from solver_plugins.prox.prior import in_float64
from solver_plugins.registry import SOLVERS
from solver_plugins.surgery.conversion import BlockRecord, Conversion, Role, record_block
from solver_plugins.surgery.errors import ConversionError, naming
from solver_plugins.surgery.model_config import enter_into_config, refuse_quantized, remove_from_config
from solver_plugins.surgery.rates import give_back, take_over, taken_over
from solver_plugins.surgery.untouched import left_as_it_was
from solver_plugins.surgery.watch import run_batch
from solver_plugins.wrappers import FSDP2, wrapper_of

_SPEC = "_conversion_spec"
"""Where a block keeps the spec that it was made by."""
_START = "_image_at_conversion"
"""Where a block keeps a trace of the weights that it was made with; NaN where they were trained before."""


def apply_conversion(model: nn.Module, conversion: Conversion, priors: Mapping[str, Prior] | None = None) -> nn.Module:
    """Repeats a conversion on a plain model, in place, and returns the model; weights do not change.

    ``priors`` are those that the conversion has no name for, by the name of the layer. After an error (a missing module
    or prior, a model that is converted or wrapped already) the model is as it was.
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
            made.set_gate(block.gate, None if block.gates is None else torch.tensor(block.gates))
            made.routed = block.routed
            if conversion.spec is not None:
                vars(made)[_SPEC] = conversion.spec
            vars(made)[_START] = math.nan if conversion.trained else _image_of(made)
        for name in conversion.passed_over:
            pass_through(modules[name])
        for name in conversion.routed:
            route(modules[name])
        take_over(modules, conversion.rates)
    except BaseException:
        restore_plain(model)
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
    """Returns how a model was converted, as data that can be stored and applied again.

    Raises a ConversionError if the model is not converted, or if a prior is a user's function without a name.
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
        trained=bool(_trained(blocks)),
        blocks=tuple(_record(name, block, names) for name, block in blocks.items()),
        passed_over=tuple(name for name, module in named if isinstance(module, PassThrough)),
        routed=tuple(name for name, module in named if isinstance(module, RoutedDropout)),
        rates=taken_over(model),
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
        gate=block.gate_kind,
        gates=None if block.gate is None or not bool(block.gate.any()) else tuple(block.gate.tolist()),
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
        return conversion_of(model).short()
    except ConversionError as error:
        # It works, but cannot be saved; loading what is saved all the same must fail, not give a plain network.
        return {"unwritable": str(error)}


def revert_model(model: nn.Module, batch: Any = None) -> nn.Module:
    """Turns every solver block back into its plain layer, with the current weights.

    The outputs of the plain network differ from those of the trained one. :func:`solver_plugins.merge_model` keeps
    the outputs, where blocks are affine in evaluation.

    Args:
        model: A converted model.
        batch: What the model's forward takes: a tensor, a tuple of positional arguments, or a dict of keyword
            arguments. With it, the warning says how much outputs change.

    Raises:
        ConversionError: If there is no solver block, or the model is sharded.
        RecordError: If the forward pass fails with the batch. The model is as it was then.

    Warns:
        SolverPluginsWarning: If weights were trained with more than one iteration.
    """
    refuse_sharded(model, "revert")
    lost = _trained(blocks_of(model))
    before = evaluated(model, batch) if lost and batch is not None else None
    if not restore_plain(model):
        raise ConversionError(f"Expected a converted model; found {type(model).__name__} without a solver block.")
    if lost:
        _warn_of_change(lost, None if before is None else difference(before, evaluated(model, batch)))
    return model


def refuse_wrapped(model: nn.Module) -> None:
    """Raises ConversionError for a model in which a solver would never run, or that has one already."""
    converted = blocks_of(model)
    for name, module in model.named_modules():
        if name in converted:
            raise ConversionError(f"{name or 'The model'} is converted already; call revert_model(model) first.")
        wrapper = wrapper_of(module)
        if wrapper is not None:
            raise ConversionError(wrapper.refusal("convert", name))
    if any(isinstance(parameter, nn.parameter.UninitializedParameter) for parameter in model.parameters()):
        raise ConversionError("Expected initialised weights; found lazy layers. Run one forward pass first.")


def refuse_sharded(model: nn.Module, verb: str) -> None:
    """Raises ConversionError for a model sharded by FSDP2.

    Its layers have a class that fully_shard made; taking a shell off would take that, too.
    """
    if any(wrapper_of(module) is FSDP2 for module in model.modules()):
        raise ConversionError(
            "Expected a model that is not sharded; found modules of fully_shard. Save its full state dict, load it "
            f"into the converted model before sharding, and {verb} that."
        )


def restore_plain(model: nn.Module, chosen: Container[SolverBlock] | None = None) -> bool:
    """Makes every module plain again, or those of chosen blocks; returns whether there was a solver."""
    for module in model.modules():
        if chosen is None or module in chosen:
            vars(module).pop(_SPEC, None)
            vars(module).pop(_START, None)
    found = restore(model) if chosen is None else restore(model, chosen)
    if not any(block.solver.samples != "nothing" for block in blocks_of(model).values()):
        give_back(model)
    if found and not blocks_of(model):
        remove_from_config(model)
    return found


def _image_of(block: SolverBlock) -> float | None:
    """Returns the norm of ``W r`` for a fixed vector ``r``; None where the weight has no values here."""
    kernel = block._kernel_at_rest().detach()
    if not block._in_reach(kernel):
        return None
    matrix = kernel.flatten(1)
    probe = torch.arange(matrix.shape[1], device=matrix.device, dtype=torch.float32).cos().to(matrix.dtype)
    return float((matrix @ probe).float().norm())


def _trained(blocks: Mapping[str, SolverBlock]) -> list[str]:
    """Returns the names of the blocks whose weights were trained with a solver that is not the plain layer."""
    return [name for name, block in blocks.items() if _has_moved(block) and not block.computes_its_layer]


def _has_moved(block: SolverBlock) -> bool:
    """Whether the weights are others than at the conversion, by more than a cast to a lower precision makes them."""
    before, now = vars(block).get(_START), _image_of(block)
    rounding = max(1e-5, 0.5 * torch.finfo(block._kernel_at_rest().dtype).eps)
    return before is not None and now is not None and not abs(now - before) <= rounding * abs(before)


def _warn_of_change(names: list[str], change: str | None) -> None:
    measured = f"; on this batch {change}" if change else ""
    warn(
        f"The outputs of the reverted network differ from those of the trained one: {some(names)} were trained with a "
        f"solver of more than one iteration{measured}. merge_model(model) keeps the outputs where blocks are affine "
        "in evaluation; otherwise keep the converted model, or continue to train the plain one.",
        SolverPluginsWarning,
    )


def evaluated(model: nn.Module, batch: Any) -> list[Tensor]:
    """Returns the floating-point outputs of a model in evaluation mode, and leaves the model alone."""
    with left_as_it_was(model):
        found = run_batch(model.eval(), batch)
    return [one for one in tree_flatten(found)[0] if isinstance(one, Tensor) and one.is_floating_point()]


def difference(before: list[Tensor], after: list[Tensor]) -> str:
    """Says how far two outputs of a model lie apart."""
    size = math.sqrt(sum(float(in_float64(one).square().sum()) for one in before))
    moved = math.sqrt(sum(float(in_float64(b - a).square().sum()) for a, b in zip(before, after, strict=True)))
    text = f"its outputs change by {moved / size if size else math.inf:.2g} of their norm"
    if before and before[0].dim() == 2 and before[0].shape[1] > 1:
        changed = int((before[0].argmax(1) != after[0].argmax(1)).sum())
        text += f", the largest one in {changed} of {len(before[0])} examples"
    return text
