"""The arms of a finetuning run: the model with what its config adds, and the plain model beside it."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from accelerate.utils import set_seed
from torch import nn

from solver_plugins.train.classification import arguments_of
from solver_plugins.train.config import FinetuneConfig
from solver_plugins.train.data import Loaders, Splits, example_of, make_loaders
from solver_plugins.train.models import DTYPES, attach_head, build_model, calibrated, convert
from solver_plugins.train.preparation import remember_data


def arms_of(config: FinetuneConfig) -> tuple[str, ...]:
    """Returns what is trained: the model with what the config adds and its baseline, or the plain model alone."""
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
    """Builds the model of one arm, the same in every process, and what it reads.

    Args:
        config: The run.
        splits: Its data.
        name: One of :func:`arms_of`.
        processes: How many processes share the batches.
        before_conversion: Called with the plain model and an example of its inputs, where the model is converted.
    """
    set_seed(config.seed)
    model = build_model(config, splits)
    loaders = make_loaders(config, splits, model, processes)
    if not splits.is_text:
        remember_data(config, model, splits.classes)
    if name == "solver" and config.head is not None:
        attach_head(model, config.head)
    if name == "solver" and config.solver is not None:
        args, keywords = arguments_of(example_of(loaders.eval), DTYPES[config.model.dtype])
        if before_conversion is not None:
            before_conversion(model, args or keywords)
        convert(model, config.solver, args or keywords)
        if config.calibrate is not None:
            _calibrate(config, model, loaders, config.calibrate.batches)
    return model, loaders


def _calibrate(config: FinetuneConfig, model: nn.Module, loaders: Loaders, count: int) -> None:
    dtype = DTYPES[config.model.dtype]

    def forward(one: nn.Module, batch: Any) -> Any:
        args, keywords = arguments_of(batch, dtype)
        return one(*args, **keywords)

    def batches() -> Iterator[Any]:
        loaders.order.epoch = loaders.order.skip = 0
        return islice(iter(loaders.train), count)

    calibrated(model, batches(), forward, progress=False)
