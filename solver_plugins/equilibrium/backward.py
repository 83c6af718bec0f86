"""The implicit gradient of an equilibrium: ``y = w + J^T y`` at the fixed point.

One layer: ``a (I - W^T D W) y = w`` is symmetric and positive definite, so conjugate gradients solve it, in fewer steps
than any fixed-point iteration. Several layers: ``J`` is not symmetric, and minimal residuals (GMRES) do. The residual
is checked; where it is too large the gradient of ``iters`` unrolled iterations, taken at the fixed point, is used
instead, with a warning.

The gradients of weights and offsets by ``y`` need just what the product ``J^T y`` leaves at each layer, so the products
that solve for ``y`` also yield them: nothing is recorded in the forward and no further pass is made.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from solver_plugins.equilibrium.problem import Jacobian, Pull
from solver_plugins.equilibrium.residuals import minimal_residuals
from solver_plugins.errors import NotConvergedWarning, warn
from solver_plugins.solve import conjugate_gradients


@dataclass
class BackwardReport:
    """How the implicit backward went; filled when it runs.

    Attributes:
        products: Products with the Jacobian.
        residual: The largest relative residual of the batch.
    """

    products: int = 0
    residual: float | None = None


@dataclass(frozen=True, eq=False)
class Adjoint:
    """Solves ``y = w + J^T y``.

    Attributes:
        dims: The dimensions of one problem.
        symmetric: Whether ``J`` is symmetric.
        config: Options of the forward solver.
        report: Receives how it went.
        label: Whose equilibrium it is, for warnings.
    """

    dims: tuple[int, ...]
    symmetric: bool
    config: Any
    report: BackwardReport
    label: str

    def solve(self, jacobian: Jacobian, w: Tensor) -> Tensor:
        """Returns ``y``."""
        if not w.numel():
            return w
        w, scale = self._scaled(jacobian, w)
        y, _ = self._checked(jacobian, w)
        return y * scale

    def pull(self, jacobian: Jacobian, w: Tensor) -> Pull:
        """Returns what the product with ``J^T`` leaves at ``y``."""
        w, scale = self._scaled(jacobian, w)
        y, pull = self._checked(jacobian, w, scale)
        return jacobian.pull(y * scale) if pull is None else pull

    def _scaled(self, jacobian: Jacobian, w: Tensor) -> tuple[Tensor, Tensor]:
        # Gradients may be of any size, and their squares must not underflow.
        order = torch.channels_last if jacobian.channels_last else torch.contiguous_format
        w = w.to(jacobian.slopes[0].value.dtype, memory_format=order)
        scale = w.abs().amax(self.dims, keepdim=True)
        scale = torch.where(scale > 0, scale, 1.0)
        return w / scale, scale

    def _checked(self, jacobian: Jacobian, w: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Pull | None]:
        """Returns ``y``, and with a scale what the product leaves at ``y * scale`` if it is known."""
        pull: Pull | None = None
        if self.symmetric:
            y, residual, products = self._conjugate(jacobian, w)
        else:
            found = minimal_residuals(
                jacobian,
                w,
                self.dims,
                tolerance=self._tolerance(w),
                products=self.config.implicit_iters,
                pulls=scale is not None,
                scale=scale,
            )
            y, pull, residual, products = found.y, found.pull, found.residual, found.products
        if torch.compiler.is_compiling():
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

    def _conjugate(self, jacobian: Jacobian, w: Tensor) -> tuple[Tensor, Tensor, int]:
        (unit,), (slope,) = jacobian.units, jacobian.slopes
        return conjugate_gradients(
            lambda y: y - unit.curvature(slope, y),
            w / jacobian.alpha,
            self.dims,
            self.config.implicit_iters,
            tolerance=self._tolerance(w),
            stop=not torch.compiler.is_compiling(),
        )

    def _tolerance(self, w: Tensor) -> float:
        return max(float(self.config.tol), torch.finfo(w.dtype).eps)
