"""Tiny runs on the embedded digits, in this process and in others."""

import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from solver_plugins.errors import SolverPluginsError
from solver_plugins.train import FinetuneConfig

VIT = {"img_size": 8, "patch_size": 4, "in_chans": 1, "depth": 1, "embed_dim": 32, "act_layer": "relu"}
DIGITS = {"name": "digits", "train": "train[:64]", "eval": "test[:37]"}


def options(output: Path, **changes: Any) -> dict[str, Any]:
    """Returns the options of a run of four steps an epoch; 37 examples to evaluate on never fill a batch."""
    base = {
        "model": {"spec": "timm/test_vit", "args": VIT},
        "solver": {"name": "proxgd", "iters": 3},
        "data": DIGITS,
        "epochs": 1,
        "batch_size": 16,
        "schedule": None,
        "baseline": False,
        "output": str(output),
    }
    return {**base, **changes}


def tiny(output: Path, **changes: Any) -> FinetuneConfig:
    return FinetuneConfig.parse(options(output, **changes))


def everything(output: Path, **changes: Any) -> FinetuneConfig:
    """A run that uses all that has a state: sampling solvers, augmentation, mixup, EMA, accumulation, a schedule."""
    args = {**VIT, "proj_drop_rate": 0.2, "drop_rate": 0.2}
    return tiny(
        output,
        model={"spec": "timm/test_vit", "args": args},
        solver={"name": "proxsg", "iters": 2},
        augmentation={"scale": [0.7, 1.0], "hflip": 0.0},
        mixup={"mixup": 0.4},
        ema={"decay": 0.9},
        accumulation=2,
        schedule={"sched": "cosine"},
        epochs=2,
        checkpoints={"every": 1, "keep": 2},
        **changes,
    )


def weights(output: Path, arm: str = "solver") -> Any:
    return load_file(output / arm / "model" / "model.safetensors")


def spawning() -> Any:
    """Returns a context whose processes start fast: their server has imported everything once."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["solver_plugins.train.finetune", "timm", "datasets"])
    return made


def run_as(
    rank: int,
    world: int,
    port: int,
    config: FinetuneConfig,
    resume: bool = False,
    environment: dict[str, str] | None = None,
) -> None:
    """Runs one of several processes, as a launcher starts it; exits with 2 for a user's mistake, as the command."""
    os.environ.update(environment or {})
    if world > 1:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), ACCELERATE_USE_CPU="true",
        )  # fmt: skip
    from solver_plugins.train.finetune import finetune

    try:
        finetune(config, resume=resume)
    except SolverPluginsError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
