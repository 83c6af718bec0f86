"""Conjugate gradients on many small systems at once."""

from collections.abc import Callable

import torch
from torch import Tensor


def conjugate_gradients(
    product: Callable[[Tensor], Tensor],
    right: Tensor,
    dims: tuple[int, ...],
    iterations: int,
    *,
    tolerance: float | None = None,
    stop: bool = False,
) -> tuple[Tensor, Tensor, int]:
    """Solves ``H x = right`` for each sample, ``H`` symmetric positive definite; a sample that is done no longer moves.

    Args:
        product: ``x -> H x``, for the whole batch.
        right: The right-hand sides.
        dims: The dimensions of one sample.
        iterations: At most so many products.
        tolerance: The relative residual at which a sample is done. By default the rounding error of the right-hand
            side, below which a further step only adds noise.
        stop: Whether to end when all samples are done; that is a look at values in every step.

    Returns:
        The solution, the relative residual as the recurrence knows it (one per sample, ``dims`` kept), and the number
        of products.
    """
    x = torch.zeros_like(right)
    residual = direction = right
    size = start = right.square().sum(dims, keepdim=True)
    tolerance = torch.finfo(right.dtype).eps if tolerance is None else tolerance
    done_below = start * tolerance**2
    products = 0
    for _ in range(iterations):
        moving = size > done_below
        if stop and not bool(moving.any()):
            break
        product_ = product(direction)
        products += 1
        curvature = (direction * product_).sum(dims, keepdim=True)
        moving = moving & (curvature > 0)
        alpha = torch.where(moving, size / torch.where(moving, curvature, 1.0), 0.0)
        x = x + alpha * direction
        residual = residual - alpha * product_
        new_size = torch.where(moving, residual.square().sum(dims, keepdim=True), size)
        ratio = new_size / torch.where(moving, size, 1.0)
        direction = torch.where(moving, residual + ratio * direction, direction)
        size = new_size
    return x, (size / torch.where(start > 0, start, 1.0)).sqrt(), products
