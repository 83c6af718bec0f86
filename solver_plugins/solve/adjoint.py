"""The linear system behind an implicit gradient.

At a fixed point ``v = T(v) = M prox(v) + t c``, ``M = I - t H``, an incoming gradient ``w`` of ``v`` becomes the
gradient ``y`` of one application of ``T`` by

    y = w + J M y,       J = d prox_{t g}(v) / dv   (symmetric)

For a separable prior ``J = D`` is a diagonal in [0, 1], and ``y = w + D^(1/2) z`` with the symmetric positive definite

    (I - D^(1/2) M D^(1/2)) z = D^(1/2) M w,

which conjugate gradients solve; for ReLU this is CG on the active coordinates. Otherwise (softmax) the fixed-point form
is iterated: softmax is 1/2-Lipschitz, so each step halves the error.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from solver_plugins.solve.conjugate import conjugate_gradients
from solver_plugins.solve.problem import BlockProblem


@dataclass(frozen=True)
class AdjointSystem:
    """The system at one fixed point; it holds what it needs and no live Parameter.

    Attributes:
        problem: The problem, detached.
        jacobian: ``y -> J y``.
        diagonal: ``D`` for a separable prior, else None.
    """

    problem: BlockProblem
    jacobian: Callable[[Tensor], Tensor]
    diagonal: Tensor | None

    @classmethod
    def at(cls, problem: BlockProblem, v: Tensor) -> "AdjointSystem":
        """Sets the system up at ``v``; the prior is asked now, for its parameters may be others later."""
        prior, step = problem.prior, problem.step
        if not prior.separable:
            return cls(problem, lambda y: prior.vjp(v, step, y), None)
        with torch.no_grad():
            diagonal = prior.derivative(v, step)
        return cls(problem, lambda y: diagonal * y, diagonal)

    def smooth(self, y: Tensor) -> Tensor:
        """Returns ``M y``."""
        return self.problem.descend(y, self.problem.hessian(y), self.problem.step)

    def solve(self, w: Tensor, iterations: int) -> Tensor:
        """Solves ``y = w + J M y`` as well as ``iterations`` steps can."""
        # Gradients may be of any size, and their squares must not underflow.
        scale = w.abs().amax(self.problem.operator.problem_dims, keepdim=True)
        scale = torch.where(scale > 0, scale, 1.0)
        method = self.fixed_point if self.diagonal is None else self.conjugate_gradients
        return method(w / scale, iterations) * scale

    def conjugate_gradients(self, w: Tensor, iterations: int) -> Tensor:
        """Solves the symmetric form per sample, from zero; a sample that is done no longer moves."""
        assert self.diagonal is not None
        root = self.diagonal.sqrt()
        z, _, _ = conjugate_gradients(
            lambda direction: direction - root * self.smooth(root * direction),
            root * self.smooth(w),
            self.problem.operator.problem_dims,
            iterations,
        )
        return w + root * z

    def fixed_point(self, w: Tensor, iterations: int) -> Tensor:
        """Takes ``y <- w + J M y`` that many times: the gradient of ``iterations + 1`` unrolled iterations at ``v``."""
        y = w
        for _ in range(iterations):
            y = w + self.jacobian(self.smooth(y))
        return y

    def relative_residual(self, w: Tensor, y: Tensor) -> Tensor:
        """Returns ``|y - w - J M y| / |w|`` per sample."""
        dims = self.problem.operator.problem_dims
        error = torch.linalg.vector_norm(y - w - self.jacobian(self.smooth(y)), dim=dims)
        return error / torch.linalg.vector_norm(w, dim=dims).clamp_min(torch.finfo(w.dtype).tiny)
