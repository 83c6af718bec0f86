"""Equilibrium heads on other people's models: attached in place of the last linear layer, removed, written down."""

from typing import Any

import pydantic
from torch import nn

from solver_plugins.blocks import SolverBlock
from solver_plugins.config import StrictConfig
from solver_plugins.dropblock.classifier import find_classifier
from solver_plugins.equilibrium import HeadError
from solver_plugins.equilibrium.head import HeadConfig, OptEqHead
from solver_plugins.surgery.model_config import is_pretrained_model
from solver_plugins.wrappers import HOOKED, wrapper_of

HEAD_ENTRY = "solver_plugins_head"
"""Where the config of a transformers model holds the head, so that ``save_pretrained`` writes it; never to change."""


class HeadRecord(StrictConfig):
    """What was attached where; ``to_json`` and ``from_json`` write and read it."""

    format: int = pydantic.Field(1, ge=1, le=1, description="Version of this form.")
    name: str = pydantic.Field(description="Name of the layer that the head replaces.")
    config: HeadConfig = pydantic.Field(description="Its options.")


def attach_opteq_head(model: nn.Module, *, classifier: str | None = None, **options: Any) -> nn.Module:
    """Replaces a model's last linear layer by an equilibrium: backbone features -> equilibrium -> classes.

    For timm models (``get_classifier``), transformers classification models, and any module with a last linear layer.
    The number of classes stays that of the layer. In place; call it before an optimizer is made, and before
    compiling or wrapping.

    Args:
        model: The model.
        classifier: Name of the layer to replace, where it is not the one that is found.
        **options: Fields of :class:`~solver_plugins.equilibrium.head.HeadConfig`: ``hidden``, ``layers``, ``alpha``,
            ``iters``, ``gradient``, ``regularizer``, ``lam``, and others.

    Returns:
        The model.

    Raises:
        HeadError: If the model has such a head already, or its last layer is a solver.
        ClassifierError: If there is no last linear layer to be found.
        OptionError: If an option is unknown or a value does not fit. The model is as it was then, as after every error.
    """
    config = HeadConfig.parse(options, owner="attach_opteq_head")
    _refuse_wrapped(model)
    taken = [name for name, module in model.named_modules() if isinstance(module, OptEqHead)]
    if taken:
        raise HeadError(
            f"Expected a model without an equilibrium head; found one at {taken[0]!r}. Take it off first: "
            "remove_opteq_head(model)."
        )
    name, layer = find_classifier(model, classifier)
    if not name:
        raise HeadError(
            f"Expected a model with a classifier inside; found a single {type(layer).__name__}. Put it into an "
            "nn.Sequential, or make an OptEqHead yourself."
        )
    if isinstance(layer, SolverBlock):
        raise HeadError(
            f"Expected {name!r} to be a plain linear layer; found a solver. Convert the model with "
            f"exclude=[{name!r}], or revert it first."
        )
    _put(model, layer, make_head(layer, config))
    _enter_into_config(model)
    return model


def make_head(layer: nn.Linear, config: HeadConfig) -> OptEqHead:
    """Returns a head for the features and classes of a linear layer, which it remembers."""
    head = OptEqHead(layer.in_features, layer.out_features, config, layer.weight.device, layer.weight.dtype)
    head.train(layer.training)
    # In a tuple, so that the old layer is no submodule: not in the state dict, not trained, not missing in a DDP.
    head.replaced = (layer,)
    return head


def remove_opteq_head(model: nn.Module) -> nn.Module:
    """Puts the linear layer back that :func:`attach_opteq_head` has replaced, with the weights that it had.

    A model that was loaded from a folder gets a new layer: the old one was not saved.

    Returns:
        The model.

    Raises:
        HeadError: If the model has no equilibrium head.
    """
    _refuse_wrapped(model)
    _, head = _find(model)
    weight = head.output.weight
    if head.replaced:
        layer = head.replaced[0].to(device=weight.device, dtype=weight.dtype)
    else:
        layer = nn.Linear(head.in_features, head.out_features, device=weight.device, dtype=weight.dtype)
    layer.train(head.training)
    _put(model, head, layer)
    _enter_into_config(model)
    return model


def head_of(model: nn.Module) -> HeadRecord | None:
    """Writes down which equilibrium head a model has; None if it has none.

    ``attach_opteq_head(plain_model, classifier=record.name, **record.config.options())`` does it again.
    """
    if not any(isinstance(module, OptEqHead) for module in model.modules()):
        return None
    name, head = _find(model)
    return HeadRecord(name=name, config=head.config)


def attach_again(model: nn.Module, record: HeadRecord) -> nn.Module:
    """Attaches the head that a record describes; the layer that it replaces is forgotten."""
    attach_opteq_head(model, classifier=record.name, **record.config.options())
    _find(model)[1].replaced = ()
    return model


def _enter_into_config(model: nn.Module) -> None:
    """Lets ``save_pretrained``, and with it checkpoints of the Trainer, write the head down, or no longer."""
    if not is_pretrained_model(model):
        return
    config: Any = model.config
    record = head_of(model)
    if record is not None:
        setattr(config, HEAD_ENTRY, record.options())
    elif hasattr(config, HEAD_ENTRY):
        delattr(config, HEAD_ENTRY)


def _refuse_wrapped(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise HeadError(f"Expected a torch.nn.Module; found {type(model).__name__}.")
    wrapper = wrapper_of(model)
    # Hooks move inputs between devices; they do not hide a head.
    if wrapper is not None and wrapper is not HOOKED:
        raise HeadError(wrapper.refusal("change"))


def _find(model: nn.Module) -> tuple[str, OptEqHead]:
    for name, module in model.named_modules():
        if isinstance(module, OptEqHead):
            return name, module
    raise HeadError(f"Expected a model with an equilibrium head; found {type(model).__name__} without one.")


def _put(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replaces a module everywhere in a model: it may stand under several names."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is old:
                parent._modules[name] = new
