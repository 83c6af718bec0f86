"""Models that cannot be converted as they are: wrapped, hooked, sharded, lazy, or converted already."""

import torch
from torch import nn

from solver_plugins.blocks import blocks_of
from solver_plugins.surgery.errors import ConversionError
from solver_plugins.wrappers import wrapper_of


def refuse_wrapped(model: nn.Module) -> None:
    """Raises ConversionError for a model in which a solver would never run, or that has one already."""
    converted = blocks_of(model)
    for name, module in model.named_modules():
        if name in converted:
            raise ConversionError(f"{name or 'The model'} is converted already; call revert_model(model) first.")
        wrapper = wrapper_of(module)
        if wrapper is not None:
            raise ConversionError(wrapper.refusal("convert", name))
    if any(isinstance(parameter, torch.nn.parameter.UninitializedParameter) for parameter in model.parameters()):
        raise ConversionError("Expected initialised weights; found lazy layers. Run one forward pass first.")
