"""A scheme of structured dropout at the last layer of any classifier, put there by a hook."""

from typing import Self

from torch import nn
from torch.utils.hooks import RemovableHandle

from solver_plugins.dropblock.classifier import find_classifier
from solver_plugins.dropblock.retain import check_divides
from solver_plugins.dropblock.schemes import GridBlocks, Sampler, Scheme, make_scheme


class AtClassifier:
    """What :class:`ClassifierDropout` and :class:`StructuredDropoutRegularizer` share; a context manager.

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
        """Takes the hook off the model."""
        self._handle.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.scheme})"
