"""A whole run: the model with its solver, the plain one beside it, their exports and the comparison."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from torch import nn

from solver_plugins.errors import SolverPluginsError
from solver_plugins.surgery import convert_model
from solver_plugins.train.config import FinetuneConfig
from solver_plugins.train.data import Loaders, Splits, arguments_of, load_splits, make_loaders
from solver_plugins.train.errors import OutputError
from solver_plugins.train.export import export_model, skeleton_of
from solver_plugins.train.loop import Loop
from solver_plugins.train.models import DTYPES, attach_head, build_model
from solver_plugins.train.outputs import (
    METRICS,
    MODEL,
    REPORT,
    RESULT,
    RESULTS,
    check_data,
    check_output,
    start_output,
    write_whole,
)
from solver_plugins.train.preparation import remember_data
from solver_plugins.train.processes import end_processes, make_accelerator
from solver_plugins.train.report import write_report


def arms_of(config: FinetuneConfig) -> tuple[str, ...]:
    """Returns what is trained: the model with what the config adds and its baseline, or the plain model alone."""
    if not config.changes:
        return ("plain",)
    return ("solver", "baseline") if config.baseline else ("solver",)


def finetune(config: FinetuneConfig, *, resume: bool = False, overwrite: bool = False) -> dict[str, Any]:
    """Finetunes, evaluates and saves what a config describes; call it in every process of a launch.

    Args:
        config: The run.
        resume: Whether a run in its output folder is continued; it ends as if it had never been interrupted. Where
            there is none, it starts.
        overwrite: Whether such a run is replaced.

    Returns:
        The results of each arm, as in ``results.json``.

    Raises:
        SolverPluginsError: Of some kind, for everything that a user can put right.
    """
    if resume and overwrite:
        raise OutputError("Expected --resume or --overwrite; found both.")
    accelerator = None
    try:
        accelerator = make_accelerator(config)
        splits = load_splits(config.data)
        folder = Path(config.output).expanduser()
        data = splits.identity()
        _in_first_process(accelerator, lambda: check_output(config, resume, overwrite))
        if resume:
            _in_first_process(accelerator, lambda: check_data(config, data))
        results: dict[str, dict[str, Any]] = {}
        for name in arms_of(config):
            done = _finished(folder / name) if resume else None
            if done is None:
                accelerator = make_accelerator(config, str(folder / "logs"))
                arm = _Arm(config, accelerator, splits, folder / name, name)
                if not results:
                    # Not before the model is built and converted: a mistake in the config leaves no folder behind.
                    _in_first_process(accelerator, lambda: start_output(config, resume, data))
                done = arm.train(resume)
            results[name] = done
        if accelerator.is_main_process:
            write_whole(folder / RESULTS, json.dumps(results, indent=2))
            write_report(folder / REPORT, config, results, {name: _rows(folder / name) for name in results})
        accelerator.wait_for_everyone()
        return results
    finally:
        end_processes(accelerator)


def _in_first_process(accelerator: Accelerator, do: Callable[[], None]) -> None:
    """Does something in the first process; all of them stop if that fails."""
    said: list[str | None] = [None]
    if accelerator.is_main_process:
        try:
            do()
        except (SolverPluginsError, OSError) as error:
            said = [str(error)]
    broadcast_object_list(said)
    if said[0] is not None:
        raise OutputError(said[0])


def _finished(folder: Path) -> dict[str, Any] | None:
    """Returns the result of an arm that is done; it is written last."""
    try:
        found: dict[str, Any] = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found


def _rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / METRICS).read_text(encoding="utf-8").splitlines()]


def make_arm(config: FinetuneConfig, splits: Splits, name: str, processes: int) -> tuple[nn.Module, Loaders]:
    """Builds the model of one arm, the same in every process, and what it reads."""
    set_seed(config.seed)
    model = build_model(config, splits)
    loaders = make_loaders(config, splits, model, processes)
    if not splits.is_text:
        remember_data(config, model, splits.classes)
    if name == "solver" and config.head is not None:
        attach_head(model, config.head)
    if name == "solver" and config.solver is not None:
        dtype = DTYPES[config.model.dtype]
        batches = None if config.solver.calibrate is None else first_batches(loaders, dtype, config.solver.calibrate)
        convert_model(model, config.solver, calibrate=batches, example_inputs=example_of(loaders, dtype))
    return model, loaders


def example_of(loaders: Loaders, dtype: torch.dtype) -> Any:
    """Returns two examples as the model's forward takes them, for the recorded pass."""
    collate: Any = loaders.eval.collate_fn
    examples = loaders.examples
    return _inputs(collate([examples[(0, 0)], examples[(0, 1 % len(examples))]]), dtype)


def first_batches(loaders: Loaders, dtype: torch.dtype, count: int) -> Iterator[Any]:
    """Yields the first training batches as the model's forward takes them, for calibrating."""
    loaders.order.epoch = loaders.order.skip = 0
    for batch in islice(loaders.train, count):
        yield _inputs(batch, dtype)


def _inputs(batch: Any, dtype: torch.dtype) -> Any:
    args, keywords = arguments_of(batch, dtype)
    return args or keywords


class _Arm:
    """One model of a run: made here, nothing written before :meth:`train`."""

    def __init__(self, config: FinetuneConfig, accelerator: Accelerator, splits: Splits, folder: Path, name: str):
        self.config, self.accelerator, self.folder, self.name = config, accelerator, folder, name
        model, loaders = make_arm(config, splits, name, accelerator.num_processes)
        self.skeleton = skeleton_of(model, accelerator)
        self.loop = Loop(config, accelerator, model, loaders, folder, name, len(splits.classes))

    def train(self, resume: bool) -> dict[str, Any]:
        """Trains, evaluates and exports the model; returns the result, which is written down last."""
        accelerator, loop = self.accelerator, self.loop
        if self.config.trackers:
            accelerator.init_trackers(self.name)
        scores = loop.run(resume)
        parameters = export_model(self.config, accelerator, loop, self.skeleton, self.folder / MODEL)
        result = {
            **asdict(scores),
            "train_loss": loop.progress.rows[-1]["train_loss"],
            "steps": loop.progress.step,
            "seconds": round(loop.progress.seconds, 2),
            "parameters": parameters,
            "model": str(self.folder / MODEL),
        }
        if accelerator.is_main_process:
            write_whole(self.folder / RESULT, json.dumps(result, indent=2))
        accelerator.wait_for_everyone()
        accelerator.free_memory()
        return result
