"""The dry run: what a run will do, before anything is trained or written."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from solver_plugins.surgery import Report, inspect_model, speaking
from solver_plugins.train.adapters import Adapters
from solver_plugins.train.additions import Additions
from solver_plugins.train.arms import arms_of, make_arm
from solver_plugins.train.best import BestWeights
from solver_plugins.train.config import FinetuneConfig
from solver_plugins.train.data import Splits, load_splits
from solver_plugins.train.finetune import train_settings
from solver_plugins.train.launch import end_processes, make_accelerator
from solver_plugins.train.optimizer import make_optimizer, make_schedule
from solver_plugins.train.outputs import check_output
from solver_plugins.train.preparation import image_settings
from solver_plugins.train.problems import SINGLE
from solver_plugins.train.trainable import Trainable


@dataclass(frozen=True)
class RunPlan:
    """What a dry run found.

    Attributes:
        config: All settings, defaults included.
        lines: Sentences about data, model, training and cost.
        blocks: What the conversion will do; None for a plain model.
    """

    config: FinetuneConfig
    lines: tuple[str, ...]
    blocks: Report | None


def plan_run(config: FinetuneConfig) -> RunPlan:
    """Makes the data, the first model and its optimiser as the run does, so that it raises what the run would."""
    accelerator = None
    try:
        accelerator = make_accelerator(config)
        splits = load_splits(config.data)
        # A run there may still be continued or replaced.
        check_output(config, resume=False, overwrite=True)
        BestWeights(config.best, Path(config.output), accelerator, splits.problem, len(splits.classes))
        reports: list[Report] = []

        def inspect(model: nn.Module, example: Any) -> None:
            assert config.solver is not None
            with speaking("config"):
                reports.append(inspect_model(model, config.solver, example_inputs=example))

        model, loaders = make_arm(config, splits, arms_of(config)[0], accelerator.num_processes, inspect)
        adapters = None if config.peft is None else Adapters(config, model)
        steps = loaders.order.steps
        optimizer = make_optimizer(train_settings(config), model)
        make_schedule(train_settings(config), optimizer, steps)
        additions = Additions(config.proxprop, config.regularizer)
        additions.attach(model, optimizer)
        added = additions.describe()
        if config.head is not None:
            added.append(f"head: an equilibrium of {config.head.layers} layers, solved by {config.head.solver}")
        added += [] if adapters is None else [adapters.describe()]
        trainable = Trainable(config, model).describe()
        added += [trainable] if trainable else []
        parameters = sum(parameter.numel() for parameter in model.parameters())
        size = (
            "" if splits.is_text else f", images of {'x'.join(map(str, image_settings(config, model)['input_size']))}"
        )
        lines = [
            f"data: {config.data.name}: {len(splits.train)} examples to train on, {len(splits.eval)} to evaluate on, "
            f"{_outputs(splits)}{size}",
            *(f"note: {note}" for note in splits.notes()),
            f"model: {config.model.spec} ({type(model).__name__}), {parameters:,} parameters, {config.model.dtype}",
            f"runs: {', '.join(arms_of(config))}",
            f"steps: {config.epochs} epochs of {steps} = {config.epochs * steps} for each run, "
            f"{config.batch_size} examples each (processes x passes x examples: {accelerator.num_processes} x "
            f"{config.accumulation} x {config.batch_size // accelerator.num_processes // config.accumulation})"
            + (f"; {loaders.left_out} examples that do not fill a batch are left out" if loaders.left_out else ""),
            f"optimizer: {type(optimizer).__name__}, lr {config.optimizer.lr:g}, "
            + ("constant" if config.schedule is None else f"schedule {config.schedule.sched}"),
            *added,
            *(_cost(reports[0], config.epochs * steps * config.batch_size) if reports else ()),
            f"output: {config.output}",
        ]
        return RunPlan(config, tuple(lines), reports[0] if reports else None)
    finally:
        end_processes(accelerator)


def _outputs(splits: Splits) -> str:
    """Returns what the model answers with, in words."""
    count = len(splits.classes)
    if splits.problem_type == "regression":
        return f"regression of {', '.join(splits.classes[:5])}{', ...' if count > 5 else ''}"
    return f"{count} classes" + (", several at once" if splits.problem_type != SINGLE else "")


def _cost(report: Report, examples: int) -> list[str]:
    """Returns a sentence about the cost; a backward pass takes about twice as long as a forward pass."""
    if not report.totals["plain_flops"]:
        return []
    totals: dict[str, Any] = report.totals
    plain, solver = (3 * examples * totals[key] / 1e12 for key in ("plain_flops", "flops"))
    return [
        f"cost: all linear layers take about {plain:.3g} TFLOPs to train as they are, {solver:.3g} with the solver "
        f"({totals['flops'] / totals['plain_flops']:.3g}x)"
    ]
