"""The rates of functional dropouts: which attribute gives each call its rate, and how solvers take it over.

No names are looked for. In a copy of the model every attribute that equals a recorded rate gets a rate of its own, and
the pass is recorded once more: the rate that a call is given then names its attribute. Further passes with these
attributes at zero must be the first one without its dropouts, and in evaluation the very same; otherwise something else
depends on them, too.
"""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from solver_plugins.blocks.dropout import TAKEN
from solver_plugins.surgery.errors import ConversionError, RecordError
from solver_plugins.surgery.graph import Rate, rate_of
from solver_plugins.surgery.kinds import function_kind
from solver_plugins.surgery.record import Call, Record, Ref, record

_SHIFT = 1e-9
"""How far apart the rates of a copy are: every mask stays the same, and so does every comparison with a number."""

_Attribute = tuple[str, str]


@dataclass(frozen=True)
class _Passes:
    """The passes of one model."""

    model: nn.Module
    example_inputs: Any
    first: Record

    def again(self, attributes: Mapping[_Attribute, float], training: bool = True) -> Record:
        return record(self.model, self.example_inputs, attributes, training)

    @functools.cached_property
    def evaluation(self) -> Record:
        return self.again({}, training=False)

    def only_drop(self, steered: Mapping[_Attribute, list[int]]) -> bool:
        """Whether attributes at zero take their dropouts away, and nothing else: in training and in evaluation."""
        off, calls = dict.fromkeys(steered, 0.0), {index for indices in steered.values() for index in indices}
        if not _same_but_for(self.first, self.again(off), calls, silent=True):
            return False
        try:
            without = self.again(off, training=False)
            idle = {call.index for call in self.evaluation.calls if _is_dropout(call) and rate_of(call) == 0}
        except RecordError:
            # What an attribute does in evaluation cannot be told then.
            return False
        return _same_but_for(self.evaluation, without, idle, silent=True)

    def silenced(self, steered: Mapping[_Attribute, list[int]]) -> dict[_Attribute, list[int]]:
        """Returns those attributes that do nothing but steer their calls."""
        if not steered:
            return {}
        if self.only_drop(steered):
            return dict(steered)
        if len(steered) == 1:
            return {}
        half = len(steered) // 2
        return self.silenced(dict(list(steered.items())[:half])) | self.silenced(dict(list(steered.items())[half:]))


def rates_of(model: nn.Module, first: Record, example_inputs: Any, wanted: Iterable[int]) -> dict[int, Rate]:
    """Finds the attributes that give functional dropouts their rates.

    Args:
        model: The model; it is left as it is.
        first: A record of it.
        example_inputs: What that was recorded with.
        wanted: Indices of the calls that solvers would take over.

    Returns:
        For each of these calls its attribute, and how many calls that steers; or why it cannot be taken over.
    """
    wanted = set(wanted)
    dropouts = [call for call in first.calls if _is_dropout(call) and rate_of(call) > 0]
    rates = {rate_of(call) for call in dropouts}
    steps = {call.name for call in first.calls if call.module is not None}
    own: dict[_Attribute, float] = {}
    for name, module in model.named_modules():
        if name not in steps and not isinstance(module, torch.jit.ScriptModule):
            for attribute, value in vars(module).items():
                if isinstance(value, float) and value in rates:
                    own[name, attribute] = value - _SHIFT * (len(own) + 1)
    passes = _Passes(model, example_inputs, first)
    second = passes.again(own)
    if not _same_but_for(first, second, set(range(len(first.calls)))) or len(second.calls) != len(first.calls):
        return dict.fromkeys(wanted, Rate(problem="its calls are not the same in every forward pass"))
    owners = {rate: attribute for attribute, rate in own.items()}
    steered: dict[_Attribute, list[int]] = {}
    for call in dropouts:
        found = owners.get(rate_of(second.calls[call.index]))
        if found is not None:
            steered.setdefault(found, []).append(call.index)
    steered = {name: calls for name, calls in steered.items() if wanted.intersection(calls)}
    alone = passes.silenced({name: calls for name, calls in steered.items() if wanted.issuperset(calls)})
    made = dict.fromkeys(wanted, Rate(problem="its rate is not an attribute of a module"))
    for attribute, calls in steered.items():
        path = ".".join(filter(None, attribute))
        others = len(wanted.intersection(calls)) < len(calls)
        what = "another dropout" if others else "something else"
        rate = Rate(path, len(calls)) if attribute in alone else Rate(problem=f"{path!r} also steers {what}")
        made |= dict.fromkeys(wanted.intersection(calls), rate)
    return made


def _is_dropout(call: Call) -> bool:
    return call.function is not None and function_kind(call.function) == "dropout"


def _same_but_for(before: Record, after: Record, calls: set[int], silent: bool = False) -> bool:
    """Whether a pass repeats another one but for some calls, which may have other numbers or be gone.

    With ``silent`` those that are there must be dropouts that drop nothing.
    """
    # For each value of the first pass that of the second one, and for the result of a call that is gone its input.
    values: dict[int, int] = {}
    handed: dict[int, int] = {}
    place = 0
    for call in before.calls:
        other = after.calls[place] if place < len(after.calls) else None
        read = [handed.get(argument.value, argument.value) for argument in call.inputs]
        free = call.index in calls
        if other is not None and _same(call, other, read, values, free):
            if free and silent and rate_of(other) > 0:
                return False
            values.update(zip(call.outputs, other.outputs, strict=True))
            place += 1
        elif free and read and len(call.outputs) == 1:
            handed[call.outputs[0]] = read[0]
        else:
            return False
    ends = {values.get(handed.get(value, value)) for value in before.outputs}
    return place == len(after.calls) and ends == set(after.outputs)


def _same(call: Call, other: Call, read: list[int], values: dict[int, int], free: bool) -> bool:
    """Whether two calls of two passes are the same; notes which values of the passes are."""
    ends = [
        (one.kind, one.name, one.scope, len(one.outputs), [a.position for a in one.inputs]) for one in (call, other)
    ]
    if ends[0] != ends[1]:
        return False
    new = dict(zip(read, (argument.value for argument in other.inputs), strict=True))
    if any(values.get(mine, its) != its for mine, its in new.items()):
        return False
    refs = {argument.value: new[mine] for argument, mine in zip(call.inputs, read, strict=True)}
    if not _alike((call.args, call.kwargs), (other.args, other.kwargs), refs, free):
        return False
    values.update(new)
    return True


def _alike(mine: Any, its: Any, values: Mapping[int, int], free: bool) -> bool:
    if isinstance(mine, Ref) or isinstance(its, Ref):
        return isinstance(mine, Ref) and isinstance(its, Ref) and values[mine.value] == its.value
    if isinstance(mine, float) and isinstance(its, float) and free:
        return True
    if type(mine) is not type(its):
        return False
    if isinstance(mine, Mapping):
        return mine.keys() == its.keys() and all(_alike(mine[key], its[key], values, free) for key in mine)
    if isinstance(mine, list | tuple):
        return len(mine) == len(its) and all(_alike(*pair, values, free) for pair in zip(mine, its, strict=True))
    # Other objects (a device, a generator) may be made anew in every pass.
    return not isinstance(mine, bool | int | float | str) or mine == its or mine != mine


def take_over(modules: Mapping[str, nn.Module], rates: Mapping[str, float]) -> None:
    """Sets the rates of functional dropouts to zero, and has their modules remember them."""
    for path, rate in rates.items():
        owner, _, attribute = path.rpartition(".")
        own = vars(modules[owner])
        if not isinstance(own.get(attribute), int | float):
            raise ConversionError(f"Expected {path!r} to be the rate of a dropout; found {own.get(attribute)!r}.")
        own.setdefault(TAKEN, {})[attribute] = rate
        own[attribute] = 0.0


def taken_over(model: nn.Module) -> dict[str, float]:
    """Returns the rates that solvers have taken over, by their attributes."""
    found = ((name, vars(module).get(TAKEN, {})) for name, module in model.named_modules())
    return {".".join(filter(None, (name, key))): rate for name, rates in found for key, rate in rates.items()}


def give_back(model: nn.Module) -> None:
    """Gives every attribute the rate that it had; one that somebody has set since keeps what it has."""
    for module in model.modules():
        own = vars(module)
        for attribute, rate in own.pop(TAKEN, {}).items():
            if own.get(attribute) == 0:
                own[attribute] = rate
