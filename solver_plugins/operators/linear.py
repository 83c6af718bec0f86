"""A matrix as a linear operator."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from solver_plugins.errors import ShapeError
from solver_plugins.operators.operator import LinearOperator
from solver_plugins.operators.precision import check_diagonal, match_dtype, scale_rows, scaled_kernel


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
    def out_features(self) -> int:
        return self.weight.shape[0]

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
        out = functional.linear(match_dtype(u, self.weight), self.weight)
        return scale_rows(out, self.diagonal, 0)

    def adjoint(self, x: Tensor) -> Tensor:
        self._check(x, self.out_features, "output")
        x = scale_rows(x, self.diagonal, 0)
        return functional.linear(match_dtype(x, self.weight), self.weight.t())

    def column_norms_sq(self) -> Tensor:
        with torch.no_grad():
            weight = scaled_kernel(self.weight, self.diagonal)
            return weight.square().sum(0)

    def weight_gradient(self, u: Tensor, grad: Tensor) -> Tensor:
        return grad.reshape(-1, grad.shape[-1]).t() @ u.reshape(-1, u.shape[-1])

    def _check(self, x: Tensor, features: int, what: str) -> None:
        if x.ndim < 1 or x.shape[-1] != features:
            raise ShapeError(f"Expected an {what} of shape (..., {features}); found {tuple(x.shape)}.")
