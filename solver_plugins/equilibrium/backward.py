"""The implicit gradient of an equilibrium: ``y = w + J^T y`` at the fixed point.

With one layer, ``a (I - W^T D W) y = w`` is symmetric and positive definite, and conjugate gradients solve it in fewer
steps than any fixed-point iteration. With several layers ``J`` is not symmetric, and minimal residuals (GMRES) solve
it. The residual is checked: if it is too large, the gradient of ``iters`` unrolled iterations, taken at the fixed
point, is used instead, with a warning.

The gradients of weights and offsets only need what the product ``J^T y`` leaves at each layer. So the products that
solve for ``y`` also give these gradients: the forward records nothing, and no further pass is needed.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from solver_plugins.equilibrium.problem import EquilibriumProblem, Jacobian, Pull, may_look
from solver_plugins.equilibrium.residuals import minimal_residuals
from solver_plugins.errors import NotConvergedWarning, warn
from solver_plugins.operators.precision import autocast_off
from solver_plugins.solve import conjugate_gradients, refuse_second_derivative


@dataclass
class BackwardReport:
    """How the implicit backward went: products with the Jacobian, and the largest relative residual of the batch."""

    products: int = 0
    residual: float | None = None


@dataclass(frozen=True, eq=False)
class Adjoint:
    """Solves ``y = w + J^T y`` with the options of the forward solver; ``label`` names the module in warnings."""

    config: Any
    report: BackwardReport
    label: str

    def solve(self, jacobian: Jacobian, w: Tensor) -> Tensor:
        if not w.numel():
            return w
        w, scale = self._scaled(jacobian, w)
        y, _ = self._checked(jacobian, w)
        return y * scale

    def pull(self, jacobian: Jacobian, w: Tensor) -> Pull:
        """Returns what the product with ``J^T`` leaves at the solution ``y``."""
        w, scale = self._scaled(jacobian, w)
        y, pull = self._checked(jacobian, w, scale)
        return jacobian.pull(y * scale) if pull is None else pull

    def _scaled(self, jacobian: Jacobian, w: Tensor) -> tuple[Tensor, Tensor]:
        # Gradients may have any scale, and their squares must not underflow.
        order = torch.channels_last if jacobian.channels_last else torch.contiguous_format
        w = w.to(jacobian.slopes[0].value.dtype, memory_format=order)
        scale = w.abs().amax(jacobian.dims, keepdim=True)
        scale = torch.where(scale > 0, scale, 1.0)
        return w / scale, scale

    def _checked(self, jacobian: Jacobian, w: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Pull | None]:
        """Returns ``y``, and, if a scale is given and it is known, what the product leaves at ``y * scale``."""
        pull: Pull | None = None
        tolerance = max(float(self.config.tol), torch.finfo(w.dtype).eps)
        limit = self.config.implicit_iters
        if jacobian.symmetric:
            (unit,), (slope,) = jacobian.units, jacobian.slopes
            y, residual, products = conjugate_gradients(
                lambda y: y - unit.curvature(slope, y), w / jacobian.alpha, jacobian.dims, limit,
                tolerance=tolerance, stop=may_look(),
            )  # fmt: skip
        else:
            found = minimal_residuals(jacobian, w, tolerance, limit, pulls=scale is not None, scale=scale)
            y, pull, residual, products = found.y, found.pull, found.residual, found.products
        if not may_look():
            return y, pull
        self.report.products, self.report.residual = products, float(residual.amax())
        if self.report.residual <= self.config.implicit_tol:
            return y, pull
        warn(
            f"{self.label}: the implicit backward reached a relative residual of about "
            f"{self.report.residual:.0e} in {products} steps, above implicit_tol={self.config.implicit_tol:.0e}; "
            f"the gradient of {self.config.iters} unrolled iterations is used instead. Raise implicit_iters, or "
            "lower the norm of W.",
            NotConvergedWarning,
        )
        y = w
        for _ in range(self.config.iters - 1):
            y = w + jacobian.transposed(y)
        return y, None


def with_gradient(value: Tensor, problem: EquilibriumProblem, jacobian: Jacobian, adjoint: Adjoint) -> Tensor:
    """Returns ``value``, an equilibrium of an explicit problem, with its gradient for weights and offsets."""
    weights = [unit.operator.weight for unit in problem.units]
    offsets = [unit.offset for unit in problem.units]
    emptied = jacobian.with_tensors(())
    return _Equilibrium.apply(value, emptied, adjoint, *weights, *offsets, *jacobian.tensors)


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
