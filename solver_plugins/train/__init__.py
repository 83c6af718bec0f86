"""Finetuning on Accelerate: config, data, loop, checkpoints, evaluation and report of a run."""

from solver_plugins.train.config import FinetuneConfig, read_config
from solver_plugins.train.errors import CheckpointError, DataError, DivergedError, LaunchError, OutputError

__all__ = [
    "CheckpointError",
    "DataError",
    "DivergedError",
    "FinetuneConfig",
    "LaunchError",
    "OutputError",
    "read_config",
]
