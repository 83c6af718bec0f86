"""Largest eigenvalues by Krylov methods: estimates for batches of matrices, and full precision for one operator."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from solver_plugins.errors import NotConvergedWarning

_ESTIMATE_STEPS = 16
_BASIS = 96
_KEPT = 24
_RESTARTS = 200


def generic_vector(size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Returns a fixed unit vector in a generic direction; the global random state does not change."""
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(size, generator=generator, dtype=torch.float64)
    return (vector / vector.norm()).to(device=device, dtype=dtype)


def lanczos_estimates(matrices: Tensor, steps: int = _ESTIMATE_STEPS) -> Tensor:
    """Returns lower estimates of the largest eigenvalues of positive semidefinite matrices ``(..., m, m)``."""
    shape, side = matrices.shape[:-2], matrices.shape[-1]
    matrices = matrices.flatten(0, -3)
    # Vectors are rows: with columns, a batch of products is up to seven times slower.
    basis = matrices.new_zeros(len(matrices), min(steps, side), side)
    images = torch.zeros_like(basis)
    basis[:, 0] = generic_vector(side, matrices.device, matrices.dtype)
    for step in range(basis.shape[1]):
        new = images[:, step] = (basis[:, step, None] @ matrices.mT)[:, 0]
        if step + 1 == basis.shape[1]:
            break
        known = basis[:, : step + 1]
        scale = torch.linalg.vector_norm(new, dim=-1, keepdim=True)
        for _ in range(2):
            new = new - (new[:, None] @ known.mH @ known)[:, 0]
        norm = torch.linalg.vector_norm(new, dim=-1, keepdim=True)
        # A matrix with an exhausted Krylov space gets a zero vector, which has no effect.
        basis[:, step + 1] = torch.where(norm > 1e-12 * scale, new / norm.clamp_min(1e-300), 0)
    return torch.linalg.eigvalsh(basis.conj() @ images.mT)[:, -1].clamp_min(0).reshape(shape)


def largest_eigenvalue(gram: Callable[[Tensor], Tensor], start: Tensor, tolerance: float = 1e-10) -> Tensor:
    """Returns the largest eigenvalue of a positive semidefinite map ``v -> G v`` to a relative ``tolerance``.

    Lanczos with full (repeated) orthogonalisation and thick restarts, which keep the best Ritz vectors and the last
    direction. The error of a Ritz value is at most its residual ``r``, and ``r^2`` over the gap to the next value.
    ``start`` has a component along the top eigenvector. If the tolerance is not reached, a NotConvergedWarning says
    that the value is a lower bound.
    """
    size = start.numel()
    limit = min(_BASIS, size)
    basis = start.new_zeros(size, limit)
    basis[:, 0] = start.flatten() / start.norm()
    projected = start.new_zeros(limit, limit)
    have = 0
    for _ in range(_RESTARTS):
        rest = start.new_zeros(())
        while have < limit:
            new = gram(basis[:, have].reshape(start.shape)).flatten()
            known = basis[:, : have + 1]
            column = known.T @ new
            new = new - known @ column
            correction = known.T @ new
            new, column = new - known @ correction, column + correction
            projected[: have + 1, have] = column
            projected[have, : have + 1] = column
            rest = new.norm()
            have += 1
            if rest <= 1e-14 * projected[:have, :have].norm():
                # The space is invariant: its eigenvalues are exact.
                return torch.linalg.eigvalsh(projected[:have, :have])[-1].clamp_min(0)
            if have < limit:
                basis[:, have] = new / rest
        values, vectors = torch.linalg.eigh(projected)
        if limit == size:
            return values[-1].clamp_min(0)
        residual = rest * vectors[-1, -1].abs()
        gap = values[-1] - values[-2] - residual
        error = torch.minimum(residual, residual**2 / gap) if gap > 0 else residual
        if error <= tolerance * values[-1]:
            return values[-1]
        kept = min(_KEPT, limit - 1)
        basis[:, :kept] = basis @ vectors[:, -kept:]
        basis[:, kept] = new / rest
        projected = torch.zeros_like(projected)
        projected[:kept, :kept] = values[-kept:].diag()
        have = kept
    warnings.warn(
        f"Lanczos reached a relative error of {float(error / values[-1]):.1e}, not {tolerance:.1e}; the value is a "
        "lower bound.",
        NotConvergedWarning,
        stacklevel=2,
    )
    return values[-1]
