"""Exports a trained model as a folder of safetensors and JSON, for ``solver_plugins.load``, timm and transformers."""

import copy
import shutil
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn

from solver_plugins.integrations import save
from solver_plugins.train.config import FinetuneConfig
from solver_plugins.train.launch import is_sharded
from solver_plugins.train.preparation import preprocessing_of


def skeleton_of(model: nn.Module, accelerator: Accelerator) -> nn.Module | None:
    """Returns a copy for the whole weights if training will shard them; else None."""
    return copy.deepcopy(model) if is_sharded(accelerator) else None


def export_model(
    config: FinetuneConfig, accelerator: Accelerator, model: nn.Module, weights: dict[str, Any] | None, folder: Path
) -> int:
    """Saves a trained model and returns the number of its parameters; call it in all processes.

    If training has sharded the weights, pass the copy of :func:`skeleton_of` and the whole ``weights``, which the first
    process loads into it.

    Raises:
        SavingError: If the model could not be loaded again.
    """
    if weights is not None and accelerator.is_main_process:
        model.load_state_dict(weights)
    if accelerator.is_main_process:
        # An earlier export may have been interrupted before its result was written.
        shutil.rmtree(folder, ignore_errors=True)
        training = model.training
        model.eval()
        args = {key: value for key, value in config.model.args.items() if key != "num_classes"}
        save(
            model, folder, model_args=args if config.model.spec.startswith("timm/") else None,
            preprocessing=preprocessing_of(config, model),
        )  # fmt: skip
        model.train(training)
    accelerator.wait_for_everyone()
    return sum(parameter.numel() for parameter in model.parameters())
