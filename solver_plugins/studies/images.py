"""Image data sets as tensors, models of timm for them, and what the studies on them share."""

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from pydantic import Field
from torch import Tensor, nn

from solver_plugins.config import StrictConfig
from solver_plugins.integrations.models import ModelError
from solver_plugins.studies.study import Context, Study, StudyConfig
from solver_plugins.train.config import DataSection, ModelSection
from solver_plugins.train.data import Splits, load_splits
from solver_plugins.train.errors import DataError
from solver_plugins.train.models import build_timm
from solver_plugins.train.problems import SINGLE
from solver_plugins.train.tensors import Part


class ImageData(StrictConfig):
    """Where the images come from; see ``data`` of ``solver-plugins finetune``."""

    name: str = Field("digits", description="'digits' (embedded), a folder (save_to_disk, imagefolder), or a hub id.")
    config: str | None = Field(None, description="The configuration of a hub data set that has several.")
    train: str = Field("train", description="The split to train on; slices such as 'train[:90%]' are fine.")
    validation: str = Field("test", description="The split that is looked at during training.")
    test: str | None = Field(None, description="The split that is looked at once, at the end; null for none.")
    image: str | None = Field(None, description="The column of images; found by itself by default.")
    text: str | None = Field(None, description="The column of texts, for studies of texts.")
    max_length: int = Field(64, ge=1, description="Texts are cut after this many tokens.")
    label: str | None = Field(None, description="The column of labels; found by itself by default.")

    def load(self) -> "Images":
        """Loads all splits.

        Raises:
            DataError: If there is no such data, or images differ in size.
        """
        options = {key: getattr(self, key) for key in ("name", "config", "train", "image", "label")}
        splits = load_splits(DataSection.parse({**options, "eval": self.validation}))
        mode = splits.train[0][splits.column].mode
        train = _part(splits.train, splits, mode, self.train)
        validation = _part(splits.eval, splits, mode, self.validation)
        test = None
        if self.test is not None:
            test = _part(load_splits(DataSection.parse({**options, "eval": self.test})).eval, splits, mode, self.test)
        return Images(train, validation, test, len(splits.classes))


@dataclass(frozen=True)
class Images:
    """All splits of a data set."""

    train: Part
    validation: Part
    test: Part | None
    classes: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        channels, height, width = self.train.images.shape[1:]
        return channels, height, width


def _part(found: Any, splits: Splits, mode: str, name: str) -> Part:
    import numpy

    mode = mode if mode in ("L", "RGB") else "RGB"
    arrays = [numpy.asarray(image.convert(mode), dtype=numpy.uint8) for image in found[splits.column]]
    sizes = sorted({array.shape[:2] for array in arrays})
    if len(sizes) > 1:
        raise DataError(
            f"Expected images of one size in the split {name!r}; found {sizes[0][1]}x{sizes[0][0]} and "
            f"{sizes[-1][1]}x{sizes[-1][0]}. Resize them first."
        )
    pixels = torch.from_numpy(numpy.stack(arrays))
    pixels = pixels[:, None] if pixels.ndim == 3 else pixels.permute(0, 3, 1, 2)
    if splits.problem_type != SINGLE:
        raise DataError(f"Expected one class of several for each image; the labels pose a {splits.problem_type}.")
    read = splits.reader()
    labels = [read(label) for label in splits.values(found)]
    return Part(pixels.contiguous().float() / 255, torch.tensor(labels))


def scaled(part: Part, mean: Tensor, std: Tensor, device: torch.device, size: int | None = None) -> Part:
    """Subtracts a mean from the images, divides by a spread, and resizes them if a size is given."""
    return Part((part.images - mean) / std, part.labels).resized(size).to(device)


def normalised(part: Part, known: Part, device: torch.device, size: int | None = None) -> Part:
    """Normalises a split by mean and spread of a known one, and resizes it if a size is given."""
    return scaled(part, known.images.mean(), known.images.std(), device, size)


class ImageConfig(StudyConfig):
    """Settings of a study on images."""

    data: ImageData = ImageData()


C = TypeVar("C", bound=ImageConfig)


class ImageStudy(Study[C]):
    """A study on images, which are loaded before the first cell."""

    _images: Images

    def prepare(self) -> None:
        self._images = self._load()

    def _load(self) -> Images:
        """Returns all splits of the data."""
        return self.config.data.load()

    def _normalised(self, context: Context) -> tuple[Part, Part]:
        """Returns the training and validation split, normalised by the training split."""
        known, other = self._images.train, self._images.validation
        return normalised(known, known, context.device), normalised(other, known, context.device)


_FROM_DATA = ("num_classes", "in_chans")


def build_backbone(section: ModelSection, images: Images, classes: int | None = None) -> nn.Module:
    """Builds a model for the channels and classes of the images, with published or own weights if asked.

    Args:
        section: Which model; the same as in a finetune recipe.
        images: The images.
        classes: The number of classes; those of the images by default, 0 for no classifier.
    """
    if not section.spec.startswith("timm/"):
        raise ModelError(f"Expected a model of timm, 'timm/NAME'; found {section.spec!r}. Studies take no others.")
    if section.dtype != "float32":
        raise ModelError(f"Studies train networks in float32; found the dtype {section.dtype!r}. Leave it out.")
    taken = [key for key in _FROM_DATA if key in section.args]
    if taken:
        raise ModelError(f"The argument {taken[0]!r} of the model is taken from the data. Leave it out.")
    args = {**section.args, "in_chans": images.shape[0]}
    return build_timm(section, args, images.classes if classes is None else classes)


def is_pretrained(section: ModelSection) -> bool:
    """Whether a model starts from weights that were trained elsewhere."""
    return section.pretrained or section.weights is not None


def prepared(
    section: ModelSection, model: nn.Module, part: Part, known: Part, device: torch.device, size: int | None = None
) -> Part:
    """Returns a split normalised as the model expects it, resized if a size is given.

    A pretrained model brings the mean and spread of its own training images; any other takes those of the known split.
    """
    if not is_pretrained(section):
        return normalised(part, known, device, size)
    mean, std = (_for_channels(values, part.images.shape[1]) for values in _statistics(model))
    return scaled(part, mean, std, device, size)


def _statistics(model: nn.Module) -> tuple[Any, Any]:
    from timm.data.config import resolve_model_data_config

    settings = resolve_model_data_config(model)
    return settings["mean"], settings["std"]


def _for_channels(values: Any, channels: int) -> torch.Tensor:
    found = torch.tensor(values, dtype=torch.float32)
    # For grey images timm sums the first layer's weights over the colours; the mean stands for all three.
    found = found if len(found) == channels else found.mean().expand(channels)
    return found[:, None, None]
