"""The step sizes of a converted model, in a file beside a checkpoint.

Step sizes follow the weights by power steps, which depend on the past. State dicts do not hold them, so that they stay
those of the plain network. A resumed run needs them to be the same run.
"""

import hashlib
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from solver_plugins.blocks import blocks_of
from solver_plugins.blocks.stepsize import KEPT_BUFFERS
from solver_plugins.integrations.errors import LoadingError
from solver_plugins.integrations.folder import new_file

STEPS = "solver_steps.safetensors"
_WEIGHTS = "weights"


def step_state(model: nn.Module) -> dict[str, Tensor]:
    """Returns the buffers of all solver blocks by name: the model's own tensors, not copies."""
    return {
        f"{name}.{own}" if name else own: buffer
        for name, block in blocks_of(model).items()
        for own, buffer in block._buffers.items()
        if own in KEPT_BUFFERS and buffer is not None
    }


def write_steps(model: nn.Module, folder: Path) -> Path:
    """Writes the buffers of all solver blocks into a folder, whole or not at all, and returns the path of the file."""
    tensors = {name: buffer.detach().cpu().contiguous().clone() for name, buffer in step_state(model).items()}
    data = safetensors.torch.save(tensors, metadata={_WEIGHTS: _fingerprint(model)})
    place = folder / STEPS
    with new_file(place) as made:
        made.write_bytes(data)
    return place


def read_steps(model: nn.Module, folder: Path) -> None:
    """Reads the buffers of a model's solver blocks from a folder; after a LoadingError nothing is changed."""
    place = folder / STEPS
    try:
        with safetensors.safe_open(place, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, safetensors.SafetensorError) as error:
        raise LoadingError(f"Cannot read the step sizes in {str(place)!r}: {error}.") from error
    own = step_state(model)
    wrong = [name for name in own if name not in tensors or tensors[name].shape != own[name].shape]
    wrong += [name for name in tensors if name not in own]
    if wrong:
        raise LoadingError(
            f"{str(place)!r} holds step sizes of another conversion: {', '.join(sorted(wrong)[:5])} differ. Convert "
            "the model as it was when the checkpoint was written."
        )
    if metadata.get(_WEIGHTS) != _fingerprint(model):
        raise LoadingError(f"{str(place)!r} holds step sizes of other weights than those of the model.")
    with torch.no_grad():
        for name, buffer in own.items():
            buffer.copy_(tensors[name])


def _fingerprint(model: nn.Module) -> str:
    """Returns a hash of the weights that the step sizes belong to."""
    hashed = hashlib.sha256()
    for name, block in blocks_of(model).items():
        kernel = block._kernel().detach()
        whole = kernel.full_tensor() if hasattr(kernel, "full_tensor") else kernel
        hashed.update(name.encode())
        hashed.update(whole.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()
