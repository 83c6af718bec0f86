"""Equilibrium heads on any model: attached in place of its last linear layer, removed, and written down."""

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
    """Which head was attached where; ``to_json`` and ``from_json`` write and read it."""

    format: int = pydantic.Field(1, ge=1, le=1, description="Version of this form.")
    name: str = pydantic.Field(description="Name of the layer that the head replaces.")
    config: HeadConfig = pydantic.Field(description="Its options.")


def attach_opteq_head(model: nn.Module, *, classifier: str | None = None, **options: Any) -> nn.Module:
    """Replaces a model's last linear layer by an equilibrium: backbone features -> equilibrium -> classes.

    It works in place, on timm models (``get_classifier``), transformers classification models, and any module with a
    last linear layer. The head has as many classes as the layer. Call it before you make an optimizer, and before you
    compile or wrap the model.

    Args:
        model: The model.
        classifier: Name of the layer to replace; None finds the last one.
        **options: Fields of :class:`~solver_plugins.equilibrium.head.HeadConfig`: ``hidden``, ``layers``, ``alpha``,
            ``iters``, ``gradient``, ``regularizer``, ``lam``, and others.

    Raises:
        HeadError: If the model has such a head already, or its last layer is a solver.
        ClassifierError: If no last linear layer is found.
        OptionError: If an option is unknown or a value does not fit. After every error the model is as it was.
    """
    config = HeadConfig.parse(options, owner="attach_opteq_head")
    _refuse_wrapped(model)
    taken = [name for name, module in model.named_modules() if isinstance(module, OptEqHead)]
    if taken:
        raise HeadError(
            f"Expected a model without an equilibrium head; found one at {taken[0]!r}. Remove it first: "
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
    # In a tuple, so that the old layer is not a submodule: not in the state dict, not trained, not missed by DDP.
    head.replaced = (layer,)
    return head


def remove_opteq_head(model: nn.Module) -> nn.Module:
    """Puts back the linear layer that :func:`attach_opteq_head` has replaced, with the weights that it had.

    A model that was loaded from a folder gets a new layer, because the old one was not saved. HeadError if the model
    has no equilibrium head.
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
    """Returns a record of a model's equilibrium head, or None for a model without one.

    ``attach_opteq_head(plain_model, classifier=record.name, **record.config.options())`` attaches it again.
    """
    if not any(isinstance(module, OptEqHead) for module in model.modules()):
        return None
    name, head = _find(model)
    return HeadRecord(name=name, config=head.config)


def attach_again(model: nn.Module, record: HeadRecord) -> nn.Module:
    """Attaches the head that a record describes, and forgets the layer that it replaces."""
    attach_opteq_head(model, classifier=record.name, **record.config.options())
    _find(model)[1].replaced = ()
    return model


def _enter_into_config(model: nn.Module) -> None:
    """Keeps the head in a transformers config up to date, where ``save_pretrained`` and the Trainer find it."""
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
    """Replaces a module wherever it is in a model; it may have several names."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is old:
                parent._modules[name] = new
