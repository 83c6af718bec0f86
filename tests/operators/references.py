"""Independent references: dense matrices made from the layer itself, and the symbol of a kernel with numpy."""

import itertools

import numpy as np
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


def random_conv(dims: int, inputs: int, outputs: int, kernel_size: int, **options: object) -> nn.Module:
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    return conv(inputs, outputs, kernel_size, dtype=torch.float64, **options)  # type: ignore[arg-type]
