"""Weights of a module in one safetensors file, in their dtypes, each tensor once."""

from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from solver_plugins.integrations.errors import LoadingError, SavingError

WEIGHTS = "model.safetensors"


def write_weights(model: nn.Module, folder: Path) -> None:
    """Writes a state dict; a tensor under several names is written under the first.

    Raises:
        SavingError: If a weight has no values here (on the meta device, or sharded over processes).
    """
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
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


def read_weights(model: nn.Module, folder: Path) -> None:
    """Reads the weights of a plain model, and gives it their dtypes.

    Raises:
        LoadingError: If names or shapes are not the model's; nothing is changed then.
    """
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
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise LoadingError(f"{WEIGHTS} in {str(folder)!r} {kind} {', '.join(names[:5])}{more}.")
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
