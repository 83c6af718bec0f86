"""Independent references: dense matrices made from the layer itself, and the symbol of a kernel with numpy."""

import itertools

import numpy as np
import scipy.optimize
import torch
from torch import Tensor, nn


def dense_matrix(layer: nn.Module, input_shape: tuple[int, ...]) -> Tensor:
    """Returns the matrix of an unbatched layer, bias subtracted, by feeding it an identity."""
    size = int(np.prod(input_shape))
    with torch.no_grad():
        zero = layer(torch.zeros(1, *input_shape, dtype=torch.float64))
        columns = layer(torch.eye(size, dtype=torch.float64).reshape(size, *input_shape)) - zero
    return columns.flatten(1).T


def norm_sq(matrix: Tensor) -> float:
    return float(np.linalg.norm(matrix.detach().numpy(), 2) ** 2)


def fine_supremum(weight: Tensor, stride: int = 1, groups: int = 1, points: int = 96) -> float:
    """Returns max over a very fine grid of |A_hat(w)|^2 of the *aliased* symbol (no polyphase split, plain numpy).

    With stride s, outputs at frequency w see the inputs at w + 2 pi r / s: the blocks side by side, over sqrt(s).
    """
    kernel = weight.detach().numpy()
    dims = kernel.ndim - 2
    n = points * stride
    rows = kernel.shape[0] // groups
    best = 0.0
    for g in range(groups):
        symbol = np.fft.fftn(kernel[g * rows : (g + 1) * rows], s=(n,) * dims, axes=tuple(range(2, 2 + dims)))
        for index in itertools.product(range(points), repeat=dims):
            aliases = itertools.product(range(stride), repeat=dims)
            blocks = [
                symbol[(slice(None), slice(None), *(i + points * r for i, r in zip(index, alias, strict=True)))]
                for alias in aliases
            ]
            matrix = np.concatenate(blocks, axis=1) / np.sqrt(stride**dims)
            best = max(best, np.linalg.norm(matrix, 2) ** 2)
    return best


def supremum_from_below(weight: Tensor, stride: int = 1, groups: int = 1, starts: int = 4) -> float:
    """Returns sup |A_hat(w)|^2 of the aliased symbol: a coarse grid, then Nelder-Mead from its best points."""
    kernel = weight.detach().numpy()
    scale = float(np.abs(kernel).max())
    if scale == 0:
        return 0.0
    kernel = kernel / scale
    taps = list(itertools.product(*(range(n) for n in kernel.shape[2:])))
    dims, rows = kernel.ndim - 2, kernel.shape[0] // groups
    flat = kernel.reshape(groups, rows, kernel.shape[1], -1)
    aliases = np.array(list(itertools.product(range(stride), repeat=dims))) * (2 * np.pi / stride)

    def value(w: np.ndarray) -> float:
        phases = np.exp(-1j * (np.asarray(w) / stride + aliases) @ np.array(taps).T)
        symbols = np.einsum("grct,at->grac", flat, phases).reshape(groups, rows, -1)
        return float(np.linalg.norm(symbols, 2, axis=(1, 2)).max() ** 2 / stride**dims)

    counts = [4 * -(-n // stride) if n > stride else 1 for n in kernel.shape[2:]]
    grid = [np.array(index) * 2 * np.pi / counts for index in itertools.product(*map(range, counts))]
    values = [value(w) for w in grid]
    best = max(values)
    for index in np.argsort(values)[-starts:]:
        options = {
            "xatol": 1e-5,
            "fatol": 1e-9 * best,
            "initial_simplex": grid[index] + np.vstack([np.zeros(dims), 0.2 * np.eye(dims)]),
        }
        best = max(
            best, -scipy.optimize.minimize(lambda w: -value(w), grid[index], method="Nelder-Mead", options=options).fun
        )
    return best * scale**2


def random_conv(dims: int, inputs: int, outputs: int, kernel_size: int, **options: object) -> nn.Module:
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    return conv(inputs, outputs, kernel_size, dtype=torch.float64, **options)  # type: ignore[arg-type]
