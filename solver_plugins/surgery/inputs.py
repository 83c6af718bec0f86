"""Example inputs for a forward pass: given by the user, or made from what a model says about itself.

timm models have a ``pretrained_cfg``, transformers models a ``config`` and a ``main_input_name``. They are found by
these names, so that neither library is imported.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from solver_plugins.surgery.errors import RecordError
from solver_plugins.surgery.named_inputs import BATCH, LENGTH, NamedInputs, as_pair, noise

_SMALL_SIZES = (96, 128, 224)
_PLAIN_SIZES = (32, 28, 64, 224, 96, 128, 256)
"""Tried in this order for a convolutional network that does not say its input size."""
_HELP = (
    "pass example_inputs= with what its forward takes: a tensor, a tuple of positional arguments, or a dict of keywords"
)


@dataclass(frozen=True)
class Inputs:
    """Arguments of a forward pass."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def to(self, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments and keyword arguments with their tensors on a device."""
        return _moved(self.args, device), _moved(self.kwargs, device)


def _moved(thing: Any, device: torch.device) -> Any:
    if isinstance(thing, Tensor):
        moved = thing.detach().to(device)
        # An in-place operation on its input must not reach the user's tensor.
        return moved.clone() if moved.data_ptr() == thing.data_ptr() and device.type != "meta" else moved
    if isinstance(thing, Mapping):
        return {key: _moved(item, device) for key, item in thing.items()}
    if type(thing) in (list, tuple):
        return type(thing)(_moved(item, device) for item in thing)
    return thing


def read_inputs(given: Any) -> Inputs:
    """Reads example inputs as users give them; raises RecordError if they are not a tensor, a tuple or a mapping."""
    if isinstance(given, Inputs):
        return given
    if isinstance(given, Tensor):
        return Inputs((given,))
    if isinstance(given, tuple):
        return Inputs(given)
    # A tokenizer returns a UserDict, which is not registered as a mapping.
    if isinstance(given, Mapping) or (hasattr(given, "keys") and hasattr(given, "items")):
        return Inputs((), {str(key): item for key, item in given.items()})
    raise RecordError(
        f"Expected example_inputs to be a tensor, a tuple of positional arguments or a dict of keyword arguments; "
        f"found {type(given).__name__}."
    )


def example_inputs_for(model: nn.Module) -> Inputs:
    """Makes inputs for a model of timm or transformers, or for a Sequential whose first layer says its shape."""
    return next(candidate_inputs(model))


def candidate_inputs(model: nn.Module, small: bool = False) -> Iterator[Inputs]:
    """Yields inputs to try, the likeliest first; raises like :func:`example_inputs_for`.

    With ``small``, small images come first if the model takes several sizes, for a pass that computes something.
    """
    found = False
    for made in _candidates(model, small):
        found = True
        yield made
    if not found:
        raise RecordError(f"Cannot tell what {type(model).__name__} takes as input; {_HELP}.{example_for(model)}")


def example_for(model: nn.Module) -> str:
    """Returns a sentence with an example for a model that says how its inputs are called, or nothing."""
    if getattr(model, "config", None) is None or not hasattr(model, "main_input_name"):
        return ""
    made = NamedInputs(model, _dtype(model))
    parts = {name: "..." for name in made.unknown()}
    for tensor_name, tensor in next(made.candidates(), {}).items():
        dtype = "" if tensor.is_floating_point() else f", dtype={tensor.dtype}"
        parts[tensor_name] = f"torch.ones({', '.join(map(str, tensor.shape))}{dtype})"
    inside = ", ".join(f'"{name}": {parts[name]}' for name in sorted(parts, key=list(made.accepted).index))
    return f" For this class: example_inputs={{{inside}}}"


def _candidates(model: nn.Module, small: bool) -> Iterator[Inputs]:
    config: Any = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
    config = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    if config.get("input_size"):
        yield from _for_timm(model, config, small)
    elif getattr(model, "config", None) is not None and hasattr(model, "main_input_name"):
        yield from _for_transformers(model, small)
    else:
        yield from _for_plain(model)


def _dtype(model: nn.Module) -> torch.dtype:
    floats = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    return next(floats, torch.get_default_dtype())


def _for_timm(model: nn.Module, config: Mapping[str, Any], small: bool) -> Iterator[Inputs]:
    channels, height, width = config["input_size"]
    # The config is that of the pretrained weights: a model made with another in_chans or img_size says so elsewhere.
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    in_chans = getattr(model, "in_chans", None) or (first.in_channels if first is not None else channels)
    size = as_pair(getattr(getattr(model, "patch_embed", None), "img_size", None)) or (height, width)
    shapes = [(in_chans, *size), (in_chans, height, width), (channels, height, width)]
    if small and not config.get("fixed_input_size"):
        shapes = [(in_chans, side, side) for side in _SMALL_SIZES if side < min(size)] + shapes
    for shape in dict.fromkeys(shapes):
        yield Inputs((noise(BATCH, *shape, dtype=_dtype(model)),))


def _for_transformers(model: nn.Module, last: bool) -> Iterator[Inputs]:
    made = NamedInputs(model, _dtype(model))
    # Cached keys and values would only be further outputs.
    options = {"use_cache": False} if "use_cache" in made.accepted else {}
    yield from (Inputs((), {**named, **options}) for named in made.candidates(last))
    # They are texts, which would leave half of a model unseen that also takes images or sounds.
    dummies = getattr(model, "dummy_inputs", None) if last or made.only_text else None
    if isinstance(dummies, Mapping) and set(dummies) <= made.accepted.keys():
        yield Inputs((), {**dummies, **options})


def _for_plain(model: nn.Module) -> Iterator[Inputs]:
    first = model
    while isinstance(first, nn.Sequential) and len(first) > 0:
        first = first[0]
    if first is model and not isinstance(model, nn.Linear | nn.Embedding | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return
    if isinstance(first, nn.Linear):
        yield Inputs((noise(BATCH, first.in_features, dtype=_dtype(model)),))
    elif isinstance(first, nn.Embedding):
        yield Inputs((torch.zeros(BATCH, LENGTH, dtype=torch.long),))
    elif isinstance(first, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        dimensions = len(first.kernel_size)
        least = max(1 + d * (k - 1) for d, k in zip(first.dilation, first.kernel_size, strict=True))
        for side in _PLAIN_SIZES:
            if side >= least and math.prod([side] * dimensions) <= 256**2:
                yield Inputs((noise(BATCH, first.in_channels, *[side] * dimensions, dtype=_dtype(model)),))
