"""Checks the pickles of a checkpoint before Accelerate and torch load them, some of them without any check."""

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.other import load as load_as_data
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

_PICKLES = (".bin", ".pkl", ".pt")
_METADATA = ".metadata"
_HARMLESS = {
    "pathlib": {"PosixPath", "WindowsPath"},
    "torch": {"Size", *(name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
}  # fmt: skip
"""What the table of contents of a sharded checkpoint is made of."""


def check_is_data(file: Path) -> None:
    """Raises an error if a file of a checkpoint is a pickle that holds more than data; executes nothing in it."""
    if file.suffix in _PICKLES:
        load_as_data(file, map_location="cpu", weights_only=True)
    elif file.name == _METADATA:
        with file.open("rb") as stream:
            contents = _DataUnpickler(stream).load()
        for index, place in contents.storage_data.items():
            if isinstance(contents.state_dict_metadata.get(index.fqn), BytesStorageMetadata):
                # An option of the optimiser; torch unpickles it.
                with (file.parent / place.relative_path).open("rb") as stream:
                    stream.seek(place.offset)
                    torch.load(io.BytesIO(stream.read(place.length)), weights_only=True)


class _DataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _HARMLESS.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint")
        return super().find_class(module, name)
