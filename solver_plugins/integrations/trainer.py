"""transformers' Trainer: certified step sizes, their state in the logs, and runs that are resumed as the same run."""

import functools
import math
from pathlib import Path
from typing import Any, Self

from torch import nn
from transformers.trainer_callback import DefaultFlowCallback, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from solver_plugins.blocks import blocks_of, gates_of, refresh_steps, separate_gates
from solver_plugins.errors import OptionError, SolverPluginsWarning, warn
from solver_plugins.integrations.steps import STEPS, read_steps, write_steps
from solver_plugins.surgery import ConversionError, solver_report


class SolverCallback(TrainerCallback):
    """Keeps the step sizes of a converted model certified: ``Trainer(..., callbacks=[SolverCallback()])``.

    It certifies the step sizes at the end of each epoch (as the paper does), every ``every_steps`` steps if asked to,
    and before each evaluation. It logs how far the weights have moved since. It also writes the state of the steps into
    each checkpoint, and a resumed run reads it, which makes resumed runs equal to the bit.

    Logged are ``solver_staleness``, the largest relative change of a block's constant since its last certificate, and,
    where gradients are implicit, ``solver_residual``, the largest one that a solve has left. They are in
    ``trainer.state.log_history`` and in what the Trainer prints. The Trainer calls its trackers before callbacks that
    it is given; ``SolverCallback().add_to(trainer)`` comes before them.

    Gates (``convert_model(..., gate=)``) need a learning rate of their own and no weight decay:
    ``SolverCallback().add_to(trainer)`` gives them a group of the optimizer. Or pass the Trainer an optimizer made from
    :func:`solver_plugins.param_groups`.

    Args:
        every_epoch: Whether to certify at the end of each epoch.
        every_steps: Certify after every this many steps, too; None for not.
        before_evaluation: Whether to certify before each evaluation during training. Blocks do so by themselves unless
            ``SolverBlock.certify_in_evaluation`` is off.
        tolerance: How far above the truth a certified constant may be.
        log: Whether to add to the logs.
        gate_rate: The learning rate of gates over that of weights, with :meth:`add_to`.
    """

    def __init__(
        self,
        every_epoch: bool = True,
        every_steps: int | None = None,
        before_evaluation: bool = True,
        tolerance: float = 0.1,
        log: bool = True,
        gate_rate: float = 10.0,
    ) -> None:
        if every_steps is not None and (isinstance(every_steps, bool) or every_steps < 1):
            raise OptionError(f"Expected every_steps of 1 or more, or None; found {every_steps!r}.")
        for name, value in (("tolerance", tolerance), ("gate_rate", gate_rate)):
            if not 0 < value < math.inf:
                raise OptionError(f"Expected a {name} above zero; found {value!r}.")
        self.every_epoch = every_epoch
        self.every_steps = every_steps
        self.before_evaluation = before_evaluation
        self.tolerance = tolerance
        self.log = log
        self.gate_rate = gate_rate
        self._certified_at: int | None = None

    def add_to(self, trainer: Any) -> Self:
        """Adds the callback to a Trainer before its trackers, which then see what it logs, and gives gates a group."""
        callbacks = trainer.callback_handler.callbacks
        flow = next((i for i, other in enumerate(callbacks) if isinstance(other, DefaultFlowCallback)), -1)
        # Behind that one, which says whether a step is followed by an evaluation.
        callbacks.insert(flow + 1, self)
        create = trainer.create_optimizer

        @functools.wraps(create)
        def create_optimizer(*args: Any, **kwargs: Any) -> Any:
            given, made = trainer.optimizer, create(*args, **kwargs)
            if given is None:
                # Before a schedule is made for it, and before a checkpoint is loaded into it.
                separate_gates(trainer.model, made, self.gate_rate)
            return made

        trainer.create_optimizer = create_optimizer
        return self

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if not _converted(model):
            raise ConversionError(
                f"SolverCallback expects a converted model; found {type(model).__name__} without a solver block. "
                "Convert it with solver_plugins.convert_model before the Trainer is made, or leave the callback out."
            )
        self._certified_at = None
        _check_groups(model, kwargs.get("optimizer"))
        if state.global_step:
            self._resume(args, state, model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        due = self.every_steps is not None and state.global_step % self.every_steps == 0
        if due or (self.before_evaluation and control.should_evaluate):
            self._certify(model, state.global_step)

    def on_epoch_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self.every_epoch or (self.before_evaluation and control.should_evaluate):
            self._certify(model, state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        folder = _checkpoint(args, state)
        if args.should_save and folder.is_dir():
            write_steps(model, folder)

    def on_log(
        self, args: Any, state: Any, control: Any, model: Any = None, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        # Not to the summary at the end of training, nor to the metrics of an evaluation.
        if not self.log or logs is None or "loss" not in logs or not _converted(model):
            return
        found = _state_of(model)
        logs.update(found)
        if state.log_history:
            state.log_history[-1].update(found)

    def _certify(self, model: nn.Module, step: int) -> None:
        # An epoch may end where an evaluation has just been: the weights are the same.
        if step != self._certified_at:
            refresh_steps(model, tolerance=self.tolerance)
            self._certified_at = step

    def _resume(self, args: Any, state: Any, model: nn.Module) -> None:
        given = args.resume_from_checkpoint
        places = [Path(given)] if isinstance(given, str) and Path(given).is_dir() else []
        places.append(_checkpoint(args, state))
        for folder in places:
            if (folder / STEPS).is_file():
                read_steps(model, folder)
                return
        warn(
            f"No {STEPS} in {' or '.join(repr(str(place)) for place in places)}: the run goes on with step sizes "
            "certified for the weights of the checkpoint, not with those that it had. Where the checkpoint is "
            "elsewhere, set TrainingArguments(resume_from_checkpoint=...).",
            SolverPluginsWarning,
        )


def _check_groups(model: nn.Module, optimizer: Any) -> None:
    """Warns where gates are trained as weights are."""
    gates = {id(one) for one in gates_of(model).values()}
    for group in getattr(optimizer, "param_groups", ()):
        inside = [id(one) in gates for one in group["params"]]
        if any(inside) and (group.get("weight_decay") or not all(inside)):
            warn(
                "The gates of this model are trained at the rate of its weights, with their weight decay. Add the "
                "callback by SolverCallback().add_to(trainer), which gives them a group of their own, or pass the "
                "Trainer an optimizer made from solver_plugins.param_groups(model, lr).",
                SolverPluginsWarning,
            )
            return


def _checkpoint(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


def _converted(model: Any) -> bool:
    return isinstance(model, nn.Module) and bool(blocks_of(model))


def _state_of(model: nn.Module) -> dict[str, float]:
    blocks = solver_report(model).blocks
    drifts = [abs(block.drift - 1) for block in blocks if block.drift is not None]
    residuals = [block.residual for block in blocks if block.residual is not None]
    found = {"solver_staleness": drifts, "solver_residual": residuals}
    return {name: max(values) for name, values in found.items() if values}
