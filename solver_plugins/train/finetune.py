"""A whole finetuning run: trains the model with its solver and the plain baseline, exports and compares them."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from timm.utils.model_ema import ModelEmaV3
from torch import nn
from tqdm.auto import tqdm

from solver_plugins.blocks import blocks_of, set_blend
from solver_plugins.errors import OptionError, SolverPluginsError
from solver_plugins.train import outputs
from solver_plugins.train.adapters import Adapters
from solver_plugins.train.additions import Additions
from solver_plugins.train.arms import arms_of, make_arm
from solver_plugins.train.best import BestWeights
from solver_plugins.train.checkpoints import Checkpoints
from solver_plugins.train.classification import Classification
from solver_plugins.train.comparison import write_report
from solver_plugins.train.config import FinetuneConfig
from solver_plugins.train.data import Batch, Loaders, Splits, load_splits
from solver_plugins.train.diagnosis import block_rows, worst_block
from solver_plugins.train.errors import OutputError
from solver_plugins.train.evaluate import Scores, evaluate
from solver_plugins.train.export import export_model, skeleton_of
from solver_plugins.train.launch import end_processes, is_sharded, make_accelerator
from solver_plugins.train.loop import Action, Hooks, Loop, refresh_every
from solver_plugins.train.models import DTYPES
from solver_plugins.train.optimizer import TrainSettings
from solver_plugins.train.state import StepSizes
from solver_plugins.train.trainable import Trainable, prepare_memory


def finetune(config: FinetuneConfig, *, resume: bool = False, overwrite: bool = False) -> dict[str, Any]:
    """Finetunes, evaluates and saves what a config describes; call it in every process of a launch.

    Args:
        config: The run.
        resume: Whether to continue a run in the output folder, which then ends as if it had never been interrupted. If
            there is none, a new run starts.
        overwrite: Whether to replace a run in the output folder.

    Returns:
        The results of each arm, as in ``results.json``.
    """
    if resume and overwrite:
        raise OutputError("Expected --resume or --overwrite; found both.")
    accelerator = None
    try:
        accelerator = make_accelerator(config)
        splits = load_splits(config.data)
        folder = Path(config.output).expanduser()
        data = splits.identity()
        _in_first_process(accelerator, lambda: outputs.check_output(config, resume, overwrite))
        if resume:
            _in_first_process(accelerator, lambda: outputs.check_data(config, data))
        results: dict[str, dict[str, Any]] = {}
        for name in arms_of(config):
            done = _finished(folder / name, config.epochs) if resume else None
            if done is None:
                accelerator = make_accelerator(config, str(folder / "logs"))
                arm = FinetunedArm(config, accelerator, splits, folder / name, name)
                if not results:
                    # Not before the model is built and converted: a mistake in the config leaves no folder behind.
                    _in_first_process(accelerator, lambda: outputs.start_output(config, resume, data))
                done = arm.train(resume)
            results[name] = done
        if accelerator.is_main_process:
            outputs.write_whole(folder / outputs.RESULTS, json.dumps(results, indent=2))
            write_report(folder / outputs.REPORT, config, results, {name: _rows(folder / name) for name in results})
        accelerator.wait_for_everyone()
        return results
    finally:
        outputs.unlock(Path(config.output).expanduser() / outputs.LOCK)
        end_processes(accelerator)


def _in_first_process(accelerator: Accelerator, do: Callable[[], None]) -> None:
    """Does something in the first process; all processes stop if it fails."""
    said: list[str | None] = [None]
    if accelerator.is_main_process:
        try:
            do()
        except (SolverPluginsError, OSError) as error:
            said = [str(error)]
    broadcast_object_list(said)
    if said[0] is not None:
        raise OutputError(said[0])


def _finished(folder: Path, epochs: int) -> dict[str, Any] | None:
    """Returns the result of a model that was trained for these epochs; it is the last file written."""
    try:
        found: dict[str, Any] = json.loads((folder / outputs.RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if found.get("epochs") == epochs else None


def _rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / outputs.METRICS).read_text(encoding="utf-8").splitlines()]


def flat_options(config: FinetuneConfig) -> dict[str, Any]:
    """Returns the options under dotted names, for trackers, which take numbers and texts alone."""

    def walk(options: Mapping[str, Any], place: str) -> Iterator[tuple[str, Any]]:
        for key, value in options.items():
            if isinstance(value, Mapping):
                yield from walk(value, f"{place}{key}.")
            else:
                yield f"{place}{key}", value if isinstance(value, (bool, int, float, str)) else str(value)

    return dict(walk(config.options(), ""))


def train_settings(config: FinetuneConfig) -> TrainSettings:
    """Returns the settings of the training loop."""
    return TrainSettings(config.epochs, config.optimizer, config.schedule)


class FinetunedArm:
    """One model of a run. Making it writes nothing; :meth:`train` does."""

    def __init__(self, config: FinetuneConfig, accelerator: Accelerator, splits: Splits, folder: Path, name: str):
        self.config, self.accelerator, self.folder, self.name = config, accelerator, folder, name
        self.dtype = DTYPES[config.model.dtype]
        model, loaders = make_arm(config, splits, name, accelerator.num_processes)
        self.adapters = None if config.peft is None else self._adapted(model)
        prepare_memory(config, model)
        self.trainable = Trainable(config, model)
        # The optimiser knows every Parameter that is trained at some time.
        self.trainable.start(config.epochs)
        if self.trainable.later and accelerator.num_processes > 1:
            raise OptionError(
                "unfreeze needs a single process: DDP and FSDP share the gradients of the Parameters that are trained "
                "from the start. Leave it out, or train in two runs."
            )
        if config.blend is not None and blocks_of(model):
            # Not one, which would leave the blocks, and a checkpoint of them, without a number to change.
            set_blend(model, 0.0)
        self.skeleton = skeleton_of(model, accelerator)
        self.solving = bool(blocks_of(model))
        self.ema = self._average(model)
        self.problem = splits.problem
        self.best = BestWeights(config.best, folder / outputs.BEST, accelerator, splits.problem, len(splits.classes))
        train, self.evaluation = accelerator.prepare(loaders.train, loaders.eval)
        batches = Loaders(train, loaders.order, self.evaluation)
        self.notes = splits.notes()
        if batches.left_out:
            self.notes.append(
                f"each epoch leaves out {batches.left_out} examples, which do not fill a batch; others each time"
            )
        # Only for the solver; the average of the weights was copied above and needs none.
        additions = Additions(config.proxprop, config.regularizer) if name == "solver" else Additions()
        mixup = None if config.mixup is None else (config.mixup, len(splits.classes))
        objective = Classification(
            accelerator, self.dtype, config.label_smoothing, mixup, additions.penalty,
            None if config.class_weights is None else splits.weights(config.class_weights).to(accelerator.device),
            splits.problem,
        )  # fmt: skip
        self.classes = list(splits.classes)
        self.checkpoints = Checkpoints(folder / outputs.CHECKPOINTS, config.checkpoints.keep, accelerator)
        before = () if self.trainable.is_everything else (lambda loop: self.trainable.start(loop.progress.epoch + 1),)
        hooks = Hooks(self._after_step(batches.steps), (self._end_epoch,), self._advice, before)
        self.loop = Loop(model, batches, objective, train_settings(config), hooks, accelerator, name)
        additions.attach(self.loop.inner, self.loop.optimizer)
        if config.compile:
            self.loop.inner.compile()
        kept: list[Any] = [self.loop.progress, StepSizes(self.loop.inner)]
        if self.ema is not None:
            kept += [self.ema, StepSizes(self.ema.module)]
        accelerator.register_for_checkpointing(*kept)

    def _adapted(self, model: nn.Module) -> Adapters:
        if is_sharded(self.accelerator):
            raise OptionError("peft needs whole weights in each process, which FSDP does not have; leave one out.")
        return Adapters(self.config, model)

    def _average(self, model: nn.Module) -> ModelEmaV3 | None:
        if self.config.ema is None:
            return None
        if is_sharded(self.accelerator):
            raise OptionError("ema needs whole weights in each process, which FSDP does not have; leave one out.")
        model.to(self.accelerator.device)
        return ModelEmaV3(model, decay=self.config.ema.decay, use_warmup=self.config.ema.warmup)

    def _after_step(self, steps: int) -> list[Action]:
        actions: list[Action] = [] if self.config.blend is None else [lambda loop: self._blend()]
        if (ema := self.ema) is not None:
            actions.append(lambda loop: ema.update(loop.inner, step=loop.progress.step))
        if self.solving:
            refresh = self.config.refresh
            actions.append(refresh_every(refresh if isinstance(refresh, int) else steps))
        if isinstance(every := self.config.checkpoints.every, int):
            actions.append(lambda loop: None if loop.progress.step % every else self._save())
        return actions

    def _blend(self, epoch: int | None = None) -> None:
        """Sets the blend of this moment, or of the end of an epoch, in every copy of the model."""
        if self.config.blend is None or not self.solving:
            return
        share = self.config.blend.at(self.loop.progress.step / self.loop.batches.steps if epoch is None else epoch)
        for model in (self.loop.inner, self.skeleton, None if self.ema is None else self.ema.module):
            if model is not None:
                set_blend(model, share)

    def train(self, resume: bool) -> dict[str, Any]:
        """Trains, evaluates and exports the model, if asked to from its last intact checkpoint.

        Returns:
            The result, which is the last file written.
        """
        accelerator, progress = self.accelerator, self.loop.progress
        if self.config.trackers:
            accelerator.init_trackers(self.name, flat_options(self.config))
        # From here on each process has its own random numbers, which are the same in every run.
        set_seed(self.config.seed, device_specific=True)
        if resume:
            self._resume()
        self._blend()
        self._write_rows()
        for note in self.notes if not progress.step else ():
            self._say(f"{self.name}: {note}.")
        self.loop.run()
        averaged = self.loop.inner if self.ema is None else self.ema.module
        best_epoch = self.best.restore(averaged, progress.rows)
        self._blend(best_epoch)
        scores = self._scores("final", self.config.trials)
        model, place = averaged, self.folder / outputs.MODEL
        if self.adapters is not None:
            model, place = self._without_adapters(averaged)
        weights = None if self.skeleton is None else accelerator.get_state_dict(self.loop.model)
        parameters = export_model(self.config, accelerator, self.skeleton or model, weights, place)
        result = {
            **scores.flat(),
            "problem_type": self.problem.name,
            "train_loss": progress.rows[-1]["train_loss"],
            "epochs": self.config.epochs,
            "epoch": best_epoch or progress.epoch,
            "classes": self.classes,
            "steps": progress.step,
            "seconds": round(progress.seconds, 2),
            "parameters": parameters,
            "model": str(place),
        }
        if self.adapters is not None:
            result["adapter"] = str(self.folder / outputs.ADAPTER)
        if accelerator.is_main_process:
            outputs.write_whole(self.folder / outputs.RESULT, json.dumps(result, indent=2))
        accelerator.wait_for_everyone()
        accelerator.free_memory()
        return result

    def _without_adapters(self, trained: nn.Module) -> tuple[nn.Module, Path]:
        """Saves the adapters, and returns the model to export and its place."""
        adapters = self.adapters
        assert adapters is not None
        if trained is not self.loop.inner:
            self.loop.inner.load_state_dict(trained.state_dict())
        main = self.accelerator.is_main_process
        model = adapters.take_off(self.folder / outputs.ADAPTER if main else None)
        return model, self.folder / (outputs.MODEL if adapters.section.merge else outputs.BASE)

    def _say(self, text: str) -> None:
        """Prints a line above the progress bars, in the first process."""
        if self.accelerator.is_main_process:
            tqdm.write(text)

    def _resume(self) -> None:
        found, wrong = self.checkpoints.newest_whole()
        for text in wrong:
            self._say(f"{self.name}: {text}; using the one before.")
        if found is not None:
            self.checkpoints.load(found)
            self._say(f"{self.name}: continues from {found.name} (epoch {self.loop.progress.epoch + 1}).")

    def _end_epoch(self, loop: Loop) -> None:
        """Evaluates the model, records and logs the epoch, and saves a checkpoint if it is due."""
        progress, epochs = loop.progress, self.config.epochs
        scores = self._scores(progress.epoch - 1, 1)
        row: dict[str, Any] = {
            "arm": self.name,
            "epoch": progress.epoch,
            "step": progress.step,
            "train_loss": progress.epoch_loss,
            "eval_loss": scores.loss,
            **{f"eval_{key}": value for key, value in scores.measures.items()},
            "lr": loop.optimizer.param_groups[0]["lr"],
            "seconds": round(progress.seconds, 3),
        }
        if self.solving and not is_sharded(self.accelerator):
            row["blocks"] = block_rows(loop.inner, self.evaluation, self.dtype, (self.config.seed, progress.epoch - 1))
        progress.rows.append(row)
        self._write_rows()
        logged = {key: value for key, value in row.items() if key.startswith(("train_", "eval_", "lr"))}
        self.accelerator.log(
            {f"{self.name}/{key}": value for key, value in logged.items() if value is not None}, step=progress.step
        )
        self._say(
            f"{self.name} epoch {progress.epoch}/{epochs}: train loss {row['train_loss']:.4f}, "
            f"eval loss {scores.loss:.4f}, {self.problem.told_as(self.problem.main, scores.measures)}"
        )
        if self.best.look(loop.model if self.ema is None else self.ema.module, progress.rows):
            progress.stopped = True
            self._say(f"{self.name}: stops after epoch {progress.epoch}: nothing became better.")
        if self.config.checkpoints.every == "epoch" or progress.epoch == epochs or progress.stopped:
            self._save()

    def _save(self) -> None:
        self.loop.look()
        self.checkpoints.save(self.loop.progress.step)

    def _scores(self, moment: int | str, trials: int) -> Scores:
        """Evaluates the model, or the average of its weights if there is one."""
        model = self.loop.model if self.ema is None else self.ema.module
        place = (self.config.seed, "evaluation", moment)
        return evaluate(self.accelerator, model, self.evaluation, self.dtype, place, trials, self.problem)

    def _write_rows(self) -> None:
        if self.accelerator.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            outputs.write_rows(self.folder / outputs.METRICS, self.loop.progress.rows)

    def _advice(self, batch: Batch | None) -> str:
        """Returns what to tell the user when training has diverged."""
        where = ""
        if batch is not None and self.solving and not is_sharded(self.accelerator):
            where = worst_block(self.loop.inner, batch, self.dtype)
        kept = next((f"The last good checkpoint is kept: {path}." for path in self.checkpoints.found()),
                    "No checkpoint was written before it.")  # fmt: skip
        own = ", solver.calibrate, or a smaller solver.blend" if self.solving else ""
        return f"{where} {kept} A smaller optimizer.lr, a gradient clipped by optimizer.clip{own} may help."
