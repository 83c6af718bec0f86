"""What a conversion did, written down: enough to do it again on the plain model without walking it."""

import dataclasses
import math
from typing import Any, Literal

import pydantic
import torch
from torch import nn

from solver_plugins.blocks import (
    PassThrough,
    RoutedDropout,
    SolverBlock,
    guard,
    install_block,
    link_between,
    pass_through,
    restore,
    route,
)
from solver_plugins.config import StrictConfig
from solver_plugins.prox import PRIORS, make_prior, prox_for
from solver_plugins.registry import SOLVERS
from solver_plugins.surgery.convert import refuse_wrapped, scope_of
from solver_plugins.surgery.errors import ConversionError
from solver_plugins.surgery.model_config import enter_into_config, refuse_quantized


class BlockRecord(StrictConfig):
    """One converted block."""

    layer: str = pydantic.Field(description="Name of the linear layer.")
    host: str = pydantic.Field(description="Name of the module that is the solver: the layer, its norm or activation.")
    role: Literal["layer", "norm", "norm-activation", "activation"] = pydantic.Field(description="What the host is.")
    norm: str | None = pydantic.Field(None, description="Name of the folded norm, where it is not the host.")
    solver: str = pydantic.Field(description="Registered name of the solver.")
    settings: dict[str, Any] = pydantic.Field(description="The solver's options, all of them.")
    prior: str = pydantic.Field(description="Registered name of the prior.")
    parameters: dict[str, int | float | Literal["inf", "-inf"]] = pydantic.Field(
        default_factory=dict, description="The prior's parameters; JSON has no infinite numbers, so these are words."
    )
    partner: str | None = pydantic.Field(None, description="Name of the activation module whose parameters it reads.")
    routed: bool = pydantic.Field(False, description="Whether it undoes a dropout that serves others, too.")
    blend: float = pydantic.Field(1.0, ge=0, le=1, description="How much of the solver there is.")
    gain: tuple[float, ...] | None = pydantic.Field(None, description="Calibrated factors, one per output feature.")
    shift: tuple[float, ...] | None = pydantic.Field(None, description="What is added to them, one per output feature.")


class Conversion(StrictConfig):
    """A whole conversion; ``to_json`` and ``from_json`` write and read it."""

    format: Literal[1] = pydantic.Field(1, description="Version of this form.")
    blocks: tuple[BlockRecord, ...] = pydantic.Field(description="The converted blocks.")
    passed_over: tuple[str, ...] = pydantic.Field((), description="Names of the dropouts that solvers replace.")
    routed: tuple[str, ...] = pydantic.Field((), description="Names of the dropouts that solvers share with layers.")


def conversion_of(model: nn.Module) -> Conversion:
    """Writes down what was done to a converted model.

    Raises:
        ConversionError: If it is not converted, or a prior is a function of the user's, which has no name.
    """
    names = {id(module): name for name, module in model.named_modules()}
    blocks, passed_over, routed = [], [], []
    for name, module in model.named_modules():
        if isinstance(module, SolverBlock):
            blocks.append(_record(name, module, names))
        elif isinstance(module, PassThrough):
            passed_over.append(name)
        elif isinstance(module, RoutedDropout):
            routed.append(name)
    if not blocks:
        raise ConversionError(f"Expected a converted model; found {type(model).__name__} without a solver block.")
    return Conversion(blocks=tuple(blocks), passed_over=tuple(passed_over), routed=tuple(routed))


def apply_conversion(model: nn.Module, conversion: Conversion) -> nn.Module:
    """Converts a plain model as another one was converted; its weights are its own.

    Raises:
        ConversionError: If the model lacks a module that the conversion names, or is converted or wrapped already.
            The model is as it was then, as after every other error.
    """
    refuse_wrapped(model)
    refuse_quantized(model)
    modules = dict(model.named_modules())
    needed = [name for block in conversion.blocks for name in (block.layer, block.host, block.norm, block.partner)]
    needed += [*conversion.passed_over, *conversion.routed]
    missing = sorted({name for name in needed if name is not None and name not in modules})
    if missing:
        found = ", ".join(missing[:5])
        raise ConversionError(
            f"Expected a model with the modules of the conversion; {type(model).__name__} has no {found}."
        )
    try:
        for block in conversion.blocks:
            solver = SOLVERS.get(block.solver).from_options(**block.settings)
            if block.partner is None:
                # Words for infinite bounds.
                given = {key: float(one) if isinstance(one, str) else one for key, one in block.parameters.items()}
                prior = make_prior(block.prior, **given)
            else:
                prior = prox_for(modules[block.partner])
            link = None
            if block.role != "layer":
                scope = scope_of(model, block.layer, block.host)
                link = link_between(modules, block.layer, block.host, block.role, block.norm, scope)
            made = install_block(modules[block.layer], prior, solver, link)
            made.routed = block.routed
        settle_conversion(model, conversion)
        for name in conversion.passed_over:
            pass_through(modules[name])
        for name in conversion.routed:
            route(modules[name])
    except BaseException:
        restore(model)
        raise
    guard(model)
    note_conversion(model)
    return model


def note_conversion(model: nn.Module) -> None:
    """Lets the config of a transformers model write down its conversion."""
    enter_into_config(model, _written)


def _written(model: nn.Module) -> dict[str, Any]:
    try:
        return conversion_of(model).options()
    except ConversionError as error:
        # It works, but cannot be saved; loading what is saved all the same must fail, not give a plain network.
        return {"unwritable": str(error)}


def settle_conversion(model: nn.Module, conversion: Conversion) -> None:
    """Writes what a conversion keeps outside of the weights, gains and blends, into a converted model.

    For a model that was converted on the meta device, whose buffers have no values, call it again after loading.
    """
    modules = dict(model.named_modules())
    for block in conversion.blocks:
        made = modules[block.layer]
        assert isinstance(made, SolverBlock)
        gain, shift = (
            None if row is None else torch.tensor(row, dtype=torch.float64) for row in (block.gain, block.shift)
        )
        made.set_scale(gain, shift)
        made.set_blend(block.blend)


def _record(name: str, block: SolverBlock, names: dict[int, str]) -> BlockRecord:
    solver, prior, host = block.solver, block.prior, name
    role: Literal["layer", "norm", "norm-activation", "activation"] = "layer"
    norm = None
    if block.link is not None:
        role, host = block.link.role, names[id(block.link.outlet.module)]
        norm = None if block.link.norm is None else names[id(block.link.norm.module)]
    partner = names.get(id(getattr(prior, "module", None)))
    parameters: dict[str, Any] = {}
    if partner is None:
        if prior.name not in PRIORS or prior.learnable:
            raise ConversionError(f"{host}: the prior {prior!r} has no registered name, so it cannot be written down.")
        fields: tuple[dataclasses.Field[Any], ...] = (
            dataclasses.fields(prior) if dataclasses.is_dataclass(prior) else ()
        )
        parameters = {field.name: getattr(prior, field.name) for field in fields}
        wrong = [key for key, value in parameters.items() if not isinstance(value, (int, float))]
        if wrong:
            raise ConversionError(f"{host}: {', '.join(wrong)} of the prior {prior.name!r} cannot be written down.")
        for key, value in parameters.items():
            if math.isinf(value):
                parameters[key] = "inf" if value > 0 else "-inf"
    return BlockRecord(
        layer=name,
        host=host,
        role=role,
        norm=norm,
        solver=solver.name,
        settings=solver.config.options(),
        prior=prior.name,
        parameters=parameters,
        partner=partner,
        routed=block.routed,
        blend=1.0 if block.blend is None else float(block.blend),
        gain=None if block.channel_gain is None else tuple(block.channel_gain.tolist()),
        shift=None if block.channel_shift is None else tuple(block.channel_shift.tolist()),
    )
