"""The implicit gradient of an equilibrium: ``y = w + J^T y`` at the fixed point.

One layer: ``a (I - W^T D W) y = w`` is symmetric and positive definite, so conjugate gradients solve it, in fewer steps
than any fixed-point iteration. Several layers: ``J`` is not symmetric, and Anderson acceleration, which is GMRES on a
linear map, does. The residual is checked; where it is too large the gradient of ``iters`` unrolled iterations, taken at
the fixed point, is used instead, with a warning.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from solver_plugins.equilibrium.problem import Jacobian
from solver_plugins.equilibrium.solvers import Anderson, EquilibriumConfig, settle
from solver_plugins.errors import NotConvergedWarning, warn
from solver_plugins.gradients import conjugate_gradients

_WINDOW = 8
"""Of Anderson's method for the backward: a linear map rewards a longer memory than one with kinks."""


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
class _AdjointProblem:
    """``y -> w + J^T y``, for the solvers of fixed points."""

    jacobian: Jacobian
    w: Tensor
    dims: tuple[int, ...]

    def image(self, y: Tensor | None) -> Tensor:
        return self.w if y is None else self.w + self.jacobian.transposed(y)


@dataclass(frozen=True, eq=False)
class Adjoint:
    """Solves ``y = w + J^T y``.

    Attributes:
        jacobian: ``J``, detached.
        dims: The dimensions of one problem.
        symmetric: Whether ``J`` is symmetric.
        config: Options of the forward solver.
        report: Receives how it went.
        label: Whose equilibrium it is, for warnings.
    """

    jacobian: Jacobian
    dims: tuple[int, ...]
    symmetric: bool
    config: Any
    report: BackwardReport
    label: str

    def __call__(self, w: Tensor) -> Tensor:
        """Returns ``y``."""
        if not w.numel():
            return w
        w = w.to(self.jacobian.slopes[0].dtype)
        # Gradients may be of any size, and their squares must not underflow.
        scale = w.abs().amax(self.dims, keepdim=True)
        scale = torch.where(scale > 0, scale, 1.0)
        y, residual, products = self._solve(w / scale)
        if torch.compiler.is_compiling():
            return y * scale
        self.report.products, self.report.residual = products, float(residual.amax())
        if not self.report.residual <= self.config.implicit_tol:
            warn(
                f"{self.label}: the implicit backward reached a relative residual of about "
                f"{self.report.residual:.0e} in {products} steps, above implicit_tol={self.config.implicit_tol:.0e}; "
                f"the gradient of {self.config.iters} unrolled iterations is used instead. Raise implicit_iters, or "
                "lower the norm of W.",
                NotConvergedWarning,
            )
            y = w / scale
            for _ in range(self.config.iters - 1):
                y = w / scale + self.jacobian.transposed(y)
        return y * scale

    def _solve(self, w: Tensor) -> tuple[Tensor, Tensor, int]:
        stop = not torch.compiler.is_compiling()
        if self.symmetric:
            (unit,), (slope,) = self.jacobian.units, self.jacobian.slopes
            return conjugate_gradients(
                lambda y: y - unit.curvature(slope, y),
                w / self.jacobian.alpha,
                self.dims,
                self.config.implicit_iters,
                tolerance=max(self.config.tol, torch.finfo(w.dtype).eps),
                stop=stop,
            )
        options = EquilibriumConfig(tol=max(self.config.tol, torch.finfo(w.dtype).eps))
        solver = Anderson(Anderson.Config(window=_WINDOW, **options.model_dump(include={"tol"})))
        run = settle(solver, _AdjointProblem(self.jacobian, w, self.dims), iters=self.config.implicit_iters, start=w)
        return run.value, run.residual, run.evaluations
