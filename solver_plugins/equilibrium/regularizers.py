"""Feature regularisers ``R(z)`` of equilibria (section 4 and appendix A.1); users can register their own.

A third-party distribution adds one by an entry point of the group ``solver_plugins.feature_regularizers``.
"""

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from solver_plugins.errors import OptionError
from solver_plugins.registry import Registry, subclasses_of

Dims = tuple[int, ...]
"""The (negative) dimensions of one sample: features first, then space."""


class FeatureRegularizer(abc.ABC):
    """A function ``R`` of the features, and its gradient.

    Write :meth:`value`. The gradient is found by autograd unless you write :meth:`gradient`. If you write :meth:`prox`,
    the proximal map is appended instead of a gradient step. A function of the whole batch (``of_batch``) only acts in
    training, so that no prediction depends on its neighbours.
    """

    name: ClassVar[str]
    tags: ClassVar[frozenset[str]] = frozenset()
    of_batch: ClassVar[bool] = False

    @property
    def smoothness(self) -> float:
        """A Lipschitz constant of the gradient (``L_z`` in Theorem 4); SAM takes steps of ``1/(2 smoothness)``."""
        return 1.0

    @abc.abstractmethod
    def value(self, z: Tensor, dims: Dims) -> Tensor:
        """Returns ``R``, one number per sample, or one number if it is a function of the batch."""

    def gradient(self, z: Tensor, dims: Dims) -> Tensor:
        """Returns the gradient of the sum of all values; it is differentiable."""
        return torch.func.grad(lambda at: self.value(at, dims).sum())(z)

    def prox(self, z: Tensor, lam: float, dims: Dims) -> Tensor | None:
        """Returns ``argmin_u lam R(u) + |u - z|^2 / 2``, or None if it has no simple form."""
        return None


FEATURE_REGULARIZERS: Registry[type[FeatureRegularizer]] = Registry(
    "feature regularizer",
    entry_point_group="solver_plugins.feature_regularizers",
    check=subclasses_of(FeatureRegularizer, "solver_plugins.equilibrium.FeatureRegularizer"),
)
register_regularizer = FEATURE_REGULARIZERS.register_class
"""Class decorator: registers a feature regulariser under its ``name``."""
list_regularizers = FEATURE_REGULARIZERS.names
"""Returns the names of the feature regularisers; ``filter`` is a glob on the name or a tag ("convex", "batch")."""


def make_regularizer(given: str | Mapping[str, Any] | FeatureRegularizer) -> FeatureRegularizer:
    """Makes a regulariser from its name or from ``{"name": ..., parameter: value}``; returns an instance unchanged."""
    if isinstance(given, FeatureRegularizer):
        return given
    parameters = {"name": given} if isinstance(given, str) else dict(given) if isinstance(given, Mapping) else {}
    if "name" not in parameters:
        raise OptionError(f"Expected a regularizer as a name or as {{'name': ..., ...}}; found {given!r}.")
    return FEATURE_REGULARIZERS.make(parameters.pop("name"), parameters)


@register_regularizer
@final
@dataclass(frozen=True)
class HalfSquared(FeatureRegularizer):
    """Half the squared norm: R(z) = |z|^2 / 2."""

    name = "half_squared"
    tags = frozenset({"convex", "paper"})

    def value(self, z: Tensor, dims: Dims) -> Tensor:
        return z.square().sum(dims) / 2

    def gradient(self, z: Tensor, dims: Dims) -> Tensor:
        return z

    def prox(self, z: Tensor, lam: float, dims: Dims) -> Tensor:
        return z / (1 + lam)


@register_regularizer
@final
@dataclass(frozen=True)
class L1(FeatureRegularizer):
    """The l1 norm, smoothed below ``eps`` for SAM: R(z) = sum_i |z_i|.

    Theorem 4 needs a Lipschitz gradient, so :meth:`gradient` is that of Huber's function, ``clip(z/eps, -1, 1)``. The
    proximal map is that of the norm itself.
    """

    eps: float = 0.1

    name = "l1"
    tags = frozenset({"convex", "paper"})

    def __post_init__(self) -> None:
        if not self.eps > 0:
            raise OptionError(f"l1: expected eps above 0; found {self.eps!r}.")

    @property
    def smoothness(self) -> float:
        return 1 / self.eps

    def value(self, z: Tensor, dims: Dims) -> Tensor:
        return z.abs().sum(dims)

    def gradient(self, z: Tensor, dims: Dims) -> Tensor:
        return (z / self.eps).clamp(-1, 1)

    def prox(self, z: Tensor, lam: float, dims: Dims) -> Tensor:
        return torch.nn.functional.softshrink(z, lam)


@register_regularizer
@final
@dataclass(frozen=True)
class InverseNorm(FeatureRegularizer):
    """Keeps features away from zero: R(z) = 1 / (|z|^2 + eps). Not convex."""

    eps: float = 1.0

    name = "inverse_norm"
    tags = frozenset({"paper"})

    def __post_init__(self) -> None:
        if not self.eps > 0:
            raise OptionError(f"inverse_norm: expected eps above 0; found {self.eps!r}.")

    @property
    def smoothness(self) -> float:
        return 2 / self.eps**2

    def value(self, z: Tensor, dims: Dims) -> Tensor:
        return 1 / (z.square().sum(dims) + self.eps)

    def gradient(self, z: Tensor, dims: Dims) -> Tensor:
        return -2 * z / (z.square().sum(dims, keepdim=True) + self.eps).square()


@register_regularizer
@final
@dataclass(frozen=True)
class Decorrelation(FeatureRegularizer):
    """Decorrelates features over the batch: R(Z) = |D Z Z^T D - I|_F^2 / 2. Not convex; only acts in training.

    ``Z`` has a row per feature (for maps: per channel) and a column per sample and place; ``D Z`` has unit rows.
    Because of ``eps``, a feature that is zero everywhere has the gradient zero.
    """

    eps: float = 1e-6

    name = "decorrelation"
    tags = frozenset({"batch", "paper"})
    of_batch = True

    def value(self, z: Tensor, dims: Dims) -> Tensor:
        rows, _ = self._rows(z, dims)
        return (rows @ rows.mT - torch.eye(len(rows), dtype=z.dtype, device=z.device)).square().sum() / 2

    def gradient(self, z: Tensor, dims: Dims) -> Tensor:
        rows, lengths = self._rows(z, dims)
        outer = 2 * (rows @ (rows.mT @ rows) - rows)
        # The normalisation removes the component along a row.
        inner = (outer - (outer * rows).sum(1, keepdim=True) * rows) / lengths
        moved = z.movedim(dims[0], 0)
        return inner.reshape(moved.shape).movedim(0, dims[0])

    def _rows(self, z: Tensor, dims: Dims) -> tuple[Tensor, Tensor]:
        Z = z.movedim(dims[0], 0).flatten(1)
        lengths = (Z.square().sum(1, keepdim=True) + self.eps).sqrt()
        return Z / lengths, lengths
