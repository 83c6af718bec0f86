"""The fixed-point problem of an equilibrium network, as a pure map of its state."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from solver_plugins.equilibrium.activations import antiderivative
from solver_plugins.equilibrium.regularizers import FeatureRegularizer
from solver_plugins.operators import LinearOperator, is_faked
from solver_plugins.prox import Prior


@dataclass(frozen=True, eq=False)
class Slope:
    """The diagonal ``D = s'(v)`` at a point, and ``s(v)``; the former is None if the prior knows it from the value."""

    value: Tensor
    derivative: Tensor | None


@dataclass(frozen=True, eq=False)
class Unit:
    """``z -> W^T s(W z + c)``, the gradient of the convex ``psi(z) = 1^T S(W z + c)`` (Theorem 1).

    ``operator`` is ``W``, ``offset`` is ``c = U x + b``, and the proximal map of ``prior`` is the activation ``s``.
    """

    operator: LinearOperator
    offset: Tensor
    prior: Prior

    def argument(self, z: Tensor | None) -> Tensor:
        """Returns ``W z + c``; None is zero."""
        return self.offset if z is None else _added(self.operator.apply(z), self.offset)

    def value(self, z: Tensor | None) -> Tensor:
        return self.operator.adjoint(self.prior.prox(self.argument(z), 1.0))

    def step(self, z: Tensor | None, alpha: float) -> Tensor:
        """Returns ``alpha W^T s(W z + c) + (1 - alpha) z`` (equation 5)."""
        return mixed(z, self.value(z), alpha)

    def step_with_slope(self, z: Tensor | None, alpha: float) -> "tuple[Tensor, Slope]":
        """Returns the step and ``D = s'(W z + c)``, which has no gradient."""
        argument = self.argument(z)
        value = self.prior.prox(argument, 1.0)
        with torch.no_grad():
            # ReLU, for example, multiplies by its slope in one pass over memory, given the value that is kept anyway.
            known = self.prior.slope_from_value and type(self.prior).vjp is not Prior.vjp
            slope = Slope(value.detach(), None if known else self.prior.derivative(argument, 1.0))
        return mixed(z, self.operator.adjoint(value), alpha), slope

    def scaled(self, slope: "Slope", v: Tensor) -> Tensor:
        return self.prior.vjp(slope.value, 1.0, v) if slope.derivative is None else slope.derivative * v

    def curvature(self, slope: "Slope", y: Tensor) -> Tensor:
        """Returns ``W^T D W y``, the Hessian of ``psi`` times ``y``."""
        return self.operator.adjoint(self.scaled(slope, self.operator.apply(y)))

    def channels_last(self) -> "Unit":
        """Returns the same unit of feature maps without gradients, in the memory format channels_last."""
        weight, offset = (
            tensor.detach().contiguous(memory_format=torch.channels_last)
            for tensor in (self.operator.weight, self.offset)
        )
        return Unit(dataclasses.replace(self.operator, weight=weight), offset, self.prior)

    def detached(self) -> "Unit":
        """Returns the linear part alone: no graph, and no offset that would be kept alive."""
        operator = dataclasses.replace(self.operator, weight=self.operator.weight.detach())
        return Unit(operator, self.offset.new_empty(0), self.prior)


def mixed(z: Tensor | None, value: Tensor, alpha: float) -> Tensor:
    """Returns ``alpha value + (1 - alpha) z``; None is zero. Without gradients it overwrites ``value``."""
    if alpha == 1:
        return value
    if z is None:
        return alpha * value
    return torch.lerp(z, value, alpha) if torch.is_grad_enabled() else value.lerp_(z, 1 - alpha)


def _added(product: Tensor, offset: Tensor) -> Tensor:
    """Returns the sum; without gradients it overwrites the product, because new memory costs more than the sum."""
    if torch.is_grad_enabled() or product.dtype != offset.dtype or product.shape != offset.shape:
        return product + offset
    return product.add_(offset)


def may_look() -> bool:
    """Whether values may be read, to stop early and to report; not in a compiled graph, nor where there are none."""
    return not torch.compiler.is_compiling() and not is_faked()


def rows_of(layout: "EquilibriumProblem | Jacobian", z: Tensor) -> Tensor:
    """Returns states ``[batch, ...]`` as a view with one row per problem, in the order of memory."""
    if layout.channels_last:
        z = z.permute(0, 2, 3, 1)
    return z.reshape(math.prod(z.shape[: z.ndim - len(layout.dims)]), -1)


def states_of(layout: "EquilibriumProblem | Jacobian", rows: Tensor, shape: torch.Size) -> Tensor:
    """Returns rows as states of a shape: the inverse of :func:`rows_of`."""
    if not layout.channels_last:
        return rows.reshape(shape)
    batch, channels, height, width = shape
    return rows.reshape(batch, height, width, channels).permute(0, 3, 1, 2)


@dataclass(frozen=True, eq=False)
class Regularization:
    """A feature regulariser ``R`` with its weight."""

    regularizer: FeatureRegularizer
    lam: float

    def append(self, z: Tensor, dims: tuple[int, ...]) -> Tensor:
        """Returns ``prox_{lam R}(z)``, or ``z - lam grad R(z)`` if the former has no simple form (section 4.1)."""
        moved = self.regularizer.prox(z, self.lam, dims)
        return z - self.lam * self.regularizer.gradient(z, dims) if moved is None else moved


@dataclass(frozen=True, eq=False)
class EquilibriumProblem:
    """``z = T(z)``, ``T = T_R o f_L o ... o f_1`` (equations 4 and 5, section 4.1), for a fixed input.

    ``appended`` is a regulariser whose proximal map ``T_R`` follows the layers, ``chosen`` one by which SAM chooses
    among several fixed points (section 4.2). With ``channels_last``, states are feature maps in that memory format.
    """

    units: tuple[Unit, ...]
    alpha: float
    appended: Regularization | None = None
    chosen: Regularization | None = None
    channels_last: bool = False

    @property
    def sample_dims(self) -> tuple[int, ...]:
        """The (negative) dimensions of one sample: features first, then space."""
        return self.units[0].operator.problem_dims

    @property
    def dims(self) -> tuple[int, ...]:
        """The (negative) dimensions of one problem; those in front are a batch of independent problems."""
        own = self.sample_dims
        # A regulariser of the batch makes all samples one problem.
        coupled = self.appended is not None and self.appended.regularizer.of_batch
        return (-len(own) - 1, *own) if coupled else own

    @property
    def explicit(self) -> bool:
        """Whether the map has no other parameters than the weights and offsets of its layers."""
        return self.appended is None and not any(unit.prior.learnable or unit.prior.opaque for unit in self.units)

    def prepared(self) -> "EquilibriumProblem":
        """Returns the same problem for many evaluations without gradients.

        On a CPU, feature maps become channels_last, the order in which convolutions compute there. Otherwise each
        convolution would convert its input and output.
        """
        offset = self.units[0].offset
        if len(self.sample_dims) != 3 or offset.ndim != 4 or offset.device.type != "cpu":
            return self
        units = tuple(unit.channels_last() for unit in self.units)
        return dataclasses.replace(self, units=units, channels_last=True)

    def start(self) -> Tensor | None:
        """Returns where to start: the last layer's value at zero, or None (zero) for a single layer.

        A composition contracts layer by layer. This start is one layer ahead of zero and costs one product with
        ``W^T``. For a single layer it would be ``T(0)``, which is the first evaluation anyway.
        """
        if len(self.units) == 1:
            return None
        z = self.units[-1].step(None, self.alpha)
        return z if self.appended is None else self.appended.append(z, self.sample_dims)

    def image(self, z: Tensor | None) -> Tensor:
        """Returns ``T(z)``; None is zero."""
        for unit in self.units:
            z = unit.step(z, self.alpha)
        assert z is not None
        return z if self.appended is None else self.appended.append(z, self.sample_dims)

    def image_and_jacobian(self, z: Tensor | None) -> "tuple[Tensor, Jacobian]":
        """Returns ``T(z)`` and its Jacobian, which has no gradient itself."""
        inputs, slopes = [], []
        for unit in self.units:
            inputs.append(None if z is None else z.detach())
            z, slope = unit.step_with_slope(z, self.alpha)
            slopes.append(slope)
        assert z is not None
        pull: Callable[[Tensor], Tensor] | None = None
        if self.appended is not None:
            appended, dims = self.appended, self.sample_dims
            _, vjp = torch.func.vjp(lambda at: appended.append(at, dims), z.detach())  # type: ignore[misc]
            pull = lambda y: vjp(y)[0]  # noqa: E731
            z = appended.append(z, dims)
        units = tuple(unit.detached() for unit in self.units)
        return z, Jacobian(units, self.alpha, tuple(slopes), tuple(inputs), self.dims, pull, self.channels_last)


@dataclass(frozen=True, eq=False)
class Pull:
    """What a product ``J^T y`` leaves at each layer; linear in ``y``.

    ``outer`` is ``g_l``, the gradient of the layer's output; ``inner`` is ``D_l W_l g_l``, which times the step ``a``
    is the gradient of ``W_l z + c_l``.
    """

    outer: tuple[Tensor, ...]
    inner: tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Jacobian:
    """``J = J_R J_L ... J_1`` at a point, ``J_l = a W_l^T D_l W_l + (1 - a) I`` (symmetric), without gradients.

    ``units`` are the layers, detached; ``slopes`` are ``D_l`` with the values ``s_l = s(W_l z_l + c_l)``, ``inputs``
    the states ``z_l`` (None is zero), ``dims`` the (negative) dimensions of one problem, and ``appended`` is ``y ->
    J_R^T y``.
    """

    units: tuple[Unit, ...]
    alpha: float
    slopes: tuple[Slope, ...]
    inputs: tuple[Tensor | None, ...]
    dims: tuple[int, ...]
    appended: Callable[[Tensor], Tensor] | None = None
    channels_last: bool = False

    @property
    def symmetric(self) -> bool:
        """Whether ``J`` is symmetric: a single layer with nothing behind it."""
        return len(self.units) == 1 and self.appended is None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors that depend on the point: each layer's input, value and slope."""
        parts = zip(self.inputs, self.slopes, strict=True)
        return tuple(part for z, slope in parts for part in (z, slope.value, slope.derivative))

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> "Jacobian":
        values = cast(Sequence[Tensor], tensors[1::3])
        slopes = tuple(Slope(value, slope) for value, slope in zip(values, tensors[2::3], strict=True))
        return dataclasses.replace(self, slopes=slopes, inputs=tuple(tensors[::3]))

    def transposed(self, y: Tensor) -> Tensor:
        return self.finish(self.pull(y))

    def pull(self, y: Tensor) -> Pull:
        """Returns the product ``J^T y`` up to its last factor ``W_1^T``, which :meth:`finish` applies."""
        if self.appended is not None:
            y = self.appended(y)
        outer, inner = [], []
        for index in reversed(range(len(self.units))):
            unit = self.units[index]
            outer.append(y)
            inner.append(unit.scaled(self.slopes[index], unit.operator.apply(y)))
            if index:
                y = mixed(y, unit.operator.adjoint(inner[-1]), self.alpha)
        return Pull(tuple(reversed(outer)), tuple(reversed(inner)))

    def finish(self, pull: Pull) -> Tensor:
        """Returns ``J^T y`` from its :meth:`pull`."""
        return mixed(pull.outer[0], self.units[0].operator.adjoint(pull.inner[0]), self.alpha)

    def weight_gradient(self, pull: Pull, index: int) -> Tensor:
        """Returns the gradient of ``<T(z), y>`` by the weight of a layer.

        ``W`` occurs twice, in ``W z`` and in ``W^T s``; the pull has both factors of both products.
        """
        operator, z = self.units[index].operator, self.inputs[index]
        total = operator.weight_gradient(pull.outer[index], self.slopes[index].value)
        if z is not None:
            total = total.add_(operator.weight_gradient(z, pull.inner[index]))
        return total if self.alpha == 1 else total.mul_(self.alpha)

    def offset_gradient(self, pull: Pull, index: int) -> Tensor:
        """Returns the gradient of ``<T(z), y>`` by the offset of a layer."""
        return pull.inner[index] if self.alpha == 1 else self.alpha * pull.inner[index]


def potential(unit: Unit, z: Tensor) -> Tensor:
    """Returns ``psi(z) = 1^T S(W z + c)`` per sample; its gradient is the unit layer."""
    return antiderivative(unit.prior, unit.argument(z)).sum(unit.operator.problem_dims)


def objective(unit: Unit, z: Tensor) -> Tensor:
    """Returns ``h(z) = |z|^2/2 - 1^T S(W z + c)`` per sample, convex for ``|W| <= 1``.

    ``grad h(z) = z - W^T s(W z + c)``: its minimiser is the equilibrium of one layer, for any ``alpha``.
    """
    return z.square().sum(unit.operator.problem_dims) / 2 - potential(unit, z)
