"""The training loop of one arm, on Accelerate."""

import math
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from timm.data.mixup import Mixup
from timm.loss.cross_entropy import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2  # type: ignore[attr-defined]
from timm.scheduler.scheduler_factory import create_scheduler_v2
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn
from tqdm.auto import tqdm

from solver_plugins.blocks import blocks_of, refresh_steps
from solver_plugins.errors import OptionError
from solver_plugins.train.additions import Additions
from solver_plugins.train.checkpoints import Checkpoints
from solver_plugins.train.config import FinetuneConfig
from solver_plugins.train.data import Batch, Loaders
from solver_plugins.train.diagnosis import block_rows, worst_block
from solver_plugins.train.errors import DivergedError
from solver_plugins.train.evaluate import Scores, evaluate, logits_of
from solver_plugins.train.models import DTYPES
from solver_plugins.train.outputs import CHECKPOINTS, METRICS, write_rows
from solver_plugins.train.processes import is_sharded
from solver_plugins.train.state import Progress, StepSizes

WINDOW = 10
"""So many steps of an accelerator, or of several processes, share one look at their losses: looking waits for all."""


def make_optimizer(config: FinetuneConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Makes the optimiser with timm's factory.

    Raises:
        OptionError: If timm does not know it, or its arguments.
    """
    section = config.optimizer
    try:
        made: torch.optim.Optimizer = create_optimizer_v2(
            model, section.opt, section.lr, section.weight_decay, section.momentum, layer_decay=section.layer_decay,
            **section.args,
        )  # fmt: skip
    except (ValueError, TypeError, RuntimeError, AssertionError) as error:
        raise OptionError(f"timm cannot make the optimizer {section.opt!r} with {section.args}: {error}") from error
    return made


def make_schedule(config: FinetuneConfig, optimizer: torch.optim.Optimizer, steps: int) -> Any:
    """Makes timm's schedule, which is told the number of every step; None for a constant rate."""
    section = config.schedule
    if section is None:
        return None
    made, _ = create_scheduler_v2(
        optimizer, section.sched, config.epochs, decay_epochs=section.decay_epochs,
        decay_milestones=section.decay_milestones, decay_rate=section.decay_rate, min_lr=section.min_lr,
        warmup_lr=section.warmup_lr, warmup_epochs=section.warmup_epochs, step_on_epochs=False, updates_per_epoch=steps,
    )  # fmt: skip
    return made


class Loop:
    """Trains one model; :meth:`run` does it all.

    Args:
        config: Of the run.
        accelerator: Made for this arm alone.
        model: The model, converted or not.
        loaders: What it reads.
        folder: Where its checkpoints and measurements go.
        name: Of the arm.
        classes: How many there are.
    """

    def __init__(
        self,
        config: FinetuneConfig,
        accelerator: Accelerator,
        model: nn.Module,
        loaders: Loaders,
        folder: Path,
        name: str,
        classes: int,
    ):
        self.config, self.accelerator, self.folder, self.name = config, accelerator, folder, name
        self.order, self.dtype = loaders.order, DTYPES[config.model.dtype]
        self.solving = bool(blocks_of(model))
        self.ema = None
        if config.ema is not None:
            if is_sharded(accelerator):
                raise OptionError("ema needs whole weights in each process, which FSDP does not have; leave one out.")
            model.to(accelerator.device)
            self.ema = ModelEmaV3(model, decay=config.ema.decay, use_warmup=config.ema.warmup)
        optimizer = make_optimizer(config, model)
        self.schedule = make_schedule(config, optimizer, self.order.steps)
        self.model, self.optimizer, self.train_loader, self.eval_loader = accelerator.prepare(
            model, optimizer, loaders.train, loaders.eval
        )
        self.inner: nn.Module = accelerator.unwrap_model(self.model)
        # The baseline has none of them; an average of the weights, copied above, needs none.
        self.additions = Additions(config, self.inner, self.optimizer) if name == "solver" else None
        self.mixup, self.loss = self._loss(classes)
        self.progress = Progress()
        kept: list[Any] = [self.progress, StepSizes(self.inner)]
        if self.ema is not None:
            kept += [self.ema, StepSizes(self.ema.module)]
        accelerator.register_for_checkpointing(*kept)
        self.checkpoints = Checkpoints(folder / CHECKPOINTS, config.checkpoints.keep, accelerator)
        self.window: list[tuple[int, Tensor, Batch]] = []
        alone = accelerator.num_processes == 1 and accelerator.device.type == "cpu"
        self.window_size = 1 if alone else WINDOW

    def _loss(self, classes: int) -> tuple[Any, nn.Module]:
        section, smoothing = self.config.mixup, self.config.label_smoothing
        if section is None:
            return None, nn.CrossEntropyLoss(label_smoothing=smoothing)
        mixup = Mixup(
            section.mixup, section.cutmix, prob=section.prob, switch_prob=section.switch_prob,
            label_smoothing=smoothing, num_classes=classes,
        )  # fmt: skip
        return mixup, SoftTargetCrossEntropy()

    @property
    def evaluated(self) -> nn.Module:
        """The model that counts: the average, where there is one."""
        return self.model if self.ema is None else self.ema.module

    def say(self, text: str) -> None:
        """Prints a line beside the progress bars, in the first process."""
        if self.accelerator.is_main_process:
            tqdm.write(text)

    def run(self, resume: bool) -> Scores:
        """Trains to the end, from the last whole checkpoint if asked to, and returns the final scores.

        Raises:
            DivergedError: If the loss is not finite.
            CheckpointError: If a checkpoint cannot be written, or none of several can be read.
        """
        # From here on each process draws its own numbers: solvers sample differently, and the same in every run.
        set_seed(self.config.seed, device_specific=True)
        if resume:
            self._resume()
        self._write_rows()
        while self.progress.epoch < self.config.epochs:
            self._epoch()
        return self._scores("final", self.config.trials)

    def _resume(self) -> None:
        found, wrong = self.checkpoints.newest_whole()
        for text in wrong:
            self.say(f"{self.name}: {text}; using the one before.")
        if found is not None:
            self.checkpoints.load(found)
            self.say(f"{self.name}: continues from {found.name} (epoch {self.progress.epoch + 1}).")

    def _epoch(self) -> None:
        progress, order = self.progress, self.order
        order.epoch, order.skip = progress.epoch, progress.step_in_epoch * self.config.batch_size
        self.model.train()
        bar = tqdm(
            total=order.steps, initial=progress.step_in_epoch, unit="step", leave=False,
            desc=f"{self.name} {progress.epoch + 1}/{self.config.epochs}",
            disable=None if self.accelerator.is_main_process else True,
        )  # fmt: skip
        start = time.perf_counter()
        with bar:
            for batch in self.train_loader if progress.step_in_epoch < order.steps else ():
                with self.accelerator.accumulate(self.model):
                    loss = self._pass(batch)
                    stepped = self.accelerator.sync_gradients
                self.window.append((progress.step + 1, loss, batch))
                if len(self.window) >= self.window_size:
                    self._look()
                if not stepped:
                    continue
                progress.step += 1
                progress.step_in_epoch += 1
                self._after_step()
                bar.update()
                if isinstance(self.config.checkpoints.every, int) and self._due(self.config.checkpoints.every):
                    progress.seconds += time.perf_counter() - start
                    start = time.perf_counter()
                    self._save()
        self._look()
        progress.seconds += time.perf_counter() - start
        self._end_epoch()

    def _pass(self, batch: Batch) -> Tensor:
        """One forward and backward pass, and the optimiser's step where it is due; returns the loss."""
        targets = batch["labels"]
        if self.mixup is not None:
            batch["image"], targets = self.mixup(batch["image"], targets)
        with self.accelerator.autocast():
            logits = logits_of(self.model, batch, self.dtype)
        loss: Tensor = self.loss(logits, targets.to(logits.dtype) if targets.is_floating_point() else targets)
        added = None if self.additions is None else self.additions.penalty(batch)
        if added is not None:
            loss = loss + added
        if self.window_size == 1:
            # Before the weights take a step that would spoil them.
            self._stop_unless_finite(self.progress.step + 1, loss, batch)
        self.accelerator.backward(loss)
        if self.accelerator.sync_gradients and self.config.optimizer.clip is not None:
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.optimizer.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def _after_step(self) -> None:
        step = self.progress.step
        if self.schedule is not None:
            self.schedule.step_update(step)
        if self.ema is not None:
            self.ema.update(self.inner, step=step)
        if self.solving and isinstance(self.config.refresh, int) and self._due(self.config.refresh):
            refresh_steps(self.inner)

    def _due(self, every: int) -> bool:
        return self.progress.step % every == 0

    def _look(self) -> None:
        """Adds the losses of the last steps up, over all processes, and stops the run if one is not finite."""
        if not self.window:
            return
        losses = self.accelerator.gather(torch.stack([loss for _, loss, _ in self.window]).unsqueeze(0))
        for (step, _, batch), value in zip(self.window, losses.double().mean(0).tolist(), strict=True):
            if not math.isfinite(value):
                self._stop(step, value, batch)
            self.progress.loss += value / self.config.accumulation
        self.window.clear()

    def _stop_unless_finite(self, step: int, loss: Tensor, batch: Batch) -> None:
        value = float(loss.detach())
        if not math.isfinite(value):
            self._stop(step, value, batch)

    def _stop(self, step: int, value: float, batch: Batch) -> None:
        kept = next((str(path) for path in self.checkpoints.found()), None)
        where = worst_block(self.inner, batch, self.dtype) if self.solving and not is_sharded(self.accelerator) else ""
        raise DivergedError(
            f"The loss of {self.name} is {value} at step {step} (epoch {self.progress.epoch + 1}).{where} "
            + (f"The last good checkpoint is kept: {kept}. " if kept else "No checkpoint was written before it. ")
            + "A smaller optimizer.lr, optimizer.clip, solver.calibrate, or a smaller solver.blend may help."
        )

    def _end_epoch(self) -> None:
        progress = self.progress
        if self.solving and self.config.refresh == "epoch":
            refresh_steps(self.inner)
        scores = self._scores(progress.epoch, 1)
        row: dict[str, Any] = {
            "arm": self.name,
            "epoch": progress.epoch + 1,
            "step": progress.step,
            "train_loss": progress.loss / self.order.steps,
            "eval_loss": scores.loss,
            "eval_accuracy": scores.accuracy,
            "lr": self.optimizer.param_groups[0]["lr"],
            "seconds": round(progress.seconds, 3),
        }
        if self.solving and not is_sharded(self.accelerator):
            row["blocks"] = block_rows(self.inner, self.eval_loader, self.dtype, (self.config.seed, progress.epoch))
        progress.rows.append(row)
        progress.epoch += 1
        progress.step_in_epoch, progress.loss = 0, 0.0
        self._write_rows()
        self.accelerator.log(
            {f"{self.name}/{key}": row[key] for key in ("train_loss", "eval_loss", "eval_accuracy", "lr")},
            step=progress.step,
        )
        self.say(
            f"{self.name} epoch {row['epoch']}/{self.config.epochs}: train loss {row['train_loss']:.4f}, "
            f"eval loss {scores.loss:.4f}, accuracy {scores.accuracy:.2f}%"
        )
        if self.config.checkpoints.every == "epoch" or progress.epoch == self.config.epochs:
            self._save()

    def _save(self) -> None:
        self._look()
        self.checkpoints.save(self.progress.step)

    def _scores(self, moment: int | str, trials: int) -> Scores:
        place = (self.config.seed, "evaluation", moment)
        return evaluate(self.accelerator, self.evaluated, self.eval_loader, self.dtype, place, trials)

    def _write_rows(self) -> None:
        if self.accelerator.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_rows(self.folder / METRICS, self.progress.rows)
