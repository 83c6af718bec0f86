"""A record as a graph to walk: who reads a value, and what comes next if shape operations are skipped."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.nn.modules.conv import _ConvNd

from solver_plugins.surgery.kinds import drops_channels, drops_otherwise, function_kind, module_kind
from solver_plugins.surgery.record import Call, Record

CallKind = Literal["linear", "norm", "dropout", "droppath", "activation", "shape", "add", "other"]

_LOOKS_ONLY = frozenset(
    f"{name}_like" for name in ("zeros", "ones", "empty", "full", "rand", "randn", "randint")
).union(f"new_{name}" for name in ("zeros", "ones", "empty", "full", "tensor"))
"""Functions that read the shape, dtype and device of a tensor, not its numbers."""
_CHOICES = frozenset({"__getitem__", "select", "index_select", "gather", "mean", "sum", "max", "amax"})
"""Functions by which a classifier goes from one output per token to one per sequence, or from several heads to one."""
_PARTS = frozenset({"__getitem__", "select", "index_select", "gather", "split", "chunk", "unbind", "narrow"})
"""Functions whose result is a part of their first argument."""
_SCALINGS = frozenset({"div", "truediv", "__truediv__", "mul", "__mul__", "__rmul__"})
_AS = frozenset({"view_as", "reshape_as", "expand_as", "type_as", "to"})
"""Functions that read only the shape, dtype and device of their second tensor."""


@dataclass(frozen=True)
class Step:
    """What comes after a value: ``call`` is the only one that reads it, or None, and ``readers`` are all that do.

    ``value`` is what the next call reads; it holds the same numbers. ``reshaped``: shape operations were skipped.
    """

    value: int
    call: Call | None
    readers: tuple[Call, ...]
    reshaped: bool
    is_output: bool


@dataclass(frozen=True)
class Rate:
    """Where a functional dropout has its rate from.

    ``attribute`` is the path of the attribute that gives it, which steers ``sites`` calls in one forward pass; without
    one, a solver cannot take it over, and ``problem`` says why.
    """

    attribute: str | None = None
    sites: int = 1
    problem: str | None = None


def rate_of(call: Call) -> float:
    """Returns the rate of a dropout or DropPath in training; zero for a function called with training=False."""
    if call.module is not None:
        # timm and transformers call the rate of a DropPath drop_prob.
        return float(getattr(call.module, "p", getattr(call.module, "drop_prob", 0.0)))
    p = call.args[1] if len(call.args) > 1 else call.kwargs.get("p", 0.5)
    training = call.args[2] if len(call.args) > 2 else call.kwargs.get("training", call.kwargs.get("train", True))
    return float(p) if training and isinstance(p, int | float) else 0.0


class Graph:
    """A record with the questions that the matcher asks of it; ``rates`` are those of functional dropouts, if known."""

    def __init__(self, record: Record, rates: Mapping[int, Rate] | None = None):
        self.record = record
        self.rates = rates or {}
        self._kinds: dict[int, CallKind] = {}

    def kind(self, call: Call) -> CallKind:
        """Returns what a call is. A dropout or DropPath of rate zero counts as a shape operation, as the identity does.

        The model's present mode makes no difference: it will be trained.
        """
        known = self._kinds.get(call.index)
        if known is None:
            known = self._kinds[call.index] = self._find_kind(call)
        return known

    def _find_kind(self, call: Call) -> CallKind:
        if call.module is not None:
            kind = module_kind(call.module) or "other"
            return "shape" if kind in ("dropout", "droppath") and rate_of(call) == 0 else kind
        does = "other" if call.function is None else function_kind(call.function)
        return "shape" if does == "dropout" and rate_of(call) == 0 else does

    def readers(self, value: int) -> tuple[Call, ...]:
        """Returns the calls that read the numbers of a value."""
        calls = [self.record.calls[index] for index in dict.fromkeys(self.record.values[value].consumers)]
        return tuple(call for call in calls if not self._only_looks(call, value))

    def _only_looks(self, call: Call, value: int) -> bool:
        if call.name in _LOOKS_ONLY:
            return True
        return call.name in _AS and all(a.position != 0 for a in call.inputs if a.value == value)

    def follow(self, value: int) -> Step:
        """Follows a value over shape operations to the first other call, as long as each value has one reader."""
        reshaped = False
        while True:
            readers = self.readers(value)
            is_output = self.record.values[value].is_output
            if len(readers) != 1 or is_output:
                return Step(value, None, readers, reshaped, is_output)
            if self.kind(readers[0]) != "shape" or not readers[0].outputs:
                return Step(value, readers[0], readers, reshaped, False)
            value, reshaped = readers[0].outputs[0], reshaped or _moves(readers[0])

    def reaches_output(self, value: int) -> bool:
        """Whether the model returns a value, perhaps reshaped, indexed, or averaged over several heads."""
        step = self.follow(value)
        while not step.is_output and step.call is not None and step.call.outputs and self._reads_out(step.call):
            step = self.follow(step.call.outputs[0])
        return step.is_output

    def _reads_out(self, call: Call) -> bool:
        """Whether a call only indexes, scales or sums the outputs of classifiers."""
        if call.name in _CHOICES or self._scales(call):
            return True
        # A sum of several classifiers. In a residual sum the other operand is something else.
        return self._gathers(call) and all(self._from_classifier(argument.value) for argument in call.inputs)

    def _scales(self, call: Call) -> bool:
        return call.name in _SCALINGS and len(self._activations(call)) == 1

    def _gathers(self, call: Call) -> bool:
        return self.kind(call) == "add" or call.name == "stack"

    def _activations(self, call: Call) -> list[int]:
        """Returns the values that a call reads, without Parameters and what is computed from them alone."""
        return [argument.value for argument in call.inputs if not self.record.values[argument.value].parameters]

    def _from_classifier(self, value: int) -> bool:
        source, _ = self.back(value)
        if source is None:
            return False
        if self.kind(source) == "linear":
            return True
        if not (source.name in _CHOICES or self._scales(source) or self._gathers(source)):
            return False
        values = self._activations(source) if self._gathers(source) else self._activations(source)[:1]
        return bool(values) and all(self._from_classifier(one) for one in values)

    def back(self, value: int) -> tuple[Call | None, int]:
        """Goes back from a value over shape operations to the first other call.

        It also returns the largest number of readers that any value on the way has; the model's caller counts.
        """
        most = 0
        while True:
            most = max(most, len(self.readers(value)) + self.record.values[value].is_output)
            producer = self.record.values[value].producer
            if producer is None:
                return None, most
            call = self.record.calls[producer]
            if self.kind(call) != "shape" or not call.inputs:
                return call, most
            value = call.inputs[0].value

    def dropout_before(self, value: int) -> Call | None:
        """Returns the live dropout whose output a value is a part of: reshaped, indexed, or one position of it."""
        call, _ = self.back(value)
        while call is not None and call.inputs and (call.name in _PARTS or self._pools_nothing(call)):
            call, _ = self.back(call.inputs[0].value)
        drops = call is not None and (self.kind(call) == "dropout" or drops_otherwise(call.module, call.function))
        return call if call is not None and drops and rate_of(call) > 0 else None

    def drops_features(self, call: Call, layer: Call) -> bool:
        """Whether a dropout before a layer draws what the layer sums over: not tokens, nor groups of features."""
        if not drops_channels(call.module, call.name) or isinstance(layer.module, _ConvNd):
            return True
        shape = self.record.values[call.inputs[0].value].shape
        return len(shape) > 2 and math.prod(shape[2:]) == 1

    def activation_before(self, value: int) -> tuple[Call | None, Call | None]:
        """Returns the activation whose output a value is, and the live dropout between them; None for each missing."""
        call, dropout = self.back(value)[0], None
        while call is not None and call.inputs:
            kind = self.kind(call)
            if kind == "activation":
                return call, dropout
            if kind == "dropout":
                dropout = call
            elif not self._pools_nothing(call):
                break
            call, _ = self.back(call.inputs[0].value)
        return None, dropout

    def _pools_nothing(self, call: Call) -> bool:
        """Whether a pool has one position to pool, as in heads whose hidden layers are convolutions."""
        name = type(call.module).__name__ if call.module is not None else call.name
        values = self.record.values
        sizes = [math.prod(values[one].shape) for one in (call.inputs[0].value, *call.outputs)]
        return "pool" in name.lower() and len(set(sizes)) == 1

    def source(self, value: int) -> str:
        """Returns the name of what computes a value, for reports."""
        call, _ = self.back(value)
        return self.record.values[value].kind if call is None else self.label(call)

    def label(self, call: Call) -> str:
        """Returns how reports call a step."""
        if call.module is not None:
            return f"{type(call.module).__name__} {call.name!r}"
        return f"{call.name} in {call.scope!r}" if call.scope else call.name


def _moves(call: Call) -> bool:
    """Whether a shape operation may move the features to another axis; casts and copies do not."""
    if call.module is not None:
        return isinstance(call.module, nn.Flatten | nn.Unflatten)
    return call.name not in ("to", "type", "type_as", "float", "double", "half", "bfloat16", "clone", "contiguous")
