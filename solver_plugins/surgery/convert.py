"""The front door: one call that converts a model."""

import copy
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import nn

from solver_plugins.blocks import calibrate as calibrate_blocks
from solver_plugins.blocks.calibration import read_batches
from solver_plugins.errors import OptionError, warn
from solver_plugins.surgery.apply import apply_conversion, revert_model
from solver_plugins.surgery.errors import ConversionError, DefaultsWarning
from solver_plugins.surgery.plan import plan_conversion
from solver_plugins.surgery.select import by_default, nothing_by_default
from solver_plugins.surgery.spec import DEFAULTS, ConversionSpec
from solver_plugins.surgery.targets import Targets


def convert_model(
    model: nn.Module,
    solver: str | ConversionSpec = DEFAULTS.solver,
    iters: int = DEFAULTS.iters,
    *,
    targets: Targets | None = DEFAULTS.targets,
    exclude: Targets | None = DEFAULTS.exclude,
    pattern: str | Iterable[str] | None = DEFAULTS.pattern,
    p: float | None = DEFAULTS.p,
    nonprox: Literal["keep", "skip"] = DEFAULTS.nonprox,
    last: bool | None = DEFAULTS.last,
    blend: float = DEFAULTS.blend,
    gate: Literal["channel", "scalar"] | None = DEFAULTS.gate,
    calibrate: Iterable[Any] | None = None,
    example_inputs: Any = None,
    inplace: bool = True,
    **options: Any,
) -> nn.Module:
    """Turns layers of a model into solver blocks, in place.

    Layers keep their place, name, Parameters and class. See :func:`inspect_model` for a dry run.

    Args:
        model: Any model whose forward pass can be recorded; models of timm and transformers need no example inputs.
        solver: A registered name (see :func:`solver_plugins.list_solvers`), or a ready
            :class:`~solver_plugins.surgery.ConversionSpec`, which replaces all other options.
        iters: How many proximal steps each block takes.
        targets: Layers to convert: a list of names or their ends, one regular expression for the whole name, or a
            function of name and module. A target that converts nothing is an error.
        exclude: Layers to leave alone, in the same forms.
        pattern: None for the solver's default patterns, "strict" for only the paper's block, "all", or a list.
        p: A rate for a sampling solver that replaces those of the dropouts; with ``targets`` or ``pattern`` also for
            layers without a dropout.
        nonprox: What to do with an activation that is not a proximal map: "keep" it after a block with ``g = 0``, or
            "skip" the block.
        last: True also converts the classifier, False never does; None leaves it to the patterns.
        blend: ``a`` in ``(1 - a) v_1 + a v_K``: 0 is the original network, 1 the solver. With a small blend, or
            calibrated, a pretrained network starts finetuning close to its own outputs; see
            :func:`solver_plugins.set_blend` for a schedule.
        gate: "channel" or "scalar" gives every block a trained Parameter in [0, 1], one number per output channel or
            one. It starts at zero, so the converted model starts as the original network, to the bit; training opens
            the solvers. See :func:`solver_plugins.param_groups` for its learning rate.
        calibrate: A few batches for :func:`solver_plugins.calibrate`, which gives blocks the scale of their layers. If
            a spec says how many, no more of them are used.
        example_inputs: A tensor, tuple or mapping for the recorded forward pass.
        inplace: False converts a copy.
        **options: Options of the solver, and further fields of the spec; an unknown one raises.

    Returns:
        The converted model: the same object, unless ``inplace=False``.

    Raises:
        ConversionError: If nothing can be converted, with the reason for every near miss, or the model is wrapped or
            converted already. The model is as it was then, as after every other error.
        OptionError: For unknown options.
        TargetError: If a target converts nothing.
        RecordError: If the forward pass cannot be recorded.
        InputError: If there are no batches to calibrate on, or some block never ran on them.
        WeightError: If weights are NaN or infinite, with the name of their layer.
    """
    if not isinstance(inplace, bool):
        raise OptionError(f"Expected inplace to be True or False; found {inplace!r}.")
    given = {
        "iters": iters, "targets": targets, "exclude": exclude, "pattern": pattern, "p": p, "nonprox": nonprox,
        "last": last, "blend": blend, "gate": gate, **options,
    }  # fmt: skip
    spec = ConversionSpec.of(solver, given, near=("calibrate", "example_inputs", "inplace"))
    spec, batches = _with_batches(spec, calibrate)
    plan = plan_conversion(model, spec, example_inputs)
    if not plan.selection.chosen:
        why = plan.selection.explain() if plan.blocks else _without_layers(model)
        if plan.blocks and by_default(spec):
            why = nothing_by_default(plan.blocks, spec, plan.selection.rejected)
        raise ConversionError(f"No layer of this {type(model).__name__} is converted by {spec.solver!r}:{why}")
    made = apply_conversion(model if inplace else copy.deepcopy(model), plan.conversion, plan.priors)
    if batches is not None:
        try:
            calibrate_blocks(made, batches, progress=False)
        except BaseException:
            revert_model(made)
            raise
    if plan.selection.warning is not None:
        warn(plan.selection.warning, DefaultsWarning)
    return made


def _with_batches(spec: ConversionSpec, given: Iterable[Any] | None) -> tuple[ConversionSpec, list[Any] | None]:
    """Returns the batches to calibrate on, and the spec with their number."""
    if given is None:
        if spec.calibrate is not None:
            raise OptionError(
                f"Expected batches, as this conversion is calibrated on {spec.calibrate} of them: pass calibrate="
                "batches to convert_model, or leave calibrate out and call solver_plugins.calibrate(model, batches)."
            )
        return spec, None
    batches = read_batches(given, spec.calibrate)
    return spec.model_copy(update={"calibrate": len(batches)}), batches


def _without_layers(model: nn.Module) -> str:
    """Says why a model has no linear layer to speak of."""
    for name, module in model.named_modules():
        found = f"{name or 'the model'} is a {type(module).__name__}"
        if isinstance(module, torch.jit.ScriptModule):
            return f" {found}, whose inside is not seen. Convert the model before torch.jit.script or trace."
        if ".quantized" in type(module).__module__:
            return f" {found}, whose weights are quantised. Convert the model before it is quantised."
    return " its forward pass met no linear layer or convolution."
