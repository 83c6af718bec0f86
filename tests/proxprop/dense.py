"""The formulas of the paper with explicit matrices: the reference for everything here.

``A`` is the matrix of equation (41), from vec(theta) to vec(output), found by differentiation: no im2col, no groups, no
bookkeeping of biases to get wrong.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call


def matrix_of(layer: nn.Module, inputs: Sequence[Tensor], names: Sequence[str]) -> Tensor:
    """Returns ``A`` with one row per output number of all inputs and one column per number of the named parameters."""
    parameters = tuple(getattr(layer, name).detach() for name in names)
    blocks = []
    for x in inputs:

        def call(*values: Tensor, x: Tensor = x) -> Tensor:
            return functional_call(layer, dict(zip(names, values, strict=True)), (x,)).reshape(-1)

        parts = torch.autograd.functional.jacobian(call, parameters)
        blocks.append(torch.cat([part.flatten(1) for part in parts], 1))
    return torch.cat(blocks)


def flat(tensors: Sequence[Tensor | None]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors if tensor is not None])


def exact(A: Tensor, g: Tensor, tau: float, scale: float = 1.0) -> Tensor:
    """Returns ``(I/tau + scale A^T A)^{-1} g``, equation (13)."""
    return torch.linalg.solve(torch.eye(len(g), dtype=g.dtype) / tau + scale * A.T @ A, g)


def conjugate_gradients(A: Tensor, g: Tensor, tau: float, steps: int, scale: float = 1.0) -> Tensor:
    """Returns the minimiser over the Krylov space of dimension ``steps``, equations (34) to (36): what CG computes.

    The space is orthonormalised step by step; no recurrence of conjugate gradients is used.
    """
    M = torch.eye(len(g), dtype=g.dtype) / tau + scale * A.T @ A
    basis: list[Tensor] = []
    vector = g
    for _ in range(steps):
        for _ in range(2):
            for one in basis:
                vector = vector - one * (one @ vector)
        if vector.norm() <= 1e-14 * g.norm():
            break
        basis.append(vector / vector.norm())
        vector = M @ basis[-1]
        vector = vector / vector.norm()
    Q = torch.stack(basis, 1)
    return Q @ torch.linalg.solve(Q.T @ M @ Q, Q.T @ g)
