"""From a model to its blocks: record a forward pass, match patterns, select what to convert."""

from solver_plugins.surgery.errors import RecordError, TargetError
from solver_plugins.surgery.inputs import Inputs, example_inputs_for
from solver_plugins.surgery.match import match, without_activation
from solver_plugins.surgery.parts import (
    PATTERNS,
    ActivationPart,
    Block,
    DropoutPart,
    NormPart,
    Pattern,
    Sampling,
    SkipPart,
)
from solver_plugins.surgery.record import Argument, Call, Record, Ref, Value, record
from solver_plugins.surgery.select import Chosen, Selection, select

__all__ = [
    "PATTERNS",
    "ActivationPart",
    "Argument",
    "Block",
    "Call",
    "Chosen",
    "DropoutPart",
    "Inputs",
    "NormPart",
    "Pattern",
    "Record",
    "RecordError",
    "Ref",
    "Sampling",
    "Selection",
    "SkipPart",
    "TargetError",
    "Value",
    "example_inputs_for",
    "match",
    "record",
    "select",
    "without_activation",
]
