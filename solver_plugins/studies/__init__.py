"""The papers' experiments, each one a command: ``solver-plugins study run NAME``.

A study is one file: a config, cells, what they measure, a table, a figure, and a decorator.
"""

from solver_plugins.registry import import_all
from solver_plugins.studies.runner import CellError, StudyOutcome, run_study
from solver_plugins.studies.scales import SCALES, read_study_config
from solver_plugins.studies.study import (
    STUDIES,
    Cell,
    Context,
    Measured,
    Results,
    Study,
    StudyConfig,
    Table,
    list_studies,
    register_study,
    study_info,
)
from solver_plugins.studies.team import OtherProcessError

__all__ = [
    "SCALES",
    "STUDIES",
    "Cell",
    "CellError",
    "Context",
    "Measured",
    "OtherProcessError",
    "Results",
    "Study",
    "StudyConfig",
    "StudyOutcome",
    "Table",
    "list_studies",
    "read_study_config",
    "register_study",
    "run_study",
    "study_info",
]

# Studies register themselves: a new file in this folder is all that a new one needs.
import_all(__name__, __path__)
