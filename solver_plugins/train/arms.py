"""The arms of a finetuning run: the model with what its config adds, and the plain model beside it."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from accelerate.utils import set_seed
from torch import Tensor, nn

from solver_plugins.errors import OptionError
from solver_plugins.integrations.models import ModelError
from solver_plugins.surgery import convert_model, speaking
from solver_plugins.train.classification import inputs_of
from solver_plugins.train.config import FinetuneConfig
from solver_plugins.train.data import Loaders, Splits, example_of, make_loaders
from solver_plugins.train.errors import summary_of
from solver_plugins.train.models import DTYPES, attach_head, build_model
from solver_plugins.train.preparation import remember_data
from solver_plugins.train.problems import SINGLE


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
    check_options(config, splits)
    set_seed(config.seed)
    model = build_model(config, splits)
    loaders = make_loaders(config, splits, model, processes)
    if not splits.is_text:
        remember_data(config, model, splits.classes, splits.problem_type)
    dtype = DTYPES[config.model.dtype]
    example = inputs_of(example_of(loaders.eval), dtype)
    _check_takes(model, example, config.model.spec)
    if name == "solver" and config.head is not None:
        attach_head(model, config.head)
    if name == "solver" and config.solver is not None:
        if before_conversion is not None:
            before_conversion(model, example)
        count = config.solver.calibrate
        first = None if count is None else (inputs_of(batch, dtype) for batch in islice(loaders.start(0, 0), count))
        with speaking("config"):
            convert_model(model, config.solver, calibrate=first, example_inputs=example)
    return model, loaders


def _check_takes(model: nn.Module, example: tuple[Tensor, ...] | dict[str, Tensor], spec: str) -> None:
    """Checks that a model runs on the data, before anything is trained or written."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model(**example) if isinstance(example, dict) else model(*example)
    except Exception as error:
        what, agree = "these texts", "data.max_length"
        if isinstance(example, tuple):
            size = "x".join(map(str, example[0].shape[1:]))
            what, agree = f"images of {size}", "data.image_size and model.args, such as img_size and in_chans,"
        raise ModelError(
            f"{spec!r} cannot take {what}: {summary_of(error)} Expected {agree} to fit the model."
        ) from error
    finally:
        model.train(training)


def check_options(config: FinetuneConfig, splits: Splits) -> None:
    """Raises OptionError for a config that asks for what its problem does not have."""
    if splits.problem_type == SINGLE:
        return
    asked = {
        "label_smoothing": config.label_smoothing > 0,
        "mixup": config.mixup is not None,
        "class_weights": config.class_weights is not None and splits.problem_type == "regression",
        "regularizer": config.regularizer is not None and config.regularizer.how == "deterministic",
    }
    for name, given in asked.items():
        if given:
            raise OptionError(
                f"{name} is about one class of several, and the labels pose a problem of {splits.problem_type}: leave "
                "it out, or set data.problem_type."
            )
