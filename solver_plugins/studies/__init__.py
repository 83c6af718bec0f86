"""The papers' experiments, each one a command: ``solver-plugins study run NAME``.

A study is one file: a config, cells, what they measure, a table, a figure, and a decorator.
"""

from solver_plugins.registry import import_all
from solver_plugins.studies.base import Cell, Context, Measured, Results, Study, StudyConfig, Table
from solver_plugins.studies.errors import CellError, OtherProcessError
from solver_plugins.studies.registry import STUDIES, list_studies, register_study, study_info
from solver_plugins.studies.run import Outcome, run_study
from solver_plugins.studies.scales import SCALES, read_study_config

__all__ = [
    "SCALES",
    "STUDIES",
    "Cell",
    "CellError",
    "Context",
    "Measured",
    "OtherProcessError",
    "Outcome",
    "Results",
    "Study",
    "StudyConfig",
    "Table",
    "list_studies",
    "read_study_config",
    "register_study",
    "run_study",
    "study_info",
]

import_all(__name__, __path__)
