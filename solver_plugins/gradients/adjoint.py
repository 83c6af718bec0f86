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

import torch
from torch import Tensor

from solver_plugins.solvers import BlockProblem


def adjoint_map(problem: BlockProblem, v: Tensor) -> Callable[[Tensor], Tensor]:
    """Returns ``y -> J M y`` at ``v``."""
    return lambda y: problem.prior.vjp(v, problem.step, problem.descend(y, problem.hessian(y), problem.step))


def conjugate_gradients(problem: BlockProblem, v: Tensor, w: Tensor, iterations: int) -> Tensor:
    """Solves ``y = w + D M y`` per sample from zero; a sample that is done no longer moves."""
    root = problem.prior.derivative(v, problem.step).sqrt()
    inner = problem.operator.inner

    def smooth(y: Tensor) -> Tensor:
        return problem.descend(y, problem.hessian(y), problem.step)

    residual = root * smooth(w)
    z = torch.zeros_like(residual)
    direction = residual
    size = inner(residual, residual)
    # Below the rounding error of the right-hand side a further step only adds noise.
    done_below = size * torch.finfo(size.dtype).eps ** 2
    for _ in range(iterations):
        product = direction - root * smooth(root * direction)
        curvature = inner(direction, product)
        moving = (size > done_below) & (curvature > 0)
        alpha = torch.where(moving, size / torch.where(moving, curvature, 1.0), 0.0)
        z = z + alpha * direction
        residual = residual - alpha * product
        new_size = torch.where(moving, inner(residual, residual), size)
        direction = torch.where(moving, residual + new_size / torch.where(moving, size, 1.0) * direction, direction)
        size = new_size
    return w + root * z


def fixed_point(problem: BlockProblem, v: Tensor, w: Tensor, iterations: int) -> Tensor:
    """Takes ``iterations`` steps ``y <- w + J M y``: the gradient of that many unrolled iterations at ``v``."""
    step = adjoint_map(problem, v)
    y = w
    for _ in range(iterations):
        y = w + step(y)
    return y


def relative_residual(problem: BlockProblem, v: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """Returns ``max |y - w - J M y| / |w|`` over the samples."""
    error = y - w - adjoint_map(problem, v)(y)
    inner = problem.operator.inner
    scale = inner(w, w).clamp_min(torch.finfo(w.dtype).tiny)
    return (inner(error, error) / scale).max().sqrt()
