"""Gives a tensor the gradient of a fixed point instead of that of its last iteration."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from solver_plugins.errors import DoubleBackwardError


def with_adjoint(image: Tensor, adjoint: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns ``image`` itself, whose incoming gradient ``w`` becomes ``adjoint(w)`` before it goes on.

    With ``image = T(z)`` recorded at a fixed point ``z`` that is not, and ``adjoint`` solving ``y = w + J^T y``, this
    is the gradient of the fixed point (implicit function theorem). A second derivative is refused.
    """
    result: Tensor = _AdjointSolve.apply(image, adjoint)
    return result


def refuse_second_derivative() -> None:
    """Raises where the backward pass that calls it is recorded.

    ``@once_differentiable`` alone lets a second derivative pass, silently without this term, where the incoming
    gradient is a constant (``loss = out.sum() + ...``).

    Raises:
        DoubleBackwardError: If gradients are recorded.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise DoubleBackwardError(
            "Expected a first derivative only; found create_graph=True, or a torch.func transform, which always "
            "records, through an implicit gradient. Use an unrolled one, whose derivatives of any order are right: "
            "gradient='unrolled' of a solver block, grad='unrolled' of an equilibrium."
        )


class _AdjointSolve(torch.autograd.Function):
    """The identity, with a linear solve as its backward.

    Differentiating that once more would be wrong, so it is refused.
    """

    @staticmethod
    def forward(v: Tensor, adjoint: Callable[[Tensor], Tensor]) -> Tensor:
        return v.view_as(v)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.adjoint = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        refuse_second_derivative()
        return _AdjointSolve._solve(ctx, grad), None

    @staticmethod
    @once_differentiable
    def _solve(ctx: Any, grad: Tensor) -> Tensor:
        return ctx.adjoint(grad)
