"""Finetuning on Accelerate: config, data, loop, checkpoints, evaluation and report of a run."""

from solver_plugins.train.config import FinetuneConfig
from solver_plugins.train.digits import load_digits
from solver_plugins.train.errors import CheckpointError, DataError, DivergedError, LaunchError, OutputError
from solver_plugins.train.reading import read_config

__all__ = [
    "CheckpointError",
    "DataError",
    "DivergedError",
    "FinetuneConfig",
    "LaunchError",
    "OutputError",
    "load_digits",
    "read_config",
]
