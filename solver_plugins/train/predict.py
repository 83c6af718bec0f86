"""Answers of a saved model: images and texts are prepared as they were for its evaluation."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn

from solver_plugins.integrations.errors import LoadingError
from solver_plugins.integrations.preprocessing import load_tokenizer
from solver_plugins.integrations.saving import load
from solver_plugins.train.adapters import load_adapted
from solver_plugins.train.classification import logits_of
from solver_plugins.train.errors import DataError, summary_of
from solver_plugins.train.images import SUFFIXES
from solver_plugins.train.outputs import BASE
from solver_plugins.train.preparation import Tokens, collate_images, evaluation_transform, processor_settings
from solver_plugins.train.problems import PROBLEMS, SINGLE


@dataclass(frozen=True)
class Prediction:
    """What a model says of one image or text.

    Attributes:
        source: The file of the image, or the text.
        label: The likeliest class; None for a regression.
        probability: Its probability; None for a regression.
        likeliest: The likeliest classes with their probabilities, the first one included; with several labels at once
            all those that are more likely than not. For a regression each target with its number.
    """

    source: str
    label: str | None
    probability: float | None
    likeliest: tuple[tuple[str, float], ...]


def predict(
    folder: str | os.PathLike[str],
    inputs: str | Path | Iterable[str | Path],
    *,
    top: int | None = None,
    batch_size: int = 32,
) -> list[Prediction]:
    """Returns what a saved model predicts for images or texts.

    Args:
        folder: A folder written by :func:`~solver_plugins.save` or by a finetune run; or the folder ``adapter`` of such
            a run, next to its ``base``.
        inputs: Files of images, folders of them, or for a text model texts.
        top: How many of the likeliest classes to return; by default one, or with several labels all those with a
            probability above one half.
        batch_size: How many inputs are processed at once.

    Raises:
        LoadingError: If there is no saved model in the folder.
        DataError: If an image cannot be read, or the folder does not say how inputs are prepared.
    """
    given = [inputs] if isinstance(inputs, (str, Path)) else list(inputs)
    if (top is not None and top < 1) or batch_size < 1:
        raise DataError(f"Expected top and batch_size of at least 1; found {top} and {batch_size}.")
    place = Path(folder).expanduser()
    models = [str(path.parent) for start in ("", "*/", "*/*/") for path in place.glob(f"{start}model/config.json")]
    if models and not (place / "config.json").is_file():
        raise LoadingError(f"{str(folder)!r} is not a saved model, but holds some: {', '.join(sorted(models))}.")
    adapted = (place / "adapter_config.json").is_file()
    model: Any = load_adapted(place) if adapted else load(folder).eval()
    folder = place.parent / BASE if adapted else folder
    labels, kind = _labels(model), _problem(model)
    is_text = hasattr(model, "config") and getattr(model, "main_input_name", "pixel_values") == "input_ids"
    sources = [str(one) for one in given] if is_text else [str(file) for one in given for file in _images(Path(one))]
    batch_of = _texts(folder) if is_text else _opened(folder, model)
    weight = next(model.parameters())
    found: list[Prediction] = []
    with torch.no_grad():
        for part in _parts(sources, batch_size):
            batch = {key: value.to(weight.device) for key, value in batch_of(part).items()}
            outputs = logits_of(model, batch, weight.dtype)
            if kind == "regression":
                found += [
                    Prediction(source, None, None, tuple(zip(labels, row, strict=True)))
                    for source, row in zip(part, outputs.tolist(), strict=True)
                ]
                continue
            shares = outputs.softmax(-1) if kind == SINGLE else outputs.sigmoid()
            order = shares.sort(-1, descending=True)
            for source, own, numbers in zip(part, order.values.tolist(), order.indices.tolist(), strict=True):
                named = [(labels[number], share) for number, share in zip(numbers, own, strict=True)]
                count = top or (1 if kind == SINGLE else sum(share >= 0.5 for share in own))
                found.append(Prediction(source, *named[0], tuple(named[:count])))
    return found


def _problem(model: Any) -> str:
    """Returns what a saved model predicts: what its config says, or one class of several."""
    if hasattr(model, "config"):
        return model.config.problem_type or SINGLE
    notes = getattr(model, "pretrained_cfg", {}).get("notes") or ()
    told = next((note.partition("=")[2] for note in notes if str(note).startswith("problem_type=")), SINGLE)
    return told if told in PROBLEMS else SINGLE


def _labels(model: Any) -> Sequence[str]:
    """Returns the names of the classes in the order of their numbers; the numbers where there are no names."""
    if hasattr(model, "config"):
        return [str(model.config.id2label[number]) for number in range(model.config.num_labels)]
    known = getattr(model, "pretrained_cfg", {})
    names = known.get("label_names") or [str(number) for number in range(model.num_classes)]
    return [str(name) for name in names]


def _images(place: Path) -> list[Path]:
    place = place.expanduser()
    if not place.is_dir():
        return [place]
    found = sorted(file for file in place.rglob("*") if file.suffix.lower() in SUFFIXES)
    if not found:
        raise DataError(f"Expected images in {str(place)!r}; found no file ending in {', '.join(SUFFIXES)}.")
    return found


def _opened(folder: str | os.PathLike[str], model: nn.Module) -> Callable[[Sequence[str]], dict[str, Any]]:
    """Returns a function that reads and prepares files of images."""
    transform = evaluation_transform(_settings(folder, model))

    def read(files: Sequence[str]) -> dict[str, Any]:
        examples = []
        for file in files:
            try:
                with Image.open(file) as image:
                    examples.append({"image": transform(image), "labels": 0})
            except Exception as error:
                raise DataError(f"Cannot read the image {file!r}: {summary_of(error)}") from None
        return collate_images(examples)

    return read


def _settings(folder: str | os.PathLike[str], model: Any) -> dict[str, Any]:
    if not hasattr(model, "config"):
        from timm.data.config import resolve_model_data_config

        return dict(resolve_model_data_config(model))
    from transformers import AutoImageProcessor

    try:
        known = processor_settings(AutoImageProcessor.from_pretrained(str(Path(folder).expanduser())))
    except (OSError, ValueError) as error:
        raise DataError(f"Expected an image processor in {str(folder)!r}; reading it: {summary_of(error)}") from None
    side = getattr(model.config, "image_size", 224)
    size = known.get("size") or ((side, side) if isinstance(side, int) else tuple(side))
    channels = getattr(model.config, "num_channels", 3)
    return {"interpolation": "bicubic", **known, "crop_pct": 1.0, "input_size": (channels, *size)}


def _texts(folder: str | os.PathLike[str]) -> Callable[[Sequence[str]], dict[str, Any]]:
    tokens = Tokens(load_tokenizer(folder), None)
    return lambda texts: tokens.batch([{"text": tokens(text), "labels": 0} for text in texts])


def _parts(sources: Sequence[str], size: int) -> Iterator[list[str]]:
    left = iter(sources)
    while part := list(islice(left, size)):
        yield part
