"""Turns images and texts into what a model takes: timm's transforms, and the model's tokenizer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import ImageOps
from PIL.Image import Resampling

from solver_plugins.errors import OptionError
from solver_plugins.integrations.preprocessing import load_tokenizer
from solver_plugins.train.config import FinetuneConfig
from solver_plugins.train.errors import DataError, summary_of
from solver_plugins.train.problems import SINGLE

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


class ImageTransform:
    """Turns a PIL image upright, converts it to the model's channels and transforms it.

    It is a class, so that it can be sent to workers. Training, evaluation and prediction all prepare images with it.
    """

    def __init__(self, mode: str, transform: Callable[[Any], Any]):
        self.mode, self.transform = mode, transform

    def __call__(self, image: Any) -> Any:
        """Returns the tensor of a PIL image."""
        # A photo may be stored sideways, with a note how to turn it.
        upright = ImageOps.exif_transpose(image)
        return self.transform(upright if upright.mode == self.mode else upright.convert(self.mode))


def image_preparation(config: FinetuneConfig, model: Any) -> tuple[Any, Any, Any]:
    """Returns the transforms for training and evaluation, and the function that makes a batch."""
    from timm.data.transforms_factory import create_transform

    known = image_settings(config, model)
    evaluation = evaluation_transform(known)
    plain = {key: known[key] for key in ("input_size", "mean", "std", "interpolation")}
    if config.augmentation is None:
        train = create_transform(**plain, is_training=True, no_aug=True)
    else:
        chosen = config.augmentation.options()
        chosen = {key: tuple(value) if isinstance(value, list) else value for key, value in chosen.items()}
        try:
            train = create_transform(**plain, is_training=True, **chosen)
        except (AssertionError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            if chosen["auto_augment"] is None:
                raise
            # timm reads the text of a policy with assertions and plain conversions.
            raise OptionError(
                "Expected augmentation.auto_augment to be a policy of timm, such as 'rand-m9-mstd0.5', 'augmix-m3', "
                f"'original' or 'v0', or null for none; found {chosen['auto_augment']!r} ({error!r})."
            ) from None
    return ImageTransform(evaluation.mode, train), evaluation, collate_images


def evaluation_transform(known: dict[str, Any]) -> ImageTransform:
    """Returns the transform for evaluation, from ``input_size``, ``mean``, ``std``, ``interpolation``, ``crop_pct``."""
    from timm.data.transforms_factory import create_transform

    channels = known["input_size"][0]
    if channels not in _MODES:
        raise DataError(f"Expected a model for images of 1, 3 or 4 channels; this one takes {channels}.")
    chosen = {key: known[key] for key in ("input_size", "mean", "std", "interpolation", "crop_pct")}
    return ImageTransform(_MODES[channels], create_transform(**chosen, is_training=False))


def image_settings(config: FinetuneConfig, model: Any) -> dict[str, Any]:
    """Returns input size, mean, deviation and interpolation, from the config or else from the model."""
    from timm.data.config import resolve_model_data_config

    given = config.data
    if hasattr(model, "pretrained_cfg"):
        known = dict(resolve_model_data_config(model))
        first = next((module for module in model.modules() if isinstance(module, torch.nn.Conv2d)), None)
        channels = getattr(model, "in_chans", None) or (first.in_channels if first else known["input_size"][0])
        size = getattr(getattr(model, "patch_embed", None), "img_size", None) or known["input_size"][1:]
    else:
        settings = model.config
        channels, size = getattr(settings, "num_channels", 3), getattr(settings, "image_size", 224)
        size = (size, size) if isinstance(size, int) else tuple(size)
        known = {"mean": (0.5,), "std": (0.5,), "interpolation": "bicubic", "crop_pct": 1.0, **_processor(config)}
        size = known.pop("size", size)
    if given.image_size is not None:
        size = (given.image_size, given.image_size)
    for key in ("mean", "std"):
        values = getattr(given, key) or known[key]
        if len(values) != channels:
            if getattr(given, key) is not None and len(values) != 1:
                raise DataError(f"Expected data.{key} for {channels} channels; found {len(values)} numbers.")
            values = [sum(values) / len(values)] * channels
        known[key] = tuple(values)
    if given.image_size is not None or max(size) < 64:
        # Cropping the border of a small image would cut off its content.
        known["crop_pct"] = 1.0
    return {**known, "input_size": (channels, *size)}


def remember_data(config: FinetuneConfig, model: Any, classes: tuple[str, ...], problem: str = SINGLE) -> None:
    """Records in a timm model how images are prepared and what the classes are called, for its export."""
    known = getattr(model, "pretrained_cfg", None)
    if not isinstance(known, dict):
        return
    kept = {key: value for key, value in known.items() if not key.startswith("test_") and key != "label_descriptions"}
    settings = image_settings(config, model)
    told = {key: settings[key] for key in ("input_size", "mean", "std", "interpolation", "crop_pct")}
    made = {**kept, **told, "num_classes": len(classes), "label_names": list(classes)}
    if problem != SINGLE:
        # timm's configs have no field for it.
        made["notes"] = [f"problem_type={problem}"]
    model.pretrained_cfg = made


def _processor(config: FinetuneConfig) -> dict[str, Any]:
    """Returns how a model of transformers wants its images; nothing for random weights without a processor."""
    from transformers import AutoImageProcessor

    source = Path(_source(config))
    try:
        found: Any = AutoImageProcessor.from_pretrained(str(source))
    except (OSError, ValueError) as error:
        trained = config.model.pretrained or any(source.glob("*.safetensors"))
        if trained and (config.data.mean is None or config.data.std is None):
            raise DataError(
                f"Expected an image processor beside the weights of {str(source)!r}, which says how its images are "
                f"normalised; reading it: {summary_of(error)} Save it there, or set data.mean and data.std."
            ) from None
        return {}
    return processor_settings(found)


def preprocessing_of(config: FinetuneConfig, model: Any) -> Any:
    """Returns the tokenizer or image processor that prepares inputs as this run does; None for a model of timm."""
    if not config.model.spec.startswith("hf/"):
        return None
    if config.data.text is not None:
        return load_tokenizer(config.model.spec.removeprefix("hf/"))
    from transformers import AutoImageProcessor, ViTImageProcessor

    known = image_settings(config, model)
    try:
        made: Any = AutoImageProcessor.from_pretrained(_source(config))
    except (OSError, ValueError):
        made = ViTImageProcessor()
    _, height, width = known["input_size"]
    side = {"height": height, "width": width}
    if getattr(made, "crop_size", None):
        made.crop_size, made.size = side, {"shortest_edge": min(height, width)}
    else:
        made.size = side
    made.image_mean, made.image_std, made.do_normalize = list(known["mean"]), list(known["std"]), True
    made.resample = int(Resampling[known["interpolation"].upper()])
    return made


def _source(config: FinetuneConfig) -> str:
    return str(Path(config.model.spec.removeprefix("hf/")).expanduser())


def processor_settings(processor: Any) -> dict[str, Any]:
    """Returns mean, deviation, size and interpolation that an image processor of transformers asks for."""
    size: Any = getattr(processor, "crop_size", None) or processor.size
    height = size.get("height") or size.get("shortest_edge")
    width = size.get("width") or height
    found: dict[str, Any] = {
        "mean": tuple(processor.image_mean) if processor.do_normalize else (0.0,),
        "std": tuple(processor.image_std) if processor.do_normalize else (1.0,),
    }
    if height:
        found["size"] = (height, width)
    if processor.resample is not None:
        found["interpolation"] = Resampling(processor.resample).name.lower()
    return found


def collate_images(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Returns a batch of images and labels."""
    return {
        "image": torch.stack([example["image"] for example in examples]),
        "labels": torch.tensor([example["labels"] for example in examples]),
    }


class Tokens:
    """Tokenises texts and makes batches, padded to the longest text."""

    def __init__(self, tokenizer: Any, max_length: int | None):
        self.tokenizer, self.max_length = tokenizer, max_length

    def __call__(self, text: Any) -> dict[str, Any]:
        """Returns the tokens of one text."""
        if not isinstance(text, str):
            raise TypeError(f"expected a text, found {type(text).__name__}")
        return dict(self.tokenizer(text, truncation=True, max_length=self.max_length))

    def batch(self, examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Returns a padded batch with labels."""
        made = self.tokenizer.pad([example["text"] for example in examples], return_tensors="pt")
        return {**made, "labels": torch.tensor([example["labels"] for example in examples])}


def text_preparation(config: FinetuneConfig, model: Any) -> tuple[Any, Any, Any]:
    """Returns the tokenizer for training and for evaluation, and the function that makes a batch."""
    if hasattr(model, "pretrained_cfg") or not hasattr(model, "config"):
        raise DataError(f"data.text needs a model of transformers (hf/...); found {type(model).__name__}.")
    source = config.model.spec.removeprefix("hf/")
    try:
        tokenizer = load_tokenizer(source)
    except Exception as error:
        raise DataError(f"Expected a tokenizer beside the model {source!r}; reading it: {summary_of(error)}") from error
    if tokenizer.pad_token is None:
        raise DataError(f"The tokenizer of {source!r} has no padding token, which batches of texts need.")
    tokens = Tokens(tokenizer, config.data.max_length)
    return tokens, tokens, tokens.batch
