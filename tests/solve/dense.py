"""Independent references: dense matrices, numpy and scipy only; nothing of the package under test."""

import numpy as np
import scipy.optimize
import torch
from torch import Tensor, nn


def dense_matrix(layer: nn.Module, input_shape: tuple[int, ...]) -> np.ndarray:
    """Returns the matrix of a linear or convolutional layer by applying it to every unit vector, without its bias."""
    size = int(np.prod(input_shape))
    basis = torch.eye(size, dtype=torch.float64).reshape(size, *input_shape)
    with torch.no_grad():
        return (layer(basis) - layer(torch.zeros_like(basis))).reshape(size, -1).T.numpy()


def bias_vector(layer: nn.Module, input_shape: tuple[int, ...]) -> np.ndarray:
    with torch.no_grad():
        return layer(torch.zeros(1, *input_shape, dtype=torch.float64)).reshape(-1).numpy()


def normalise(A: np.ndarray, u: np.ndarray, lam: float, lipschitz: float) -> tuple[np.ndarray, np.ndarray, float]:
    """Returns the data of the `normalized` formulation: A/sqrt(L), sqrt(L) u, lam/L."""
    total = lipschitz + lam
    return A / np.sqrt(total), u * np.sqrt(total), lam / total


def objective(A: np.ndarray, u: np.ndarray, b: np.ndarray, lam: float, x: np.ndarray) -> float:
    """F(x) of eq. 5 with lam/2 |x|^2, without the prior."""
    return 0.5 * np.sum((A.T @ x - u) ** 2) - b @ x + 0.5 * lam * np.sum(x**2)


def box_minimiser(
    A: np.ndarray, u: np.ndarray, b: np.ndarray, lam: float, low: float = -np.inf, high: float = np.inf
) -> np.ndarray:
    """Minimises F over a box: NNLS for [0, inf), a linear system without bounds, else bounded least squares."""
    root = np.sqrt(lam)
    stacked = np.vstack([A.T, root * np.eye(A.shape[0])])
    target = np.concatenate([u, b / root])
    if low == -np.inf and high == np.inf:
        return np.linalg.solve(A @ A.T + lam * np.eye(A.shape[0]), A @ u + b)
    if low == 0 and high == np.inf:
        return scipy.optimize.nnls(stacked, target)[0]
    return scipy.optimize.lsq_linear(stacked, target, bounds=(low, high), method="bvls", tol=1e-14).x


def well_conditioned_(weight: Tensor, smallest: float = 0.5) -> None:
    """Gives a matrix singular values in [smallest, 1], so that plain proximal gradient converges in a test's time."""
    with torch.no_grad():
        u, s, vh = torch.linalg.svd(weight, full_matrices=False)
        weight.copy_(u @ torch.diag(torch.linspace(1.0, smallest, len(s), dtype=weight.dtype)) @ vh)
