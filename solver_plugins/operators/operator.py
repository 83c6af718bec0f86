"""A linear layer as a matrix ``A`` from ``n1`` input to ``n2`` output features, with its exact adjoint."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.grad
from torch import Tensor
from torch.nn import functional

from solver_plugins.errors import ShapeError
from solver_plugins.operators.geometry import ConvSizes, Geometry
from solver_plugins.operators.padding import pad, pad_adjoint
from solver_plugins.operators.precision import check_diagonal, match_dtype, scaled_kernel
from solver_plugins.operators.symbol import column_suprema

_CONV: tuple[Callable[..., Tensor], ...] = (functional.conv1d, functional.conv2d, functional.conv3d)
_CONV_WEIGHT: tuple[Callable[..., Tensor], ...] = (
    torch.nn.grad.conv1d_weight,
    torch.nn.grad.conv2d_weight,
    torch.nn.grad.conv3d_weight,
)
_CONV_TRANSPOSE: tuple[Callable[..., Tensor], ...] = (
    functional.conv_transpose1d,
    functional.conv_transpose2d,
    functional.conv_transpose3d,
)


_known_sizes = functools.lru_cache(maxsize=4096)(Geometry.sizes)


@dataclass(frozen=True, eq=False)
class LinearOperator(abc.ABC):
    """A linear map ``A`` and its exact adjoint, for inputs of one size.

    Each forward pass makes a new operator from the current weights. An operator holds no state and no ``nn.Module``,
    and is differentiable in its tensors. The bias is not part of ``A``. With a ``diagonal``, a scale per output feature
    (a folded norm), the operator is ``diag(d) A``.
    """

    weight: Tensor
    diagonal: Tensor | None

    @property
    @abc.abstractmethod
    def in_features(self) -> int:
        """``n1``: the number of input features (for a convolution: channels)."""

    @property
    def out_features(self) -> int:
        """``n2``: the number of output features (for a convolution: channels)."""
        return self.weight.shape[0]

    @property
    @abc.abstractmethod
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one ``u`` without batch dimensions: ``n1``, and space for a convolution."""

    @property
    @abc.abstractmethod
    def output_shape(self) -> tuple[int, ...]:
        """The shape of one ``A u`` without batch dimensions: ``n2``, and space for a convolution."""

    @property
    @abc.abstractmethod
    def problem_dims(self) -> tuple[int, ...]:
        """The (negative) dimensions of one problem: features, and space for a convolution.

        All others are batch dimensions, whose problems are independent of each other.
        """

    @property
    def feature_dim(self) -> int:
        """The (negative) dimension of the features: the first of :attr:`problem_dims`."""
        return self.problem_dims[0]

    @abc.abstractmethod
    def apply(self, u: Tensor) -> Tensor:
        """Returns ``A u``."""

    @abc.abstractmethod
    def adjoint(self, x: Tensor) -> Tensor:
        """Returns ``A^T x``."""

    @abc.abstractmethod
    def column_norms_sq(self) -> Tensor:
        """Returns ``|a_i|^2`` per input feature, shape ``(n1,)``.

        For a convolution ``a_i`` is a whole input channel, and the number bounds ``lambda_max(A_i A_i^T)``.
        """

    def gram(self, x: Tensor) -> Tensor:
        """Returns ``A A^T x``."""
        return self.apply(self.adjoint(x))

    @abc.abstractmethod
    def weight_gradient(self, u: Tensor, grad: Tensor) -> Tensor:
        """Returns the gradient of ``<A u, grad>`` by the weight; only for operators without a diagonal.

        One product sums over all batch dimensions; the result has the dtype of the factors.
        """

    def folded(self) -> "LinearOperator":
        """Returns the same map with its diagonal multiplied into the weight, differentiable in both."""
        if self.diagonal is None:
            return self
        weight = scaled_kernel(self.weight, self.diagonal).to(self.weight.dtype)
        return dataclasses.replace(self, weight=weight, diagonal=None)

    def _scaled(self, x: Tensor) -> Tensor:
        """Returns ``diag(d) x``, rounded once, to the dtype of ``x``, even if ``d`` has more precision."""
        return x if self.diagonal is None else (x * self.per_feature(self.diagonal)).to(x.dtype)

    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        """Returns the inner product of each problem; its dimensions are kept with size one."""
        return (a * b).sum(self.problem_dims, keepdim=True)

    def per_feature(self, values: Tensor) -> Tensor:
        """Returns a vector of one number per feature in a shape that broadcasts along :attr:`feature_dim`."""
        return values.reshape(values.shape + (1,) * (len(self.problem_dims) - 1))


@dataclass(frozen=True, eq=False)
class LinearMap(LinearOperator):
    """``A u = diag(d) W u`` along the last dimension; all other dimensions are batch dimensions.

    ``W``, of shape ``(n2, n1)``, may be a transposed view.
    """

    diagonal: Tensor | None = None

    def __post_init__(self) -> None:
        if self.weight.ndim != 2:
            raise ShapeError(f"Expected a weight of shape (n2, n1); found {tuple(self.weight.shape)}.")
        check_diagonal(self.diagonal, self.out_features)

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (self.in_features,)

    @property
    def output_shape(self) -> tuple[int, ...]:
        return (self.out_features,)

    @property
    def problem_dims(self) -> tuple[int, ...]:
        return (-1,)

    def apply(self, u: Tensor) -> Tensor:
        self._check(u, self.in_features, "input")
        return self._scaled(functional.linear(match_dtype(u, self.weight), self.weight))

    def adjoint(self, x: Tensor) -> Tensor:
        self._check(x, self.out_features, "output")
        return functional.linear(match_dtype(self._scaled(x), self.weight), self.weight.t())

    def column_norms_sq(self) -> Tensor:
        with torch.no_grad():
            weight = scaled_kernel(self.weight, self.diagonal)
            return weight.square().sum(0)

    def weight_gradient(self, u: Tensor, grad: Tensor) -> Tensor:
        return grad.reshape(-1, grad.shape[-1]).t() @ u.reshape(-1, u.shape[-1])

    def _check(self, x: Tensor, features: int, what: str) -> None:
        if x.ndim < 1 or x.shape[-1] != features:
            raise ShapeError(f"Expected an {what} of shape (..., {features}); found {tuple(x.shape)}.")


@dataclass(frozen=True, eq=False)
class ConvMap(LinearOperator):
    """``A u = diag(d) (W * u)`` for inputs ``[..., n1, *input_size]``; leading dimensions are batch dimensions.

    ``W`` has the shape ``(n2, n1 / groups, *kernel_size)``. The adjoint needs the spatial size of ``u`` because a
    stride rounds the output size.
    """

    geometry: Geometry
    input_size: tuple[int, ...]
    sizes: ConvSizes = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        if not 1 <= self.geometry.dims <= 3 or self.weight.ndim != self.geometry.dims + 2:
            raise ShapeError(
                f"Expected a kernel [n2, n1/groups, *k] with as many dimensions of space as its geometry, "
                f"{self.geometry.dims} (1 to 3); found shape {tuple(self.weight.shape)}."
            )
        if self.weight.shape[0] % self.geometry.groups:
            raise ShapeError(
                f"Expected {self.geometry.groups} groups to divide the outputs; found {self.weight.shape[0]}."
            )
        check_diagonal(self.diagonal, self.out_features)
        # Whole numbers are looked up; those of a compiler may be symbols.
        known = not torch.compiler.is_compiling() and all(type(n) is int for n in self.input_size)
        sizes = (_known_sizes if known else Geometry.sizes)(self.geometry, self.kernel_size, self.input_size)
        object.__setattr__(self, "sizes", sizes)

    @property
    def in_features(self) -> int:
        return self.weight.shape[1] * self.geometry.groups

    @property
    def kernel_size(self) -> tuple[int, ...]:
        """Taps per dimension."""
        return tuple(self.weight.shape[2:])

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (self.in_features, *self.input_size)

    @property
    def output_shape(self) -> tuple[int, ...]:
        return (self.out_features, *self.sizes.output_size)

    @property
    def problem_dims(self) -> tuple[int, ...]:
        return tuple(range(-self.geometry.dims - 1, 0))

    def apply(self, u: Tensor) -> Tensor:
        u, batch = self._flatten(u, self.input_shape, "input")
        u, own = self._padded(match_dtype(u, self.weight))
        geometry = self.geometry
        conv = _CONV[u.dim() - 3]
        out = conv(u, self.weight, None, geometry.stride, own, geometry.dilation, geometry.groups)
        return self._scaled(out.reshape(batch + out.shape[1:]))

    def adjoint(self, x: Tensor) -> Tensor:
        geometry, sizes = self.geometry, self.sizes
        x, batch = self._flatten(x, (self.out_features, *sizes.output_size), "output")
        x = match_dtype(self._scaled(x), self.weight)
        transpose = _CONV_TRANSPOSE[x.dim() - 3]
        u = transpose(
            x,
            self.weight,
            None,
            geometry.stride,
            sizes.own,
            sizes.remainder,
            geometry.groups,
            geometry.dilation,
        )
        for dim, left, right in sizes.by_hand:
            u = pad_adjoint(u, dim, left, right, geometry.padding_mode)
        return u.reshape(batch + u.shape[1:])

    def column_norms_sq(self) -> Tensor:
        with torch.no_grad():
            bound = column_suprema(self.weight, self.geometry, self.diagonal, self.input_size)
            return bound.to(torch.promote_types(self.weight.dtype, torch.float32))

    def weight_gradient(self, u: Tensor, grad: Tensor) -> Tensor:
        u, own = self._padded(self._flatten(u, self.input_shape, "input")[0])
        grad, _ = self._flatten(grad, self.output_shape, "output")
        geometry = self.geometry
        conv_weight = _CONV_WEIGHT[u.dim() - 3]
        return conv_weight(u, self.weight.shape, grad, geometry.stride, own, geometry.dilation, geometry.groups)

    def _padded(self, u: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """Returns an input padded by hand, and the padding that is left to the convolution."""
        sizes = self.sizes
        for dim, left, right in sizes.by_hand:
            u = pad(u, dim, left, right, self.geometry.padding_mode)
        return u, sizes.own

    def _flatten(self, x: Tensor, shape: tuple[int, ...], what: str) -> tuple[Tensor, torch.Size]:
        """Checks the shape and merges all batch dimensions into one."""
        if x.ndim < len(shape) or tuple(x.shape[-len(shape) :]) != shape:
            raise ShapeError(
                f"Expected an {what} of shape (..., {', '.join(map(str, shape))}); found {tuple(x.shape)}."
            )
        batch = x.shape[: x.ndim - len(shape)]
        return (x if len(batch) == 1 else x.reshape((-1, *shape))), batch


def operator_from_kernel(
    kernel: Tensor, geometry: Geometry, input_shape: Sequence[int], diagonal: Tensor | None = None
) -> LinearOperator:
    """Returns the operator of a kernel ``[n2, n1/groups, *k]``; see :func:`~solver_plugins.operators.operator_for`."""
    dims = geometry.dims
    operator: LinearOperator
    if dims == 0:
        operator = LinearMap(kernel, diagonal)
    elif len(input_shape) <= dims:
        raise ShapeError(f"Expected an input of shape (..., channels, {dims} of space); found {tuple(input_shape)}.")
    else:
        operator = ConvMap(kernel, diagonal, geometry, tuple(input_shape[-dims:]))
    if not input_shape or input_shape[operator.feature_dim] != operator.in_features:
        raise ShapeError(
            f"Expected an input with {operator.in_features} features in dimension {operator.feature_dim}; "
            f"found shape {tuple(input_shape)}."
        )
    return operator
