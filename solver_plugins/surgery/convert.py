"""From a model to a converted one, and back."""

import copy
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from solver_plugins.blocks import (
    ChainBlock,
    LayerBlock,
    PassThrough,
    RoutedDropout,
    SolverBlock,
    TrackedStep,
    install_block,
    install_chain,
    install_pass_through,
    install_route,
    partner_of,
    remove_block,
    remove_chain,
    scope_of,
    take_off,
)
from solver_plugins.blocks.chain import Role
from solver_plugins.blocks.layer import check_blend
from solver_plugins.config import unknown_option
from solver_plugins.errors import OptionError
from solver_plugins.prox import prox_for
from solver_plugins.registry import SOLVERS
from solver_plugins.solve import RateConfig, Solver
from solver_plugins.surgery.errors import ConversionError, naming
from solver_plugins.surgery.match import match
from solver_plugins.surgery.model_config import refuse_quantized, remove_from_config
from solver_plugins.surgery.parts import Block, DropoutPart
from solver_plugins.surgery.record import record
from solver_plugins.surgery.select import Chosen, NonProx, Selection, select
from solver_plugins.surgery.targets import Targets

_WRAPPERS = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "unwrap it (model.module), convert, wrap again",
    "torch.nn.parallel.data_parallel.DataParallel": "unwrap it (model.module), convert, wrap again",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "convert first, then shard",
    "torch.distributed.fsdp.FSDPModule": "convert first, then shard",
    "torch._dynamo.eval_frame.OptimizedModule": "convert the original (model._orig_mod), then compile",
}


@dataclass(frozen=True)
class Plan:
    """What a conversion will do.

    Attributes:
        solver: The solver's registered name.
        options: Its options, without the rate ``p``, which each block has of its own.
        selection: Which blocks are converted, and why the others are not.
        blocks: All blocks of the model.
        blend: How much of the solver there is in each block.
    """

    solver: str
    options: dict[str, Any]
    selection: Selection
    blocks: tuple[Block, ...]
    blend: float = 1.0

    def solver_for(self, one: Chosen) -> Solver:
        """Returns the solver of one block, with that block's rate."""
        made: type[Solver] = SOLVERS.get(self.solver)
        rate = {"p": one.p} if one.p is not None and issubclass(made.Config, RateConfig) else {}
        return made.from_options(**self.options, **rate)


def convert_model(
    model: nn.Module,
    solver: str = "proxsg",
    iters: int = 10,
    *,
    targets: Targets | None = None,
    exclude: Targets | None = None,
    pattern: str | Iterable[str] | None = None,
    p: float | None = None,
    nonprox: NonProx = "keep",
    last: bool | None = None,
    blend: float = 1.0,
    example_inputs: Any = None,
    inplace: bool = True,
    **options: Any,
) -> nn.Module:
    """Turns matched layers of a model into solver blocks.

    Layers keep their place, name, Parameters and class; see :func:`inspect_model` for a dry run.

    Args:
        model: Any model whose forward pass can be recorded; timm's and transformers' need no example inputs.
        solver: A registered name (see :func:`solver_plugins.list_solvers`).
        iters: How many proximal steps each block takes.
        targets: Layers to convert: a list of names or their ends, one regular expression for the whole name, or a
            function of name and module. One that converts nothing is an error.
        exclude: Layers to leave alone, in the same forms.
        pattern: None for the solver's default patterns, "strict" for the paper's block alone, "all", or a list.
        p: A rate for a sampling solver: layers without a dropout are converted, too, and all use this rate.
        nonprox: What to do with an activation that is no proximal map: "keep" it behind a block with ``g = 0``, or
            "skip" the block.
        last: True also converts the classifier, False never does; None leaves it to the patterns.
        blend: ``a`` in ``(1 - a) v_1 + a v_K``: 0 is the original network, 1 the solver. A pretrained network starts
            finetuning close to where it was with a small one, or after :func:`solver_plugins.calibrate`; see
            :func:`solver_plugins.set_blend` for a schedule.
        example_inputs: A tensor, tuple or mapping for the recorded forward pass.
        inplace: False converts a copy.
        **options: Options of the solver; an unknown one raises.

    Returns:
        The converted model: the same object, unless ``inplace=False``.

    Raises:
        ConversionError: If nothing can be converted, with the reason for every near miss, or the model is wrapped or
            converted already. The model is as it was then, as after every other error.
        OptionError: For unknown options.
        TargetError: If a target converts nothing.
        RecordError: If the forward pass cannot be recorded.
        WeightError: If weights are NaN or infinite, with the name of their layer.
    """
    if not isinstance(inplace, bool):
        raise OptionError(f"Expected inplace to be True or False; found {inplace!r}.")
    plan = plan_conversion(
        model, solver, iters, targets=targets, exclude=exclude, pattern=pattern, p=p, nonprox=nonprox, last=last,
        blend=blend, example_inputs=example_inputs, **options,
    )  # fmt: skip
    if not plan.selection.chosen:
        raise ConversionError(
            f"No layer of this {type(model).__name__} is converted by {solver!r}:"
            f"{plan.selection.explain() or _without_layers(model)}"
        )
    if not inplace:
        model = copy.deepcopy(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    try:
        passed_over, routed = _taken_over(plan)
        for one in plan.selection.chosen:
            with naming(one.block.name):
                layer = _install(one.block, modules, plan.solver_for(one))
            layer.routed = one.block.name in routed
            layer.set_blend(blend)
        for name in passed_over:
            install_pass_through(modules[name])
        for name in routed.values():
            install_route(modules[name])
    except BaseException:
        restore(model)
        raise
    from solver_plugins.surgery.conversion import note_conversion  # That module imports this one.

    note_conversion(model)
    return model


def _without_layers(model: nn.Module) -> str:
    """Says why a model has no linear layer to speak of."""
    for name, module in model.named_modules():
        found = f"{name or 'the model'} is a {type(module).__name__}"
        if isinstance(module, torch.jit.ScriptModule):
            return f" {found}, whose inside is not seen. Convert the model before torch.jit.script or trace."
        if ".quantized" in type(module).__module__:
            return f" {found}, whose weights are quantised. Convert the model before it is quantised."
    return " its forward pass met no linear layer or convolution."


def revert_model(model: nn.Module) -> nn.Module:
    """Turns every solver block of a model into its plain layer again, with the weights as they are now.

    Raises:
        ConversionError: If there is none, or the model is sharded.
    """
    if any(is_sharded(module) for module in model.modules()):
        # Its layers have a class that fully_shard made; taking a shell off would take that, too.
        raise ConversionError(
            "Expected a model that is not sharded; found modules of fully_shard. Save its full state dict, load it "
            "into the converted model before sharding, and revert that."
        )
    if not restore(model):
        raise ConversionError(f"Expected a converted model; found {type(model).__name__} without a solver block.")
    remove_from_config(model)
    return model


def plan_conversion(
    model: nn.Module,
    solver: str = "proxsg",
    iters: int = 10,
    *,
    targets: Targets | None = None,
    exclude: Targets | None = None,
    pattern: str | Iterable[str] | None = None,
    p: float | None = None,
    nonprox: NonProx = "keep",
    last: bool | None = None,
    blend: float = 1.0,
    example_inputs: Any = None,
    **options: Any,
) -> Plan:
    """Walks a model and decides what :func:`convert_model` would do; arguments and errors are the same."""
    refuse_wrapped(model)
    refuse_quantized(model)
    made: type[Solver] = SOLVERS.get(solver)
    # Wrong options are told before a large model is walked.
    _refuse_unknown(made, options)
    made.from_options(iters=iters, **options)
    check_blend(blend)
    if last is not None and not isinstance(last, bool):
        raise OptionError(f"Expected last to be True, False or None; found {last!r}.")
    blocks = match(record(model, example_inputs), model)
    selection = select(blocks, made, pattern, p, nonprox, last, targets, exclude, model=model)
    return Plan(solver, {"iters": iters, **options}, _within_reach(selection, made.samples), tuple(blocks), blend)


def _refuse_unknown(made: type[Solver], options: dict[str, Any]) -> None:
    """Raises OptionError for an option that the solver does not have: an argument of convert_model may be meant."""
    unknown = [name for name in options if name not in made.Config.model_fields]
    if unknown:
        parameters = inspect.signature(convert_model).parameters.values()
        near = {one.name for one in parameters if one.kind is one.KEYWORD_ONLY}.difference(unknown)
        owner = f"solver {made.name!r}"
        raise OptionError("\n".join(unknown_option(owner, name, [made.Config], near) for name in unknown))


def _replaced(one: Chosen, samples: str) -> DropoutPart | None:
    """Returns the dropout whose work the block's solver does: before the layer or, for coordinates, behind it."""
    part = one.block.dropout
    return part if part is not None and samples != "nothing" and part.after == (samples == "outputs") else None


def _within_reach(selection: Selection, samples: str) -> Selection:
    """Leaves out blocks that meet their shared dropout only through a view, while other layers still need it."""
    rejected, chosen = dict(selection.rejected), list(selection.chosen)
    while True:
        short = [one for one, part in _still_needed(chosen, samples) if not part.direct]
        if not short:
            return Selection(tuple(chosen), rejected)
        for one in short:
            part = _replaced(one, samples)
            assert part is not None
            rejected[one.block.name] = (
                f"its dropout {part.name!r} also serves a layer that is not converted, and shape operations stand "
                "between it and this layer; convert the other one too"
            )
            chosen.remove(one)


def _still_needed(chosen: list[Chosen], samples: str) -> list[tuple[Chosen, DropoutPart]]:
    """Returns the blocks whose dropout also serves layers that are not converted."""
    parts = [(one, part) for one in chosen if (part := _replaced(one, samples)) is not None]
    calls: dict[int, set[int]] = {}
    for _, part in parts:
        calls.setdefault(id(part.module), set()).update(part.calls)
    return [(one, part) for one, part in parts if len(calls[id(part.module)]) < part.sites]


def _taken_over(plan: Plan) -> tuple[list[str], dict[str, str]]:
    """Returns the names of the dropouts that chosen blocks replace, and for each block that shares one its dropout."""
    chosen, samples = list(plan.selection.chosen), SOLVERS.get(plan.solver).samples
    routed = {one.block.name: part.name for one, part in _still_needed(chosen, samples) if part.name is not None}
    parts = [_replaced(one, samples) for one in chosen]
    names = dict.fromkeys(part.name for part in parts if part is not None and part.name is not None)
    return [name for name in names if name not in routed.values()], routed


def _install(block: Block, modules: dict[str, nn.Module], solver: Solver) -> LayerBlock:
    """Puts a solver into a layer, and an outlet where its argument is complete: its norm, or its activation."""
    prior = block.prior
    assert prior is not None
    if prior.learnable and block.activation is not None and block.activation.name is not None:
        # The prior reads a module (PReLU): the one of this model, which may be a copy of the one that was walked.
        prior = prox_for(modules[block.activation.name])
    if block.host == "linear":
        return install_block(modules[block.name], prior, solver)
    norm = None if block.norm is None else partner_of(block.norm.name, modules)
    role: Role = "activation"
    if block.host == "norm":
        role = "norm-activation" if block.norm is not None and block.norm.holds_activation else "norm"
    layer, outlet = modules[block.name], partner_of(block.host_name, modules)
    shared = block.activation is not None and block.activation.ownership == "shared" and role == "activation"
    scope = scope_of((block.name, block.host_name), modules)
    return install_chain(layer, outlet, role, norm if role == "activation" else None, prior, solver, shared, scope)


def restore(model: nn.Module) -> bool:
    """Makes every module plain again; returns whether there was a solver."""
    found = False
    for module in list(model.modules()):
        if isinstance(module, SolverBlock):
            remove_block(module)
            found = True
        elif isinstance(module, ChainBlock):
            remove_chain(module)
            found = True
        elif isinstance(module, (PassThrough, RoutedDropout)):
            take_off(module)
    return found


def refuse_wrapped(model: nn.Module) -> None:
    """Raises ConversionError for a model in which a solver would never run, or that has one."""
    if not isinstance(model, nn.Module):
        raise OptionError(f"Expected a torch.nn.Module; found {type(model).__name__}.")
    for name, module in model.named_modules():
        _refuse_wrapper(name, module)
        if isinstance(module, TrackedStep):
            raise ConversionError(f"{name or 'The model'} is converted already; call revert_model(model) first.")
        if hasattr(module, "_hf_hook"):
            raise ConversionError(
                f"{name or 'The model'} carries an accelerate hook, which would hide a solver: convert before "
                "dispatching the model, or remove the hooks with accelerate.hooks.remove_hook_from_module(model, "
                "recurse=True)."
            )
    if any(isinstance(parameter, torch.nn.parameter.UninitializedParameter) for parameter in model.parameters()):
        raise ConversionError("Expected initialised weights; found lazy layers. Run one forward pass first.")


def _refuse_wrapper(name: str, module: nn.Module) -> None:
    """Raises ConversionError for a module that wraps another one, or hides its own forward."""
    found = f"found {type(module).__name__}" + (f" at {name!r}" if name else "")
    for base in type(module).__mro__:
        remedy = _WRAPPERS.get(f"{base.__module__}.{base.__qualname__}")
        if remedy is not None:
            raise ConversionError(f"Expected a plain model; {found}: {remedy}.")
    if getattr(module, "_compiled_call_impl", None) is not None:
        raise ConversionError(f"Expected a plain model; {found} after .compile(): convert first, then compile.")


def is_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` (FSDP2) has given a module its class."""
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)
