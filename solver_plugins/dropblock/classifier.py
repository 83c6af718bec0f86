"""The last linear layer of any classifier, found without importing its library, and dropout before it by a hook."""

from collections.abc import Iterator
from typing import Any, Self

from torch import nn
from torch.utils.hooks import RemovableHandle

from solver_plugins.dropblock.errors import ClassifierError
from solver_plugins.dropblock.layers import structured_dropout
from solver_plugins.dropblock.retain import check_divides
from solver_plugins.dropblock.schemes import GridBlocks, Sampler, Scheme, make_scheme
from solver_plugins.errors import did_you_mean
from solver_plugins.wrappers import COMPILED, DATA_PARALLEL, DDP, wrapper_of

_NAMES = ("classifier", "score", "fc", "head", "heads", "qa_outputs")
"""Names that libraries give to the last layer, or to the module that holds it."""


def find_classifier(model: nn.Module, given: str | nn.Module | None = None) -> tuple[str, nn.Linear]:
    """Returns the name of a model's last linear layer and the layer; ClassifierError if it is not found.

    It knows classifiers of timm, transformers and torchvision, and any model with ``get_classifier()`` or an attribute
    ``classifier``, ``score``, ``fc`` or ``head``; for others, ``given`` is the layer or its name.
    """
    while wrapper_of(model) in (DDP, DATA_PARALLEL):
        model = model.module  # type: ignore[assignment]
    if wrapper_of(model) is COMPILED:
        raise ClassifierError(
            "Expected a model that is not compiled yet, because a compiled one may not run new hooks: pass "
            "model._orig_mod, and compile it afterwards."
        )
    for name, module in [_named(model, given)] if given is not None else _candidates(model):
        return _linear_in(name, module, model)
    if isinstance(model, nn.Linear):
        return "", model
    raise ClassifierError(
        f"{type(model).__name__} has no get_classifier() and no attribute {', '.join(_NAMES[:-1])} or {_NAMES[-1]}: "
        f"name its last layer with classifier=.{_linears(model)}"
    )


def _named(model: nn.Module, given: str | nn.Module) -> tuple[str, nn.Module]:
    modules = dict(model.named_modules())
    if isinstance(given, str):
        if given not in modules:
            raise ClassifierError(
                f"{type(model).__name__} has no module {given!r}.{did_you_mean(given, _names(model))}"
            )
        return given, modules[given]
    for name, module in modules.items():
        if module is given:
            return name, module
    raise ClassifierError(
        f"The {type(given).__name__} given as classifier is not a part of this {type(model).__name__}."
    )


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    getter = getattr(model, "get_classifier", None)
    found = getter() if callable(getter) else None
    if isinstance(found, tuple | list):
        names = [name for name, module in model.named_modules() if any(module is head for head in found)]
        raise ClassifierError(
            f"{type(model).__name__} has several classifiers: {', '.join(map(repr, names))}. Name one with classifier=."
        )
    if isinstance(found, nn.Module):
        # With an identity the model returns features.
        if isinstance(found, nn.Identity):
            raise ClassifierError(
                f"{type(model).__name__} was made without a classifier (get_classifier() is an Identity): make it with "
                f"num_classes, or name a layer with classifier=.{_linears(model)}"
            )
        yield _named(model, found)
    for name in _NAMES:
        module = getattr(model, name, None)
        if isinstance(module, nn.Module) and not isinstance(module, nn.Identity):
            yield name, module


def _linear_in(name: str, module: nn.Module, model: nn.Module) -> tuple[str, nn.Linear]:
    if isinstance(module, nn.Linear):
        return name, module
    # In a head of several layers, the last one is registered last.
    inside = [(inner, part) for inner, part in module.named_modules() if inner and isinstance(part, nn.Linear)]
    if not inside:
        raise ClassifierError(
            f"Expected {name!r} to be or hold a linear layer; found {type(module).__name__}. Name the last linear "
            f"layer with classifier=.{_linears(model)}"
        )
    inner, part = inside[-1]
    return f"{name}.{inner}", part


def _names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name]


def _linears(model: nn.Module) -> str:
    names = _names(model)
    return f" Its linear layers: {', '.join(names[-5:])}." if names else " It has no linear layer."


class AtClassifier:
    """A scheme at the last layer of a model, put there by a hook; a context manager that removes the hook."""

    _handle: RemovableHandle

    def __init__(
        self,
        model: nn.Module,
        scheme: str | Scheme | Sampler,
        theta: float | None,
        block_size: int | None,
        classifier: str | nn.Module | None,
    ):
        self.scheme = make_scheme(scheme, theta, block_size)
        self.name, self.classifier = find_classifier(model, classifier)
        if isinstance(self.scheme, GridBlocks):
            check_divides(self.scheme.block_size, self.classifier.in_features)

    def remove(self) -> None:
        self._handle.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.scheme})"


class ClassifierDropout(AtClassifier):
    """Drops inputs of a model's last layer in training: the sampled twin of ``StructuredDropoutRegularizer``.

    ``remove()`` or the end of a ``with`` block takes it off the model. Arguments, attributes and errors are those of
    :class:`StructuredDropoutRegularizer`.
    """

    def __init__(
        self,
        model: nn.Module,
        scheme: str | Scheme | Sampler,
        theta: float | None = None,
        block_size: int | None = None,
        *,
        classifier: str | nn.Module | None = None,
    ):
        super().__init__(model, scheme, theta, block_size, classifier)
        self._handle = self.classifier.register_forward_pre_hook(self._drop)

    def _drop(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (structured_dropout(args[0], self.scheme, training=module.training), *args[1:])
