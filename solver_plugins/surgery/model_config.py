"""A conversion inside of a Hugging Face config, so that ``save_pretrained`` writes it down.

Nothing of transformers is imported: a model with a ``config`` that writes itself and a ``save_pretrained`` is such a
model. What reads the entry again is :mod:`solver_plugins.integrations.transformers`.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from solver_plugins.surgery.errors import ConversionError

QUANT_METHOD = "solver_plugins (import solver_plugins first, or you get the plain network without its solvers)"
"""Where nobody has registered it, transformers logs an unknown quantization type and names this text: so it is a hint.

It is part of the format of saved models and must not change.
"""


def is_pretrained_model(model: nn.Module) -> bool:
    """Whether a model is one of transformers, which saves its config beside its weights."""
    config = getattr(model, "config", None)
    # PEFT's models hand attributes on to the model inside, and save adapters alone.
    wrapper = hasattr(model, "peft_config") and hasattr(model, "base_model_torch_dtype")
    return hasattr(model, "save_pretrained") and hasattr(config, "to_diff_dict") and not wrapper


def refuse_quantized(model: nn.Module) -> None:
    """Raises ConversionError for a model whose config describes a quantization: there is no room for a conversion."""
    found = getattr(getattr(model, "config", None), "quantization_config", None)
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    if found is not None and method != QUANT_METHOD:
        raise ConversionError(
            f"Expected a model with plain weights; found one quantized with {getattr(method, 'value', method)}. "
            "Load it without quantization, or dequantize it first."
        )


class LiveEntry:
    """The entry of a converted model's config: it looks at the model whenever the config is written.

    Gains and blends change after the conversion, so a text of that day would be out of date.

    Args:
        model: The converted model.
        written: Returns its conversion as plain data.
    """

    quant_method = QUANT_METHOD

    def __init__(self, model: nn.Module, written: Callable[[nn.Module], dict[str, Any]]):
        self.model, self.written = model, written

    def to_dict(self) -> dict[str, Any]:
        """Returns what ``config.json`` holds; transformers calls it."""
        return {"quant_method": QUANT_METHOD, "conversion": self.written(self.model)}

    def __deepcopy__(self, memo: dict[int, Any]) -> "LiveEntry | dict[str, Any]":
        # A copied model has an entry of its own; a config that is copied alone keeps what is true now.
        copied = memo.get(id(self.model))
        return self.to_dict() if copied is None else LiveEntry(copied, self.written)


def enter_into_config(model: nn.Module, written: Callable[[nn.Module], dict[str, Any]]) -> None:
    """Lets the config of a transformers model write the model's conversion; other models are left alone."""
    if is_pretrained_model(model):
        config: Any = model.config
        config.quantization_config = LiveEntry(model, written)


def remove_from_config(model: nn.Module) -> None:
    """Takes a conversion out of the config of a transformers model; other models are left alone."""
    if is_pretrained_model(model) and hasattr(model.config, "quantization_config"):
        refuse_quantized(model)
        config: Any = model.config
        del config.quantization_config
