"""The processes of a run: an Accelerator for all of them, or a stand-in for one process by itself."""

import contextlib
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, LoggerType, ProjectConfiguration
from torch import Tensor, nn

from solver_plugins.errors import OptionError, did_you_mean
from solver_plugins.train.config import FinetuneConfig
from solver_plugins.train.errors import LaunchError


class Alone:
    """The parts of an Accelerator that the training loop uses, for a process that trains by itself.

    Unlike an Accelerator it never creates a process group, even in a launch of several processes. The cells of a study
    need this: each process measures its own cells, but ``calibrate`` and ``ProxProp`` communicate within any group.
    """

    num_processes = 1
    process_index = 0
    gradient_accumulation_steps = 1
    sync_gradients = True

    def __init__(self, device: torch.device | None = None, talks: bool = False):
        self.device = device or torch.device("cpu")
        self.is_main_process = self.is_local_main_process = talks

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        return model.to(self.device), optimizer

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        return model

    def accumulate(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def clip_grad_norm_(self, parameters: Iterable[nn.Parameter], most: float) -> Tensor:
        return nn.utils.clip_grad_norm_(parameters, most)

    def gather(self, own: Any) -> Any:
        return own

    gather_for_metrics = gather


def make_accelerator(config: FinetuneConfig, logs: str | None = None) -> Accelerator:
    """Makes the Accelerator of a run or, given a folder for logs, of one of its arms."""
    # Explicit on machines without GPUs: a launch config for GPUs would otherwise leave out the process group.
    cpu = not torch.accelerator.is_available()
    if cpu and config.precision == "fp16":
        raise OptionError("precision 'fp16' needs a GPU, and there is none here; use 'bf16' or 'no'.")
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        raise LaunchError(
            "DeepSpeed replaces the optimiser and the Parameters, which solver blocks and checkpoints need. Use DDP "
            "(configs/accelerate/multi_gpu.yaml) or FSDP2 (configs/accelerate/fsdp.yaml)."
        )
    _check_trackers(config.trackers)
    started = int(os.environ.get("WORLD_SIZE", "1"))
    try:
        made = Accelerator(
            cpu=cpu,
            mixed_precision=config.precision,
            gradient_accumulation_steps=config.accumulation,
            log_with=(list(config.trackers) or None) if logs else None,
            project_config=ProjectConfiguration(project_dir=logs, logging_dir=logs),
            step_scheduler_with_optimizer=False,
        )
    except (ValueError, RuntimeError) as error:
        if started == 1:
            raise
        raise LaunchError(
            f"WORLD_SIZE says that {started} processes were started, but they cannot find each other: {error}. Use "
            "`accelerate launch`, or unset WORLD_SIZE."
        ) from error
    if started != made.num_processes:
        raise LaunchError(
            f"{started} processes were started, but this one believes it is one of {made.num_processes}: each would "
            "train alone and write over the others. Launch with `accelerate launch --multi_gpu --num_processes "
            f"{started}` (with ACCELERATE_USE_CPU=true on a machine without GPUs)."
        )
    if os.environ.get("ACCELERATE_USE_FSDP") == "true" and made.distributed_type == DistributedType.MULTI_CPU:
        _shard_over_gloo(made)
    if is_sharded(made) and not made.is_fsdp2:
        raise LaunchError(
            "FSDP 1 flattens weights, which solver blocks have to read as matrices. Set fsdp_version: 2 in the launch "
            "config, as configs/accelerate/fsdp.yaml does."
        )
    return made


def _check_trackers(names: Sequence[str]) -> None:
    known = {str(name) for name in LoggerType} - {"all"}
    there = {str(name) for name in get_available_trackers()}
    for name in names:
        if name not in known:
            raise OptionError(f"Accelerate has no tracker {name!r}.{did_you_mean(name, known)}")
        if name not in there:
            raise OptionError(f"The tracker {name!r} is not installed: pip install {name}.")


def _shard_over_gloo(made: Accelerator) -> None:
    """Shards on the CPU: torch can do it over gloo, but Accelerate does not list the CPU among its devices."""
    plugin = FullyShardedDataParallelPlugin()
    if made.mixed_precision != "no":
        plugin.set_mixed_precision(made.mixed_precision)
    made.state.fsdp_plugin = plugin
    # Every new state copies what the partial one says.
    for state in (made.state._shared_state, PartialState._shared_state):
        state["distributed_type"] = DistributedType.FSDP


def first_process() -> bool:
    """Whether this is the first process, which prints; works before there is an Accelerator."""
    return int(os.environ.get("RANK", "0")) == 0


def end_processes(accelerator: Accelerator | None) -> None:
    """Ends trackers and the process group, also after an error."""
    if accelerator is not None:
        accelerator.end_training()
    # Accelerate remembers a process's first Accelerator, but the next run may have another precision.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def is_sharded(accelerator: Any) -> bool:
    """Whether the weights are sharded over the processes (FSDP)."""
    return str(accelerator.distributed_type).endswith("FSDP")
