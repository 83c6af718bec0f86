"""Example inputs for a forward pass: given by the user, or made from what a model says about itself.

timm models have a ``pretrained_cfg``, transformers models a ``config`` and a ``main_input_name``. They are found by
these names, so that neither library is imported.
"""

import inspect
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from solver_plugins.surgery.errors import RecordError

BATCH = 2
LENGTH = 16
"""Tokens of a text: few, but more than any convolution over tokens needs."""
_IMAGE_SIZE = 224
_AUDIO_SAMPLES = 16000
_SMALL_SIZES = (96, 128, 224)
_PLAIN_SIZES = (32, 28, 64, 224, 96, 128, 256)
"""Tried in this order for a convolutional network that does not say its input size."""
_HELP = (
    "pass example_inputs= with what its forward takes: a tensor, a tuple of positional arguments, or a dict of keywords"
)


@dataclass(frozen=True)
class Inputs:
    """Arguments of a forward pass.

    Attributes:
        args: Positional arguments.
        kwargs: Keyword arguments.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def to(self, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns both, on a device."""
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
    """Reads example inputs as users give them.

    Raises:
        RecordError: If they are not a tensor, a tuple or a mapping.
    """
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
    """Makes inputs for a model of timm or transformers, or for a Sequential whose first layer says its input's shape.

    Raises:
        RecordError: If the model does not say enough.
    """
    return next(candidate_inputs(model))


def candidate_inputs(model: nn.Module, small: bool = False) -> Iterator[Inputs]:
    """Yields inputs to try, the likeliest first; raises like :func:`example_inputs_for`.

    Args:
        model: The model.
        small: Whether small images come first if the model takes several sizes, for a pass that computes something.
    """
    found = False
    for made in _candidates(model, small):
        found = True
        yield made
    if not found:
        raise RecordError(f"Cannot tell what {type(model).__name__} takes as input; {_HELP}.")


def _candidates(model: nn.Module, small: bool) -> Iterator[Inputs]:
    config = _as_mapping(getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None))
    if config.get("input_size"):
        yield from _for_timm(model, config, small)
    elif getattr(model, "config", None) is not None and hasattr(model, "main_input_name"):
        yield from _for_transformers(model, model.config)
    else:
        yield from _for_plain(model)


def _as_mapping(config: Any) -> Mapping[str, Any]:
    return config if isinstance(config, Mapping) else dict(getattr(config, "__dict__", {}))


def _dtype(model: nn.Module) -> torch.dtype:
    floats = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    return next(floats, torch.get_default_dtype())


def _for_timm(model: nn.Module, config: Mapping[str, Any], small: bool) -> Iterator[Inputs]:
    channels, height, width = config["input_size"]
    # The config is that of the pretrained weights: a model made with another in_chans or img_size says so elsewhere.
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    in_chans = getattr(model, "in_chans", None) or (first.in_channels if first is not None else channels)
    size = _as_pair(getattr(getattr(model, "patch_embed", None), "img_size", None)) or (height, width)
    shapes = [(in_chans, *size), (in_chans, height, width), (channels, height, width)]
    if small and not config.get("fixed_input_size"):
        shapes = [(in_chans, side, side) for side in _SMALL_SIZES if side < min(size)] + shapes
    for shape in dict.fromkeys(shapes):
        yield Inputs((_noise(BATCH, *shape, dtype=_dtype(model)),))


def _noise(*shape: int, dtype: torch.dtype) -> Tensor:
    """Returns random numbers that leave the global generator as it was."""
    return torch.rand(shape, dtype=dtype, generator=torch.Generator("cpu").manual_seed(0), device="cpu")


def _as_pair(size: Any) -> tuple[int, int] | None:
    if isinstance(size, Mapping):
        size = (size.get("height"), size.get("width"))
    if isinstance(size, int):
        return size, size
    if isinstance(size, list | tuple) and len(size) == 2 and all(isinstance(side, int) for side in size):
        return size[0], size[1]
    return None


def _for_transformers(model: nn.Module, config: Any) -> Iterator[Inputs]:
    accepted = inspect.signature(model.forward).parameters
    main: str = model.main_input_name  # type: ignore[assignment]
    wanted = {main}
    # A model of two towers needs the inputs of both.
    if hasattr(config, "vision_config") and hasattr(config, "text_config"):
        wanted |= {"pixel_values", "input_ids"} & accepted.keys()
    made: dict[str, Tensor] = {}
    if "input_ids" in wanted:
        made |= _text(config, accepted)
    if "pixel_values" in wanted or "pixel_values_videos" in wanted:
        name = "pixel_values" if "pixel_values" in wanted else "pixel_values_videos"
        made[name] = _pixels(config, name, _dtype(model))
    if wanted & {"input_values", "input_features"}:
        made[main] = _audio(config, main, _dtype(model))
    # Cached keys and values would only be further outputs.
    options = {"use_cache": False} if "use_cache" in accepted else {}
    if made:
        yield Inputs((), {**made, **options})
    dummies = getattr(model, "dummy_inputs", None)
    if isinstance(dummies, Mapping) and set(dummies) <= accepted.keys():
        yield Inputs((), {**dummies, **options})


def _of(config: Any, *names: str) -> Any:
    """Returns the first of several settings that a config has, or one of the configs inside it."""
    parts = [config, *(getattr(config, f"{part}_config", None) for part in ("text", "vision", "encoder", "backbone"))]
    for part in parts:
        for name in names:
            value = getattr(part, name, None)
            if value is not None:
                return value
    return None


def _text(config: Any, accepted: Mapping[str, Any]) -> dict[str, Tensor]:
    vocabulary = _of(config, "vocab_size") or 256
    positions = _of(config, "max_position_embeddings", "n_positions", "max_seq_len")
    # Some families start to count positions after the padding's id.
    length = min(LENGTH, positions - 2) if isinstance(positions, int) and positions > 4 else LENGTH
    special = {name: _of(config, f"{name}_token_id") for name in ("pad", "eos", "bos", "cls", "sep", "mask")}
    taken = {token for ids in special.values() for token in (ids if isinstance(ids, list) else [ids])}
    filler = next((token for token in range(vocabulary) if token not in taken), 0)
    ids = torch.full((BATCH, length), filler)
    end = special["eos"][0] if isinstance(special["eos"], list) else special["eos"]
    # Classifiers of encoder-decoder models read the sentence at its end token.
    if isinstance(end, int) and 0 <= end < vocabulary:
        ids[:, -1] = end
    made = {"input_ids": ids}
    if "attention_mask" in accepted:
        made["attention_mask"] = torch.ones_like(ids)
    if "decoder_input_ids" in accepted and getattr(config, "is_encoder_decoder", False):
        made["decoder_input_ids"] = ids.clone()
    return made


def _pixels(config: Any, name: str, dtype: torch.dtype) -> Tensor:
    height, width = _as_pair(_of(config, "image_size", "crop_size", "img_size")) or (_IMAGE_SIZE, _IMAGE_SIZE)
    channels = _of(config, "num_channels", "in_channels", "in_chans")
    shape = [channels if isinstance(channels, int) else 3, height, width]
    frames = _of(config, "num_frames", "frames_per_clip")
    if isinstance(frames, int) and (name.endswith("videos") or hasattr(config, "num_frames")):
        shape = [frames, *shape]
    return _noise(BATCH, *shape, dtype=dtype)


def _audio(config: Any, name: str, dtype: torch.dtype) -> Tensor:
    bins, length, positions = (_of(config, key) for key in ("num_mel_bins", "max_length", "max_source_positions"))
    if name == "input_values":
        shape = (length, bins) if hasattr(config, "patch_size") and bins and length else (_AUDIO_SAMPLES,)
    elif positions:
        shape = (bins or 80, 2 * positions)
    else:
        shape = (4 * LENGTH, _of(config, "feature_projection_input_dim") or bins or 80)
    return _noise(BATCH, *shape, dtype=dtype)


def _for_plain(model: nn.Module) -> Iterator[Inputs]:
    first = model
    while isinstance(first, nn.Sequential) and len(first) > 0:
        first = first[0]
    if first is model and not isinstance(model, nn.Linear | nn.Embedding | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return
    if isinstance(first, nn.Linear):
        yield Inputs((_noise(BATCH, first.in_features, dtype=_dtype(model)),))
    elif isinstance(first, nn.Embedding):
        yield Inputs((torch.zeros(BATCH, LENGTH, dtype=torch.long),))
    elif isinstance(first, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        dimensions = len(first.kernel_size)
        least = max(1 + d * (k - 1) for d, k in zip(first.dilation, first.kernel_size, strict=True))
        for side in _PLAIN_SIZES:
            if side >= least and math.prod([side] * dimensions) <= 256**2:
                yield Inputs((_noise(BATCH, first.in_channels, *[side] * dimensions, dtype=_dtype(model)),))
