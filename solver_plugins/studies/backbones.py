"""Models of timm in studies: specified as in finetune recipes, built for the images of a study."""

from typing import Any

import torch
from torch import nn

from solver_plugins.integrations.models import ModelError
from solver_plugins.studies.images import Images, normalised, scaled
from solver_plugins.train.config import ModelSection
from solver_plugins.train.models import build_timm
from solver_plugins.train.tensors import Part

_FROM_DATA = ("num_classes", "in_chans")


def build_backbone(section: ModelSection, images: Images, classes: int | None = None) -> nn.Module:
    """Builds a model for the channels and classes of the images, with published or own weights if asked.

    Args:
        section: Which model; the same as in a finetune recipe.
        images: The images.
        classes: The number of classes; those of the images by default, 0 for no classifier.

    Raises:
        ModelError: If it is not a timm model in float32, cannot be built, or has arguments that the data decides.
        WeightError, InputError: If its weights cannot be read or do not fit.
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
