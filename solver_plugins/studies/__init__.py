"""The papers' experiments, each one a command: ``solver-plugins study run NAME``.

A study is one file: a config, cells, what they measure, a table, a figure, and a decorator.
"""

from solver_plugins.studies import (  # noqa: F401  They register themselves.
    deeplayers_pretrained,
    deeplayers_solvers,
    deeplayers_table2,
    deeplayers_table3,
    deeplayers_table4,
    deeplayers_table5,
    dropblock_fig1,
    dropblock_fig2,
    dropblock_fig3,
    dropblock_fig4,
    dropblock_rank,
    dropblock_regularizer,
    opteq_alpha,
    opteq_grad,
    opteq_head,
    opteq_regularizers,
    proxprop_convergence,
    proxprop_stability,
)
from solver_plugins.studies.errors import CellError, OtherProcessError
from solver_plugins.studies.runner import StudyOutcome, run_study
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
