"""From a model and a spec to a conversion, as data: nothing is changed."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from solver_plugins.errors import OptionError
from solver_plugins.prox import Prior
from solver_plugins.solve import Solver, check_gate
from solver_plugins.surgery.apply import refuse_wrapped
from solver_plugins.surgery.conversion import BlockRecord, Conversion, Role, record_block
from solver_plugins.surgery.match import match
from solver_plugins.surgery.model_config import refuse_quantized
from solver_plugins.surgery.parts import Block, Samples
from solver_plugins.surgery.rates import rates_of
from solver_plugins.surgery.record import Record, record
from solver_plugins.surgery.select import Chosen, Selection, select, still_needed
from solver_plugins.surgery.spec import ConversionSpec


@dataclass(frozen=True)
class Plan:
    """What a conversion will do.

    ``selection`` tells which blocks are converted, and why the others are not; ``conversion`` is the same as data, and
    ``priors`` has the priors without a registered name, which data cannot hold, by the name of the layer.
    """

    spec: ConversionSpec
    blocks: tuple[Block, ...]
    selection: Selection
    conversion: Conversion
    priors: dict[str, Prior]

    def solver_for(self, one: Chosen) -> Solver:
        return self.spec.make_solver(one.p)


def plan_conversion(model: nn.Module, spec: ConversionSpec, example_inputs: Any = None) -> Plan:
    """Walks a model, which is left as it is, and decides what :func:`convert_model` would do; raises as that does."""
    refuse_wrapped(model)
    refuse_quantized(model)
    recorded = record(model, example_inputs)
    blocks = match(recorded, model)
    functions = [
        index
        for block in blocks
        if (part := block.dropout_for(spec.samples)) is not None and part.ownership == "functional"
        for index in part.calls
    ]
    if functions:
        blocks = match(recorded, model, rates_of(model, recorded, example_inputs, functions))
    selection = select(blocks, spec, model)
    passed_over, routed = _taken_over(list(selection.chosen), spec.samples)
    made, priors = [], {}
    for one in selection.chosen:
        written = _record(one, spec, one.block.name in routed, _scope(one.block, recorded))
        made.append(written)
        if written.prior is None and one.block.prior is not None:
            priors[written.layer] = one.block.prior
    # In the order of the modules, as a converted model is written down.
    places = {name: place for place, (name, _) in enumerate(model.named_modules())}
    conversion = Conversion(
        spec=spec if spec.storable else None,
        blocks=tuple(sorted(made, key=lambda block: places[block.layer])),
        passed_over=tuple(sorted(passed_over, key=places.__getitem__)),
        routed=tuple(sorted(set(routed.values()), key=places.__getitem__)),
        rates={
            part.attribute: part.p
            for one in selection.chosen
            if (part := one.block.dropout_for(spec.samples)) is not None and part.attribute is not None
        },
    )
    return Plan(spec, tuple(blocks), selection, conversion, priors)


def _record(one: Chosen, spec: ConversionSpec, routed: bool, scope: str | None) -> BlockRecord:
    block = one.block
    assert block.prior is not None
    activation, role = block.activation, _role(block)
    # A prior with parameters reads its module (PReLU): that of the model which is converted, maybe a copy.
    reads = block.prior.learnable and activation is not None
    solver = spec.make_solver(one.p)
    if spec.gate is not None:
        try:
            check_gate(solver, block.prior, spec.gate)
        except OptionError as error:
            raise OptionError(f"{block.name}: {error}") from None
    return record_block(
        block.name,
        block.outlet_name,
        role,
        solver,
        block.prior,
        partner=activation.name if reads and activation is not None else None,
        norm=block.norm.name if block.norm is not None and role == "activation" else None,
        scope=scope,
        routed=routed,
        blend=spec.blend,
        gate=spec.gate,
    )


def _scope(block: Block, recorded: Record) -> str | None:
    """Returns the name of the innermost module that ran layer and outlet, under whatever names; "" is the model."""
    if block.outlet == "linear":
        return None
    names = [name for end in (block.name, block.outlet_name) for name in (end, *recorded.aliases.get(end, ()))]
    common = block.name.split(".")[:-1]
    # Lists of modules hold others and are not called themselves.
    while common and not (
        recorded.call_counts.get(".".join(common)) and all(name.startswith(".".join(common) + ".") for name in names)
    ):
        common.pop()
    return ".".join(common)


def _role(block: Block) -> Role:
    if block.outlet == "linear":
        return "layer"
    if block.outlet == "activation":
        return "activation"
    return "norm-activation" if block.norm is not None and block.norm.holds_activation else "norm"


def _taken_over(chosen: list[Chosen], samples: Samples) -> tuple[list[str], dict[str, str]]:
    """Returns the names of the dropouts that chosen blocks replace, and for each block that shares one its dropout."""
    routed = {one.block.name: part.name for one, part in still_needed(chosen, samples) if part.name is not None}
    parts = [one.block.dropout_for(samples) for one in chosen]
    names = dict.fromkeys(part.name for part in parts if part is not None and part.name is not None)
    return [name for name in names if name not in routed.values()], routed
