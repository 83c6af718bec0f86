"""The dry run: what a config amounts to, before anything is trained or written."""

from dataclasses import dataclass
from typing import Any

from accelerate.utils import set_seed

from solver_plugins.surgery import Report, inspect_model
from solver_plugins.train.additions import Additions
from solver_plugins.train.config import FinetuneConfig
from solver_plugins.train.data import load_splits, make_loaders
from solver_plugins.train.loop import make_optimizer, make_schedule
from solver_plugins.train.models import DTYPES, attach_head, build_model
from solver_plugins.train.outputs import check_output
from solver_plugins.train.preparation import image_settings
from solver_plugins.train.processes import end_processes, make_accelerator
from solver_plugins.train.run import arms_of, example_of


@dataclass(frozen=True)
class RunPlan:
    """What a run will do.

    Attributes:
        config: All settings, defaults included.
        lines: What is known of data, model and cost, one sentence each.
        blocks: What the conversion will do; None for a plain model.
    """

    config: FinetuneConfig
    lines: tuple[str, ...]
    blocks: Report | None


def plan_run(config: FinetuneConfig) -> RunPlan:
    """Loads data and model, makes the optimiser and looks at the conversion; raises what the run would raise first."""
    accelerator = None
    try:
        accelerator = make_accelerator(config)
        splits = load_splits(config.data)
        # Whether a run there is continued or replaced is not asked yet.
        check_output(config, resume=False, overwrite=True)
        set_seed(config.seed)
        model = build_model(config, splits)
        loaders = make_loaders(config, splits, model, accelerator.num_processes)
        example = example_of(loaders, DTYPES[config.model.dtype])
        if config.head is not None:
            attach_head(model, config.head)
        optimizer = make_optimizer(config, model)
        make_schedule(config, optimizer, loaders.order.steps)
        additions = Additions(config, model, optimizer)
        added = additions.describe()
        if config.head is not None:
            added.append(f"head: an equilibrium of {config.head.layers} layers, solved by {config.head.solver}")
        additions.remove()
        report = None if config.solver is None else inspect_model(model, config.solver, example_inputs=example)
        steps = loaders.order.steps * config.epochs
        parameters = sum(parameter.numel() for parameter in model.parameters())
        size = (
            "" if splits.is_text else f", images of {'x'.join(map(str, image_settings(config, model)['input_size']))}"
        )
        lines = [
            f"data: {config.data.name}: {len(splits.train)} examples to train on, {len(splits.eval)} to evaluate on, "
            f"{len(splits.classes)} classes{size}",
            f"model: {config.model.spec} ({type(model).__name__}), {parameters:,} parameters, {config.model.dtype}",
            f"arms: {', '.join(arms_of(config))}",
            f"steps: {config.epochs} epochs of {loaders.order.steps} = {steps} for each arm, "
            f"{config.batch_size} examples each ({accelerator.num_processes} processes x {config.accumulation} passes "
            f"x {config.batch_size // accelerator.num_processes // config.accumulation})",
            f"optimizer: {type(optimizer).__name__}, lr {config.optimizer.lr:g}, "
            + ("constant" if config.schedule is None else f"schedule {config.schedule.sched}"),
            *added,
            *_cost(report, steps * config.batch_size),
            f"output: {config.output}",
        ]
        return RunPlan(config, tuple(lines), report)
    finally:
        end_processes(accelerator)


def _cost(report: Report | None, examples: int) -> list[str]:
    """Says what the solver costs; a backward pass takes about twice its forward pass."""
    if report is None or not report.totals["plain_flops"]:
        return []
    totals: dict[str, Any] = report.totals
    plain, solver = (3 * examples * totals[key] / 1e12 for key in ("plain_flops", "flops"))
    return [
        f"cost: all linear layers take about {plain:.3g} TFLOPs to train as they are, {solver:.3g} with the solver "
        f"({totals['flops'] / totals['plain_flops']:.3g}x)"
    ]
