"""Systems of a few equations for every sample, as accelerated solvers pose them."""

import torch
from torch import Tensor


def solve_small(matrix: Tensor, right: Tensor) -> Tensor:
    """Returns ``M^-1 r`` for symmetric positive definite matrices ``M`` ``[..., n, n]`` and rows ``r`` ``[..., n]``.

    No value is read, so that an accelerator is not stalled. In an exported program, whose runtime may have no solver
    for linear systems, the elimination is written out.
    """
    if torch.compiler.is_exporting():
        return _eliminated(matrix, right)
    return torch.linalg.solve_ex(matrix, right.unsqueeze(-1)).result.squeeze(-1)


def _eliminated(matrix: Tensor, right: Tensor) -> Tensor:
    pivot, column = matrix[..., 0, :1], matrix[..., 1:, 0]
    if matrix.shape[-1] == 1:
        return right / pivot
    # Without a choice of pivots, which a positive definite matrix does not need.
    rest = _eliminated(
        matrix[..., 1:, 1:] - column.unsqueeze(-1) * (column / pivot).unsqueeze(-2),
        right[..., 1:] - column * (right[..., :1] / pivot),
    )
    first = (right[..., :1] - (column * rest).sum(-1, keepdim=True)) / pivot
    return torch.cat([first, rest], -1)
