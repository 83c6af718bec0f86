"""Weights of a model under test as a file, and back, without holding them twice."""

import pathlib

import safetensors
import safetensors.torch
from torch import nn

PARTS = 8
"""Weights are loaded in this many parts."""


def save_weights(model: nn.Module, path: pathlib.Path) -> set[str]:
    """Saves a state dict as safetensors, tensors that share memory once; returns the keys that were left out."""
    state, left, seen = {}, set(), set()
    for key, tensor in model.state_dict().items():
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if tensor.numel() and place in seen:
            left.add(key)
            continue
        seen.add(place)
        state[key] = tensor.contiguous()
    safetensors.torch.save_file(state, path)
    return left


def load_weights(model: nn.Module, path: pathlib.Path) -> tuple[set[str], set[str]]:
    """Loads a state dict in parts, to save memory, and returns missing and unexpected keys.

    Tensors are copied, not assigned: a mapped file is aligned differently, and sums over it round differently.
    """
    missing, unexpected = set(model.state_dict()), set()
    with safetensors.safe_open(path, "pt") as file:
        keys = list(file.keys())
    for start in range(0, len(keys), size := -(-len(keys) // PARTS)):
        # The file is opened again for each part: what was read stays in memory as long as the file is mapped.
        with safetensors.safe_open(path, "pt") as file:
            part = {key: file.get_tensor(key) for key in keys[start : start + size]}
        unexpected |= set(model.load_state_dict(part, strict=False).unexpected_keys)
        missing -= part.keys()
    return missing, unexpected
