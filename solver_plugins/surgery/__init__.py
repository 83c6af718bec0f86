"""From a model to its blocks: record a forward pass, match patterns, select what to convert."""

from solver_plugins.surgery.apply import apply_conversion, conversion_of, revert_model
from solver_plugins.surgery.conversion import BlockRecord, Conversion
from solver_plugins.surgery.convert import convert_model
from solver_plugins.surgery.errors import ConversionError, DefaultsWarning, RecordError, TargetError, speaking
from solver_plugins.surgery.inputs import Inputs, example_inputs_for
from solver_plugins.surgery.match import match
from solver_plugins.surgery.merge import merge_model
from solver_plugins.surgery.parts import Block
from solver_plugins.surgery.plan import plan_conversion
from solver_plugins.surgery.record import record
from solver_plugins.surgery.report import LayerRow, Report, inspect_model
from solver_plugins.surgery.select import select
from solver_plugins.surgery.spec import ConversionSpec
from solver_plugins.surgery.status import BlockStatus, SolverReport, solver_report

__all__ = [
    "Block",
    "BlockRecord",
    "BlockStatus",
    "Conversion",
    "ConversionError",
    "ConversionSpec",
    "DefaultsWarning",
    "Inputs",
    "LayerRow",
    "RecordError",
    "Report",
    "SolverReport",
    "TargetError",
    "apply_conversion",
    "conversion_of",
    "convert_model",
    "example_inputs_for",
    "inspect_model",
    "match",
    "merge_model",
    "plan_conversion",
    "record",
    "revert_model",
    "select",
    "solver_report",
    "speaking",
]
