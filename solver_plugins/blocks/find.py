"""Which solver blocks a model holds."""

from torch import nn

from solver_plugins.blocks.layer import LayerBlock


def blocks_of(model: nn.Module) -> dict[str, LayerBlock]:
    """Returns the solver blocks of a model by name, in the model's order; none for a plain model.

    A block that is the model itself has the name "".
    """
    return {name: module for name, module in model.named_modules() if isinstance(module, LayerBlock)}
