"""The fixed-point problem of an equilibrium network, as a pure map of its state."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from solver_plugins.equilibrium.regularizers import FeatureRegularizer
from solver_plugins.equilibrium.unit import Unit


class FixedPointProblem(Protocol):
    """What the solvers know of a problem."""

    @property
    def dims(self) -> tuple[int, ...]:
        """The (negative) dimensions that make up one problem; those in front are a batch of independent ones."""

    def image(self, z: Tensor | None) -> Tensor:
        """Returns ``T(z)``; None is zero."""


@dataclass(frozen=True, eq=False)
class Regularization:
    """A feature regulariser with its weight.

    Attributes:
        regularizer: ``R``.
        lam: Its weight.
    """

    regularizer: FeatureRegularizer
    lam: float

    def append(self, z: Tensor, dims: tuple[int, ...]) -> Tensor:
        """Returns ``prox_{lam R}(z)``, or ``z - lam grad R(z)`` where that has no simple form (section 4.1)."""
        moved = self.regularizer.prox(z, self.lam, dims)
        return z - self.lam * self.regularizer.gradient(z, dims) if moved is None else moved


@dataclass(frozen=True, eq=False)
class EquilibriumProblem:
    """``z = T(z)``, ``T = T_R o f_L o ... o f_1`` (equations 4 and 5, section 4.1).

    Attributes:
        units: The layers, with the input put in.
        alpha: The step ``a`` of all of them.
        appended: A regulariser whose proximal map ``T_R`` follows the layers.
        chosen: A regulariser that SAM chooses among several fixed points by (section 4.2).
    """

    units: tuple[Unit, ...]
    alpha: float
    appended: Regularization | None = None
    chosen: Regularization | None = None

    @property
    def sample_dims(self) -> tuple[int, ...]:
        """The (negative) dimensions of one sample: features first, then space."""
        return self.units[0].operator.problem_dims

    @property
    def dims(self) -> tuple[int, ...]:
        own = self.sample_dims
        return (-len(own) - 1, *own) if self.coupled else own

    @property
    def coupled(self) -> bool:
        """Whether samples of a batch depend on each other, so that the batch is one problem."""
        return self.appended is not None and self.appended.regularizer.of_batch

    @property
    def symmetric(self) -> bool:
        """Whether the Jacobian is symmetric: a single layer with nothing behind it."""
        return len(self.units) == 1 and self.appended is None

    def image(self, z: Tensor | None) -> Tensor:
        for unit in self.units:
            z = unit.step(z, self.alpha)
        assert z is not None
        return z if self.appended is None else self.appended.append(z, self.sample_dims)

    def image_and_jacobian(self, z: Tensor | None) -> "tuple[Tensor, Jacobian]":
        """Returns ``T(z)`` and the Jacobian there, which is not recorded."""
        slopes = []
        for unit in self.units:
            z, slope = unit.step_and_slope(z, self.alpha)
            slopes.append(slope)
        assert z is not None
        pull: Callable[[Tensor], Tensor] | None = None
        if self.appended is not None:
            appended, dims = self.appended, self.sample_dims
            _, vjp = torch.func.vjp(lambda at: appended.append(at, dims), z.detach())  # type: ignore[misc]
            pull = lambda y: vjp(y)[0]  # noqa: E731
            z = appended.append(z, dims)
        return z, Jacobian(tuple(unit.detached() for unit in self.units), self.alpha, tuple(slopes), pull)


@dataclass(frozen=True, eq=False)
class Jacobian:
    """``J = J_R J_L ... J_1`` at a point, ``J_l = a W_l^T D_l W_l + (1 - a) I`` (symmetric); it records nothing.

    Attributes:
        units: The layers, detached.
        alpha: Their step.
        slopes: ``D_l``.
        appended: ``y -> J_R^T y``.
    """

    units: tuple[Unit, ...]
    alpha: float
    slopes: tuple[Tensor, ...]
    appended: Callable[[Tensor], Tensor] | None = None

    def transposed(self, y: Tensor) -> Tensor:
        """Returns ``J^T y``."""
        if self.appended is not None:
            y = self.appended(y)
        for unit, slope in zip(reversed(self.units), reversed(self.slopes), strict=True):
            curved = unit.curvature(slope, y)
            y = curved if self.alpha == 1 else torch.lerp(y, curved, self.alpha)
        return y
