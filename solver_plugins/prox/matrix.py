"""Matrix priors (section 3.2): nuclear norm and positive semi-definite cone.

A function of the singular values or eigenvalues is differentiable wherever the scalar function is, even at repeated
values: its derivative (Daleckii and Krein) only needs divided differences of the scalar function, which lie in [0, 1]
for a proximal map. Autograd would differentiate through the factors, which divides by the gaps between the values.
The derivative is self-adjoint, so the backward map is the derivative itself. Second derivatives are refused.
"""

from typing import Any

import torch
from torch import Tensor

from solver_plugins.errors import OptionError, ShapeError
from solver_plugins.prox.prior import Step, infinite_where, step_like, widened


def prox_nuclear_norm(matrix: Tensor, step: Step = 1.0) -> Tensor:
    """Returns ``argmin_X |X|_* + |X - matrix|^2 / (2 step)``: soft thresholding of the singular values.

    The matrix is real, ``(..., m, n)``; gradients flow to the step (a number or a 0-d tensor), too.
    """
    _check_matrix(matrix)
    wide = widened(matrix)
    threshold = torch.as_tensor(step_like(step, wide), dtype=wide.dtype, device=wide.device)
    if threshold.ndim:
        raise OptionError(f"The step must be a number or a 0-d tensor; found the shape {tuple(threshold.shape)}.")
    result: Tensor = _NuclearNorm.apply(wide, threshold)[0]
    return result.to(matrix.dtype)


def nuclear_norm(x: Tensor) -> Tensor:
    """Returns the sum of the singular values of each matrix in ``x``, of shape ``x.shape[:-2]``."""
    _check_matrix(x)
    return torch.linalg.svdvals(widened(x)).sum(-1)


def prox_psd(matrix: Tensor) -> Tensor:
    """Returns ``argmin_{X >= 0} |X - matrix|^2``: the nearest symmetric positive semi-definite matrix.

    The matrix is real and square, ``(..., n, n)``; only its symmetric part matters.
    """
    _check_matrix(matrix, square=True)
    wide = widened(matrix)
    result: Tensor = _PositivePart.apply((wide + wide.mT) / 2)[0]
    return result.to(matrix.dtype)


def psd_indicator(x: Tensor, tolerance: float | None = None) -> Tensor:
    """Returns 0 for each symmetric positive semi-definite matrix in ``x`` and infinity for any other.

    ``tolerance`` is the largest asymmetry and negative eigenvalue that are allowed, relative to the largest entry; by
    default a few rounding errors of the dtype.
    """
    _check_matrix(x, square=True)
    wide = widened(x)
    if tolerance is None:
        tolerance = 8 * x.shape[-1] * torch.finfo(x.dtype).eps
    slack = tolerance * wide.abs().amax((-2, -1))
    skewed = (wide - wide.mT).abs().amax((-2, -1)) > slack
    lowest = torch.linalg.eigvalsh((wide + wide.mT) / 2)[..., 0]
    return infinite_where(skewed | (lowest < -slack), torch.zeros_like(lowest))


class _NuclearNorm(torch.autograd.Function):
    """``U max(S - t, 0) V^T``. The factors are outputs because a saved tensor must be an input or an output."""

    generate_vmap_rule = True

    @staticmethod
    def forward(matrix: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
        return (u * (s - threshold).clamp(min=0)[..., None, :]) @ vh, u, s, vh

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, ...]) -> None:
        _, u, s, vh = output
        ctx.mark_non_differentiable(u, s, vh)
        ctx.save_for_backward(*inputs, u, s, vh)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        matrix, threshold, u, s, vh = ctx.saved_tensors
        by_matrix, by_threshold = _nuclear_norm_backward(grad.detach(), threshold.detach(), u, s, vh)
        return _Once.apply(by_matrix, grad, matrix, threshold), _Once.apply(by_threshold, grad, matrix, threshold)


def _nuclear_norm_backward(grad: Tensor, threshold: Tensor, u: Tensor, s: Tensor, vh: Tensor) -> tuple[Tensor, Tensor]:
    shrunk = (s - threshold).clamp(min=0)
    inner = u.mT @ grad @ vh.mT
    symmetric, skew = (inner + inner.mT) / 2, (inner - inner.mT) / 2
    # For an odd function of the singular values: differences for the symmetric part, sums for the skew part.
    sums = _ratio(shrunk[..., :, None] + shrunk[..., None, :], s[..., :, None] + s[..., None, :])
    middle = _divided_difference(s, threshold) * symmetric + sums * skew
    # The part of the gradient outside both ranges is scaled by f(s)/s, from whichever side is longer.
    scale = _ratio(shrunk, s)
    result = u @ middle @ vh
    result = result + (grad @ vh.mT - u @ inner) * scale[..., None, :] @ vh
    result = result + u @ (scale[..., :, None] * (u.mT @ grad - inner @ vh))
    kept = (s > threshold).to(s.dtype)
    return result, -(kept * torch.diagonal(inner, dim1=-2, dim2=-1)).sum()


class _PositivePart(torch.autograd.Function):
    """``Q max(w, 0) Q^T`` of a symmetric matrix."""

    generate_vmap_rule = True

    @staticmethod
    def forward(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        w, q = torch.linalg.eigh(matrix)
        return (q * w.clamp(min=0)[..., None, :]) @ q.mT, w, q

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, ...]) -> None:
        _, w, q = output
        ctx.mark_non_differentiable(w, q)
        ctx.save_for_backward(*inputs, w, q)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> Tensor:
        matrix, w, q = ctx.saved_tensors
        inner = q.mT @ grad.detach() @ q
        return _Once.apply(q @ (_divided_difference(w, w.new_zeros(())) * inner) @ q.mT, grad, matrix)


class _Once(torch.autograd.Function):
    """Returns its first input, a first derivative, and refuses to be differentiated by its other inputs.

    ``once_differentiable`` would cut that connection, and ``torch.autograd.grad`` would return zero.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(derivative: Tensor, *sources: Tensor) -> Tensor:
        return derivative.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError("The proximal maps of matrix priors have no second derivatives.")


def _divided_difference(values: Tensor, threshold: Tensor) -> Tensor:
    """Returns ``(f(x_i) - f(x_j))/(x_i - x_j)`` of ``f(x) = max(x - threshold, 0)``: 1 if both lie above, 0 if none."""
    shrunk = (values - threshold[..., None]).clamp(min=0)
    above = values > threshold[..., None]
    rows, columns = above[..., :, None], above[..., None, :]
    # If the threshold lies between two values, they differ by at least the excess of the upper one.
    mixed = _ratio(
        (shrunk[..., :, None] - shrunk[..., None, :]).abs(), (values[..., :, None] - values[..., None, :]).abs()
    )
    mixed = torch.where(rows | columns, mixed, torch.zeros_like(mixed))
    return torch.where(rows & columns, torch.ones_like(mixed), mixed)


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Returns the quotient, 0 where the denominator is 0 (then so is the numerator)."""
    safe = torch.where(denominator > 0, denominator, torch.ones_like(denominator))
    return torch.where(denominator > 0, numerator / safe, torch.zeros_like(numerator))


def _check_matrix(matrix: Tensor, square: bool = False) -> None:
    if matrix.ndim < 2 or (square and matrix.shape[-1] != matrix.shape[-2]):
        kind = "square matrices (..., n, n)" if square else "matrices (..., m, n)"
        raise ShapeError(f"Expected {kind}; found the shape {tuple(matrix.shape)}.")
