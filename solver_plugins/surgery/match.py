"""Every linear layer of a model with its pattern, from a record alone; no solver is known here."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn
from torch.nn.utils import parametrize

from solver_plugins.blocks import SolverBlock
from solver_plugins.blocks.shell import hides_forward, is_quantized
from solver_plugins.errors import SolverPluginsError
from solver_plugins.operators import reader_for
from solver_plugins.surgery.errors import option
from solver_plugins.surgery.graph import Graph, Rate
from solver_plugins.surgery.kinds import is_linear_function, linear_like
from solver_plugins.surgery.parts import CALLED, Block, DropoutPart, Samples, Surroundings
from solver_plugins.surgery.record import Call, Record
from solver_plugins.surgery.surroundings import signature, surroundings_of

__all__ = ["Block", "match"]


@dataclass
class _Uses:
    """How the weights of one layer are used in the pass."""

    calls: list[Call] = field(default_factory=list)
    reads: list[Call] = field(default_factory=list)

    def first(self) -> int:
        return min((call.index for call in (*self.calls, *self.reads)), default=1 << 60)


def match(record: Record, model: nn.Module, rates: Mapping[int, Rate] | None = None) -> list[Block]:
    """Returns one row for every linear layer, and for every weight that is multiplied by without a layer.

    ``rates`` tells where functional dropouts have their rates from, where that has been looked for. The blocks are in
    the order in which the model comes to them; layers that it never comes to are last.
    """
    graph = Graph(record, rates)
    modules = dict(model.named_modules())
    uses: dict[str, _Uses] = {name: _Uses() for name, module in modules.items() if linear_like(module)}
    loose: dict[str, _Uses] = {}
    for call in record.calls:
        if call.module is not None:
            if call.name in uses:
                uses[call.name].calls.append(call)
            continue
        for parameter in call.parameters if call.function and is_linear_function(call.function) else ():
            owner, _, attribute = parameter.rpartition(".")
            if owner in uses:
                uses[owner].reads.append(call)
            elif attribute != "bias":
                weight = modules[owner]._parameters.get(attribute)
                if weight is not None and weight.dim() >= 2:
                    loose.setdefault(parameter, _Uses()).reads.append(call)
    found = {name: _merged([surroundings_of(graph, call) for call in use.calls]) for name, use in uses.items()}
    _give_each_sum_one_block(found)
    _mark_hidden_layers(graph, found)
    rows = [(use.first(), _block(graph, name, modules[name], use, found[name])) for name, use in uses.items()]
    for parameter, use in loose.items():
        owner = modules[parameter.rpartition(".")[0]]
        what = f"a Parameter of {type(owner).__name__} that {graph.label(use.reads[0])} multiplies by, not a layer"
        rows.append((use.first(), Block(parameter, owner, reasons=(what,))))
    return [_finished(block) for _, block in sorted(rows, key=lambda row: row[0])]


def _block(graph: Graph, name: str, module: nn.Module, use: _Uses, found: Surroundings | None) -> Block:
    record = graph.record
    reasons = _layer_problems(record, name, module)
    if use.reads:
        reader = graph.label(use.reads[0])
        also = "as well as by the layer" if use.calls else "and the layer is never called"
        reasons.append(f"its weight is read directly by {reader}, {also}: a solver in its place would be passed by")
    elif not use.calls:
        inside = record.call_counts.get(name, 0) > 0
        reasons.append("called inside of another layer only" if inside else "never called in the forward pass")
    around = {} if found is None else vars(found)
    block = Block(name, module, aliases=record.aliases.get(name, ()), **around)
    block.reasons = (*reasons, *block.reasons)
    block.calls = tuple(call.index for call in use.calls)
    if use.calls:
        first = use.calls[0]
        block.input_shape = record.values[first.inputs[0].value].shape
        block.output_shape = record.values[first.outputs[0]].shape
    return block


def _layer_problems(record: Record, name: str, module: nn.Module) -> list[str]:
    reasons = []
    if isinstance(module, SolverBlock):
        reasons.append("already a solver block; revert the model first")
    elif hides_forward(module):
        reasons.append("carries a forward of its own on the instance (an accelerate hook?), which would hide a solver")
    else:
        try:
            reader = reader_for(type(module))
            # Computing a parametrised weight may change it (spectral norm); its class has told enough.
            if not parametrize.is_parametrized(module):
                kernel, _ = reader(module)
                if is_quantized(kernel):
                    kind = type(kernel).__name__
                    reasons.append(f"its weight is quantized ({kind} of torchao); convert, merge_model, then quantize")
                elif not kernel.is_floating_point():
                    reasons.append(f"weights of dtype {kernel.dtype} are not floating point")
        except SolverPluginsError as error:
            # The rest of the message lists what is supported, the same for every row.
            why = str(error).partition(" Expected ")[0]
            reasons.append(f"unsupported layer: {why} See solver_plugins.operators.register_layer")
    for first, others in record.shared_parameters.items():
        tied = (first, *others)
        if f"{name}.weight" in tied:
            rest = ", ".join(repr(other) for other in tied if other != f"{name}.weight")
            reasons.append(f"tied weight: it is also {rest}")
    return reasons


def _merged(around: list[Surroundings]) -> Surroundings | None:
    """Makes one of the surroundings of all calls of a layer."""
    if not around:
        return None
    found = around[0]
    if any(signature(one) != signature(found) for one in around):
        patterns = ", ".join(dict.fromkeys(one.pattern for one in around))
        why = f"called {len(around)} times in different surroundings ({patterns}), so only the layer is common"
        found = Surroundings(calls=found.calls, notes=(why,))
        lost = [one.dropout for one in around if one.dropout is not None]
        found.dropped = {"outputs" if part.after else "inputs": part.name or "a dropout" for part in lost}
    elif len(around) > 1:
        if found.outlet != "linear":
            found.reasons += (f"called {len(around)} times: a {found.outlet} can finish one call only",)
        found.notes += (f"called {len(around)} times",)
    found.is_last = any(one.is_last for one in around)
    for one in around:
        found.dropped |= one.dropped
    found.dropout = _owned(found.dropout, around)
    return found


def _owned(dropout: DropoutPart | None, around: list[Surroundings]) -> DropoutPart | None:
    """A dropout whose every call feeds this layer is private, however often both are called."""
    if dropout is None:
        return None
    calls = tuple(index for one in around if one.dropout is not None for index in one.dropout.calls)
    if dropout.ownership == "functional":
        return dataclasses.replace(dropout, calls=calls)
    return dataclasses.replace(dropout, calls=calls, ownership="private" if len(calls) == dropout.sites else "shared")


def _give_each_sum_one_block(found: dict[str, Surroundings | None]) -> None:
    """Of two layers whose sum an activation reads, the first summand is the block, the other one its skip."""
    owners: dict[int, str] = {}
    for name, one in found.items():
        if one is not None and one.skip is not None and (one.skip.call not in owners or one.skip.operand > 0):
            owners[one.skip.call] = name
    for name, one in found.items():
        if one is not None and one.skip is not None and owners[one.skip.call] != name:
            found[name] = one.without_activation(f"its output is the skip connection of {owners[one.skip.call]!r}")


def _mark_hidden_layers(graph: Graph, found: dict[str, Surroundings | None]) -> None:
    """Finds the layers whose activation a classifier reads, perhaps over a dropout."""
    around = [one for one in found.values() if one is not None]
    hidden = {index: one for one in around if one.activation is not None for index in one.activation.calls}
    for last in around:
        for index in last.calls if last.is_last else ():
            activation, dropout = graph.activation_before(graph.record.calls[index].inputs[0].value)
            if activation is not None and activation.index in hidden:
                one = hidden[activation.index]
                one.feeds_last = one.outlet == "linear"
                if dropout is not None:
                    one.dropped["outputs"] = graph.label(dropout)


def _finished(block: Block) -> Block:
    """Adds what a solver may draw that the block is converted to."""
    if block.reasons:
        return block
    samples: set[Samples] = {"nothing", "inputs", "outputs"}
    reasons = []
    if block.dropout is not None and block.dropout.ownership == "functional" and block.dropout.attribute is None:
        lost: Samples = "outputs" if block.dropout.after else "inputs"
        samples.discard(lost)
        where = "behind" if block.dropout.after else "before"
        why = block.dropout.problem
        reasons.append(
            f"the dropout {where} it is a function (F.dropout), not a module that a solver could take over: not for "
            f"{CALLED[lost]} solvers"
            if why is None
            else f"the dropout {where} it is a function (F.dropout), and {why}; build the model with that rate at 0 "
            f"(drop_rate=0) and give it with {option('p')}"
        )
    if block.prior is not None and block.prior.zero_argument is None:
        samples.discard("outputs")
        reasons.append(
            f"the activation {block.prior.name!r} never is zero, as outputs that are not drawn must be: not for "
            "coordinate solvers"
        )
    block.reasons, block.convertible = tuple(reasons), frozenset(samples)
    return block
