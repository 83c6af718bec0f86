"""The interface of a linear layer as a matrix ``A`` from ``n1`` input to ``n2`` output features."""

import abc
import dataclasses
from dataclasses import dataclass

from torch import Tensor

from solver_plugins.operators.precision import scaled_kernel


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
    @abc.abstractmethod
    def out_features(self) -> int:
        """``n2``: the number of output features (for a convolution: channels)."""

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

    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        """Returns the inner product of each problem; its dimensions are kept with size one."""
        return (a * b).sum(self.problem_dims, keepdim=True)

    def per_feature(self, values: Tensor) -> Tensor:
        """Returns a vector of one number per feature in a shape that broadcasts along :attr:`feature_dim`."""
        return values.reshape(values.shape + (1,) * (len(self.problem_dims) - 1))
