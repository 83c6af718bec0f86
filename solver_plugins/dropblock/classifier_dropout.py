"""Structured dropout before the last layer of any classifier, by a hook: the model's modules do not change."""

from typing import Any, Self

from torch import nn
from torch.utils.hooks import RemovableHandle

from solver_plugins.dropblock.classifier import find_classifier
from solver_plugins.dropblock.layers import structured_dropout
from solver_plugins.dropblock.retain import check_divides
from solver_plugins.dropblock.schemes import GridBlocks, Sampler, Scheme, make_scheme


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
