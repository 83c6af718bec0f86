"""The training loop for networks, which ``finetune`` and the studies share.

It knows batches, an objective, an optimiser and a schedule. Everything else (averages of the weights, step sizes,
evaluation, checkpoints) is an action that it calls after a step or after an epoch.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from tqdm.auto import tqdm

from solver_plugins.blocks import refresh_steps
from solver_plugins.prox.prior import in_float64
from solver_plugins.train.data import Batch
from solver_plugins.train.errors import DivergedError
from solver_plugins.train.launch import Alone
from solver_plugins.train.optimizer import TrainSettings, make_optimizer, make_schedule
from solver_plugins.train.state import Progress

WINDOW = 10
"""On a GPU, or with several processes, losses are read in groups of this many steps: reading waits for all of them."""

Objective = Callable[[nn.Module, Batch], Tensor]
"""Returns the loss of a model on a batch."""
Action = Callable[["Loop"], None]
"""Something that is done after a step or an epoch."""


class Batches(Protocol):
    """Training data, epoch by epoch."""

    @property
    def steps(self) -> int:
        """How many optimiser steps an epoch has."""

    def start(self, epoch: int, step: int) -> Iterable[Batch]:
        """Returns the batches of an epoch that are left after this many steps of it."""


@dataclass(frozen=True)
class Hooks:
    """What a loop does besides its steps; actions run in the order given.

    Attributes:
        after_step: Called when the optimiser has taken a step.
        after_epoch: Called when an epoch is done and the weights are known to be finite.
        diverged: Returns what to add to the error when training diverges, given the batch if it is known.
        before_epoch: Called when an epoch begins, with the model in training mode.
    """

    after_step: Sequence[Action] = ()
    after_epoch: Sequence[Action] = ()
    diverged: Callable[[Batch | None], str] = lambda batch: ""
    before_epoch: Sequence[Action] = ()


class Loop:
    """Trains a model: make it, then call :meth:`run`.

    Args:
        model: The model.
        batches: What it is trained on.
        objective: What is minimised.
        settings: Optimiser, schedule and number of epochs.
        hooks: What happens after steps and epochs.
        accelerator: An Accelerator made for this model; a single process by itself by default.
        name: What messages and the progress bar call the model.

    Attributes:
        model: The model as Accelerate has wrapped it.
        inner: The unwrapped model.
        optimizer: Its optimiser, prepared.
        progress: How far training has come; load a state into it to continue from there.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Batches,
        objective: Objective,
        settings: TrainSettings,
        hooks: Hooks | None = None,
        accelerator: Accelerator | Alone | None = None,
        name: str = "the model",
    ):
        self.batches, self.objective, self.settings, self.name = batches, objective, settings, name
        self.hooks, self.accelerator = hooks or Hooks(), accelerator or Alone()
        optimizer = make_optimizer(settings, model)
        self.schedule = make_schedule(settings, optimizer, batches.steps)
        self.model: nn.Module
        self.optimizer: torch.optim.Optimizer
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.inner: nn.Module = self.accelerator.unwrap_model(self.model)
        self.progress = Progress()
        self._window: list[tuple[int, Tensor, Batch]] = []
        waits = self.accelerator.num_processes > 1 or self.accelerator.device.type != "cpu"
        self._window_size = WINDOW if waits else 1
        self._clocks = (0.0, 0.0)

    def run(self) -> Progress:
        """Trains to the end."""
        progress, epochs = self.progress, self.settings.epochs
        bar = tqdm(
            total=epochs * self.batches.steps, initial=progress.step, desc=self.name, unit="step", leave=False,
            disable=None if self.accelerator.is_main_process else True,
        )  # fmt: skip
        with bar:
            while progress.epoch < epochs and not progress.stopped:
                bar.set_postfix_str(f"epoch {progress.epoch + 1}/{epochs}")
                self._epoch(bar)
        return progress

    def _epoch(self, bar: "tqdm[None]") -> None:
        progress = self.progress
        self.model.train()
        for action in self.hooks.before_epoch:
            action(self)
        self._clocks = (time.perf_counter(), time.process_time())
        for batch in self.batches.start(progress.epoch, progress.step_in_epoch):
            with self.accelerator.accumulate(self.model):
                loss = self._pass(batch)
                stepped = self.accelerator.sync_gradients
            self._window.append((progress.step + 1, loss, batch))
            if len(self._window) >= self._window_size:
                self.look()
            if not stepped:
                continue
            progress.step += 1
            progress.step_in_epoch += 1
            if self.schedule is not None:
                self.schedule.step_update(progress.step)
            self._count_time()
            for action in self.hooks.after_step:
                action(self)
            bar.update()
        self.look()
        self._check_weights()
        self._count_time()
        progress.epoch_loss = progress.loss / self.batches.steps
        progress.epoch += 1
        progress.step_in_epoch, progress.loss = 0, 0.0
        for action in self.hooks.after_epoch:
            action(self)

    def _pass(self, batch: Batch) -> Tensor:
        """Runs one forward and backward pass, steps the optimiser if due, and returns the loss."""
        loss = self.objective(self.model, batch)
        if self._window_size == 1 and not math.isfinite(value := float(loss.detach())):
            # Checked before the step, which would spoil the weights.
            self._stop(f"The loss of {self.name} is {value} at step {self.progress.step + 1}", batch)
        self.accelerator.backward(loss)
        if self.accelerator.sync_gradients and self.settings.optimizer.clip is not None:
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.settings.optimizer.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def _count_time(self) -> None:
        before, self._clocks = self._clocks, (time.perf_counter(), time.process_time())
        self.progress.seconds += self._clocks[0] - before[0]
        self.progress.cpu_seconds += self._clocks[1] - before[1]

    def look(self) -> None:
        """Reads the losses of the last steps from all processes; raises DivergedError if one is not finite."""
        if not self._window:
            return
        losses = self.accelerator.gather(torch.stack([loss for _, loss, _ in self._window]).unsqueeze(0))
        for (step, _, batch), value in zip(self._window, in_float64(losses).mean(0).tolist(), strict=True):
            if not math.isfinite(value):
                self._stop(f"The loss of {self.name} is {value} at step {step}", batch)
            self.progress.loss += value / self.accelerator.gradient_accumulation_steps
            self.progress.last_loss = value
        self._window.clear()

    def _check_weights(self) -> None:
        """Raises DivergedError if the last step made a weight infinite, which no loss has shown yet."""
        # If the weights are sharded, each process checks its own part.
        own = [getattr(one, "to_local", lambda one=one: one)() for one in self.inner.parameters() if one.requires_grad]
        finite = torch.stack([torch.isfinite(one.detach()).all() for one in own]).all()
        if not bool(self.accelerator.gather(finite.reshape(1)).all()):
            self._stop(f"The weights of {self.name} are not finite after step {self.progress.step}", None)

    def _stop(self, found: str, batch: Batch | None) -> NoReturn:
        raise DivergedError(f"{found} (epoch {self.progress.epoch + 1}).{self.hooks.diverged(batch)}")


def refresh_every(steps: int) -> Action:
    """Returns an action that certifies the step sizes of all solver blocks every this many steps."""

    def refresh(loop: Loop) -> None:
        if loop.progress.step % steps == 0:
            # If training has diverged, the loss gives a clearer error than weights without a step size.
            loop.look()
            refresh_steps(loop.inner)

    return refresh
