"""The arms of a finetuning run: the model with what its config adds, and the plain model beside it."""

from collections.abc import Callable
from itertools import islice
from typing import Any

from accelerate.utils import set_seed
from torch import nn

from solver_plugins.blocks import calibrate
from solver_plugins.train.classification import arguments_of, logits_of
from solver_plugins.train.config import FinetuneConfig
from solver_plugins.train.data import Loaders, Splits, example_of, make_loaders
from solver_plugins.train.models import DTYPES, attach_head, build_model, convert
from solver_plugins.train.preparation import remember_data


def arms_of(config: FinetuneConfig) -> tuple[str, ...]:
    """Returns the models to train: the one with what the config adds and its baseline, or the plain one alone."""
    if not config.changes:
        return ("plain",)
    return ("solver", "baseline") if config.baseline else ("solver",)


def make_arm(
    config: FinetuneConfig,
    splits: Splits,
    name: str,
    processes: int,
    before_conversion: Callable[[nn.Module, Any], None] | None = None,
) -> tuple[nn.Module, Loaders]:
    """Builds the model of one arm, identical in every process, and its data loaders.

    Args:
        config: The run.
        splits: Its data.
        name: One of :func:`arms_of`.
        processes: How many processes share the batches.
        before_conversion: Called with the plain model and example inputs, right before a conversion.
    """
    set_seed(config.seed)
    model = build_model(config, splits)
    loaders = make_loaders(config, splits, model, processes)
    if not splits.is_text:
        remember_data(config, model, splits.classes)
    if name == "solver" and config.head is not None:
        attach_head(model, config.head)
    if name == "solver" and config.solver is not None:
        dtype = DTYPES[config.model.dtype]
        args, keywords = arguments_of(example_of(loaders.eval), dtype)
        if before_conversion is not None:
            before_conversion(model, args or keywords)
        convert(model, config.solver, args or keywords)
        if config.calibrate is not None:
            batches = islice(loaders.start(0, 0), config.calibrate.batches)
            calibrate(model, batches, forward=lambda model, batch: logits_of(model, batch, dtype), progress=False)
    return model, loaders
