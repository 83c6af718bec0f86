"""Structured dropout right before the last layer of any classifier, without a change to the model's modules."""

from typing import Any

from torch import nn

from solver_plugins.dropblock.at_classifier import AtClassifier
from solver_plugins.dropblock.layers import structured_dropout
from solver_plugins.dropblock.schemes import Sampler, Scheme


class ClassifierDropout(AtClassifier):
    """Drops inputs of a model's last layer while it trains: the sampled twin of ``StructuredDropoutRegularizer``.

    ``remove()`` takes it off the model, as does the end of a ``with`` block.

    Args:
        model: The classifier; see :func:`find_classifier` for how its last layer is found.
        scheme: "dropout", "dropblock", "overlapping", a :class:`Scheme`, or a sampler.
        theta: The retain probability of a named scheme.
        block_size: The block size of a named scheme.
        classifier: The last layer or its name, where it is not found by itself.

    Attributes:
        name: The last layer's name.
        classifier: The last layer.
        scheme: The scheme.

    Raises:
        ClassifierError: If the last layer is not found.
        BlockSizeError: If blocks of a grid do not divide its width.
        UnknownNameError: For an unknown scheme.
        OptionError: For other options out of range.
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
