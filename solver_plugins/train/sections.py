"""Sections of a run's config that say how a model is trained: images, averages, checkpoints, adapters."""

import math
from collections.abc import Mapping
from typing import Any, Literal, Self

import pydantic
from pydantic import Field

from solver_plugins.config import StrictConfig

Metric = Literal["loss", "accuracy", "top5", "macro_f1", "ece", "map", "micro_f1", "exact", "rmse", "mae", "r2"]


class AugmentationSection(StrictConfig):
    """The arguments of timm's ``create_transform`` for training."""

    scale: list[float] | None = Field(None, description="Range of the area of random crops, such as [0.08, 1.0].")
    ratio: list[float] | None = Field(None, description="Range of the aspect ratio of random crops.")
    hflip: float = Field(0.5, ge=0, le=1, description="How often images are mirrored.")
    vflip: float = Field(0.0, ge=0, le=1, description="How often images are flipped upside down.")
    color_jitter: float = Field(0.0, ge=0, description="Strength of colour changes.")
    auto_augment: str | None = Field(None, description="A policy of timm, such as 'rand-m9-mstd0.5'.")
    re_prob: float = Field(0.0, ge=0, le=1, description="How often a part of the image is erased.")

    @pydantic.field_validator("scale", "ratio")
    @classmethod
    def _is_range(cls, pair: list[float] | None, info: pydantic.ValidationInfo) -> list[float] | None:
        largest = 1 if info.field_name == "scale" else math.inf
        if pair is not None and not (len(pair) == 2 and 0 < pair[0] <= pair[1] <= largest):
            raise ValueError(f"expected a pair [a, b] with 0 < a <= b{' <= 1' if largest == 1 else ''}")
        return pair


class MixupSection(StrictConfig):
    """The arguments of timm's ``Mixup``."""

    mixup: float = Field(0.8, ge=0, description="Alpha of mixup; 0 for none.")
    cutmix: float = Field(0.0, ge=0, description="Alpha of CutMix; 0 for none.")
    prob: float = Field(1.0, ge=0, le=1, description="How often a batch is mixed.")
    switch_prob: float = Field(0.5, ge=0, le=1, description="How often CutMix is chosen if both are on.")

    @pydantic.model_validator(mode="after")
    def _something(self) -> Self:
        if not (self.mixup or self.cutmix):
            raise ValueError("expected mixup.mixup or mixup.cutmix above zero; leave the section out for none")
        return self


class EmaSection(StrictConfig):
    """An average of the weights (timm's ``ModelEmaV3``), which is then evaluated and exported."""

    decay: float = Field(0.999, gt=0, lt=1, description="How slowly the average moves.")
    warmup: bool = Field(True, description="Whether the average moves faster at the beginning.")


class CheckpointSection(StrictConfig):
    """When the state of the run is saved."""

    every: Literal["epoch"] | int = Field("epoch", description="'epoch', or a number of steps.")
    keep: int = Field(2, ge=1, description="How many checkpoints are kept.")


class BestSection(StrictConfig):
    """Exports the epoch that is best on the evaluated split; its score there is slightly optimistic."""

    metric: Metric | None = Field(
        None, description="What is compared: 'loss' or a measure; accuracy, map or rmse by default."
    )
    patience: int | None = Field(None, ge=1, description="Stop after this many epochs without improvement.")


class PeftSection(StrictConfig):
    """Adapters of PEFT instead of trained weights: the options of the method's config in PEFT."""

    name: Literal["lora", "loha", "lokr", "ia3"] = Field("lora", description="A method of PEFT.")
    target_modules: str | list[str] | None = Field(
        None,
        description="Layers with adapters: endings of names, one regex, or 'all-linear'; PEFT has defaults for many.",
    )
    exclude_modules: str | list[str] | None = Field(None, description="Layers without adapters, in the same forms.")
    modules_to_save: list[str] | None = Field(
        None, description="Modules that are trained as a whole; the classifier by default."
    )
    merge: bool = Field(
        True, description="Whether to merge them into the exported weights; false exports base and adapter separately."
    )
    args: dict[str, Any] = Field(
        {},
        description="Other options of the method, such as r or lora_alpha; a config may list them above, too.",
    )

    @pydantic.model_validator(mode="before")
    @classmethod
    def _beside(cls, options: Any) -> Any:
        """Takes the method's own options, which stand beside ours, into ``args``."""
        if not isinstance(options, Mapping):
            return options
        fields = {key: value for key, value in options.items() if key in cls.model_fields}
        given = fields.get("args", {})
        own = {key: value for key, value in options.items() if key not in fields}
        if not isinstance(given, Mapping):
            return options
        if twice := sorted(own.keys() & given.keys()):
            raise ValueError(f"expected {twice[0]} beside the other options or in args; found both")
        return {**fields, "args": {**given, **own}}
