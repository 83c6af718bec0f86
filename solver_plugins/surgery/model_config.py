"""A conversion inside of a Hugging Face config, so that ``save_pretrained`` writes it down.

transformers is not imported: its models are known by their ``config`` and ``save_pretrained``.
:mod:`solver_plugins.integrations.transformers` reads the entry again.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from solver_plugins.surgery.errors import ConversionError

QUANT_METHOD = "solver_plugins (import solver_plugins first, or you get the plain network without its solvers)"
"""transformers logs this text as an unknown quantization type if solver_plugins is not imported, so it says what to do.

It is part of the format of saved models and must not change.
"""

TIMM_REFUSAL = "solver_plugins.save(model, folder), because timm would save the plain network without its solvers"
"""The name of an argument that timm cannot write down, as its error prints it."""
_TIMM_ARGUMENTS = "_model_args"
"""Where timm, from 1.0.31 on, keeps what a model was made with."""


def is_pretrained_model(model: nn.Module) -> bool:
    """Whether a model belongs to transformers, which saves its config beside its weights."""
    config = getattr(model, "config", None)
    # PEFT's models hand attributes on to the model inside, and save adapters alone.
    wrapper = hasattr(model, "peft_config") and hasattr(model, "base_model_torch_dtype")
    return hasattr(model, "save_pretrained") and hasattr(config, "to_diff_dict") and not wrapper


def refuse_quantized(model: nn.Module) -> None:
    """Raises ConversionError if a model's config describes a quantization, which leaves no room for a conversion."""
    found = getattr(getattr(model, "config", None), "quantization_config", None)
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    if found is not None and method != QUANT_METHOD:
        raise ConversionError(
            f"Expected a model with plain weights; found one quantized with {getattr(method, 'value', method)}. "
            "Load it without quantization, or dequantize it first."
        )


class LiveEntry:
    """The entry in a converted model's config. It reads the conversion off the model whenever the config is written.

    Gains and blends change after the conversion, so a text written then would be out of date. ``written`` returns the
    conversion of a model as plain data.
    """

    quant_method = QUANT_METHOD

    def __init__(self, model: nn.Module, written: Callable[[nn.Module], dict[str, Any]]):
        self.model, self.written = model, written

    def to_dict(self) -> dict[str, Any]:
        """Returns what ``config.json`` holds; transformers calls it."""
        return {"quant_method": QUANT_METHOD, "conversion": self.written(self.model)}

    def __deepcopy__(self, memo: dict[int, Any]) -> "LiveEntry | dict[str, Any]":
        # A copied model gets an entry of its own; a config that is copied alone keeps the present state as a text.
        copied = memo.get(id(self.model))
        return self.to_dict() if copied is None else LiveEntry(copied, self.written)


def enter_into_config(model: nn.Module, written: Callable[[nn.Module], dict[str, Any]]) -> None:
    """Lets a transformers model's config write its conversion, and has timm refuse to save a model of its own."""
    if is_pretrained_model(model):
        config: Any = model.config
        config.quantization_config = LiveEntry(model, written)
    recorded = vars(model).get(_TIMM_ARGUMENTS)
    if isinstance(recorded, dict):
        # A set has no form in JSON: timm's save_for_hf and push_to_hf_hub raise an error that names the argument.
        vars(model)[_TIMM_ARGUMENTS] = {**recorded, TIMM_REFUSAL: frozenset()}


def remove_from_config(model: nn.Module) -> None:
    """Takes back what :func:`enter_into_config` did."""
    recorded = vars(model).get(_TIMM_ARGUMENTS)
    if isinstance(recorded, dict):
        vars(model)[_TIMM_ARGUMENTS] = {key: value for key, value in recorded.items() if key != TIMM_REFUSAL}
    if is_pretrained_model(model) and hasattr(model.config, "quantization_config"):
        refuse_quantized(model)
        config: Any = model.config
        del config.quantization_config
