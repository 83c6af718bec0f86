"""A diagonal matrix as the mean of projections of one rank, which balanced factorisations consist of.

Given ``0 < t_i < 1`` with ``sum_i t_i = s``, find ``K`` orthogonal projections of rank ``s`` whose mean is ``diag(t)``.
Ranks bound ``K`` from below: ``K s >= n``, and, for the complements of the projections, ``K (n - s) >= n``.
"""

import math

import torch
from torch import Tensor

_TOLERANCE = 1e-12
_ITERATIONS = 4000


def fewest_projections(n: int, s: int) -> int:
    """Returns the least possible number, ``max(ceil(n/s), ceil(n/(n - s)))``; 1 if ``n = s``."""
    return 1 if n == s else max(math.ceil(n / s), math.ceil(n / (n - s)))


def mean_of_projections(t: Tensor, s: int, count: int) -> Tensor | None:
    """Finds the projections by alternating between their two properties, or returns None.

    Args:
        t: Of shape ``(n,)``, float64.
        s: The rank, ``sum_i t_i``.
        count: The number of projections.

    Returns:
        Orthonormal bases ``B`` of shape ``(count, n, s)``, with ``sum_k B_k B_k^T = count diag(t)``.
    """
    n = len(t)
    if 2 * s > n:
        # The complements have the smaller rank.
        complements = mean_of_projections(1 - t, n - s, count)
        return None if complements is None else torch.linalg.qr(complements, mode="complete").Q[..., n - s :]
    generator = torch.Generator().manual_seed(0)
    bases = torch.randn(count, n, s, generator=generator, dtype=torch.float64).to(t.device)
    root = (count * t).sqrt()[:, None]
    for iteration in range(_ITERATIONS):
        # The nearest orthonormal columns within each basis ...
        u, _, vh = torch.linalg.svd(bases, full_matrices=False)
        bases = u @ vh
        rows = bases.transpose(0, 1).reshape(n, count * s)
        if iteration % 8 == 0:
            error = rows @ rows.mT - torch.diag(count * t)
            if float(error.abs().amax()) < _TOLERANCE * count:
                return bases
        # ... then the nearest orthogonal rows with the right lengths, over all bases.
        u, _, vh = torch.linalg.svd(root * rows, full_matrices=False)
        bases = (root * (u @ vh)).reshape(n, count, s).transpose(0, 1)
    return None
