"""The finished model as a folder of safetensors and JSON, for ``solver_plugins.load``, timm and transformers."""

import copy
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from torch import nn

from solver_plugins.blocks import blocks_of
from solver_plugins.integrations import save
from solver_plugins.integrations.folder import new_folder
from solver_plugins.integrations.heads import head_of
from solver_plugins.train.config import FinetuneConfig
from solver_plugins.train.processes import is_sharded

if TYPE_CHECKING:
    from solver_plugins.train.loop import Loop


def skeleton_of(model: nn.Module, accelerator: Accelerator) -> nn.Module | None:
    """Returns a copy that whole weights can be loaded into, where training will share them out."""
    return copy.deepcopy(model) if is_sharded(accelerator) else None


def export_model(
    config: FinetuneConfig, accelerator: Accelerator, loop: "Loop", skeleton: nn.Module | None, folder: Path
) -> int:
    """Saves the model that counts; call it in all processes. Returns its number of parameters.

    Raises:
        SavingError: If it could not be loaded again.
    """
    if skeleton is not None:
        weights = accelerator.get_state_dict(loop.model)
        model = skeleton
        if accelerator.is_main_process:
            model.load_state_dict(weights)
    else:
        model = loop.inner if loop.ema is None else loop.ema.module
    if accelerator.is_main_process:
        # An export that was interrupted before its result was written down is made anew.
        shutil.rmtree(folder, ignore_errors=True)
        training = model.training
        model.eval()
        if blocks_of(model) or head_of(model) is not None:
            args = {key: value for key, value in config.model.args.items() if key != "num_classes"}
            save(model, folder, model_args=args if config.model.spec.startswith("timm/") else None)
        else:
            _save_plain(model, config, folder)
        model.train(training)
    accelerator.wait_for_everyone()
    return sum(parameter.numel() for parameter in model.parameters())


def _save_plain(model: nn.Module, config: FinetuneConfig, folder: Path) -> None:
    """Saves a model without solvers as its host does."""
    with new_folder(folder, overwrite=True) as made:
        if hasattr(model, "save_pretrained"):
            host: Any = model
            host.save_pretrained(made)
            return
        from timm.models import save_for_hf

        args = {key: value for key, value in config.model.args.items() if key != "num_classes"}
        save_for_hf(model, str(made), model_args=args or None, safe_serialization=True)
