"""Attaches the gradient to an equilibrium, without a recorded evaluation of the map."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from solver_plugins.equilibrium.backward import Adjoint
from solver_plugins.equilibrium.problem import EquilibriumProblem, Jacobian
from solver_plugins.operators.precision import autocast_off
from solver_plugins.solve import refuse_second_derivative


def with_gradient(value: Tensor, problem: EquilibriumProblem, jacobian: Jacobian, adjoint: Adjoint) -> Tensor:
    """Returns ``value``, an equilibrium of an explicit problem, with its gradient for weights and offsets.

    Args:
        value: ``z``, not recorded.
        problem: The problem; its weights and offsets get the gradients.
        jacobian: Its Jacobian at ``z``.
        adjoint: Solves ``y = w + J^T y``.
    """
    weights = [unit.operator.weight for unit in problem.units]
    offsets = [unit.offset for unit in problem.units]
    emptied = jacobian.with_tensors(())
    result: Tensor = _Equilibrium.apply(value, emptied, adjoint, *weights, *offsets, *jacobian.tensors)
    return result


class _Equilibrium(torch.autograd.Function):
    """A constant whose backward is the implicit gradient; a second derivative is refused."""

    @staticmethod
    def forward(value: Tensor, emptied: Jacobian, adjoint: Adjoint, *tensors: Tensor | None) -> Tensor:
        # Not a view, which later layers could not change in place.
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.emptied, ctx.adjoint, *tensors = inputs
        depth = len(ctx.emptied.units)
        # Saved by autograd, which frees them, and raises if a weight was changed before the backward.
        ctx.save_for_backward(*tensors[:depth], *tensors[2 * depth :])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        return _Equilibrium._gradients(ctx, grad)

    @staticmethod
    @once_differentiable
    def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        depth = len(ctx.emptied.units)
        jacobian = ctx.emptied.with_tensors(ctx.saved_tensors[depth:])
        needed = ctx.needs_input_grad[3:]
        with autocast_off(grad.device):
            pull = ctx.adjoint.pull(jacobian, grad)
            weights = [jacobian.weight_gradient(pull, n) if needed[n] else None for n in range(depth)]
            offsets = [jacobian.offset_gradient(pull, n) if needed[depth + n] else None for n in range(depth)]
        return (None, None, None, *weights, *offsets, *(None for _ in range(3 * depth)))
