"""Follows the Lipschitz constant between certified refreshes: one power step per training step, warm-started.

The iteration runs on the symbol of the kernel at a few fixed frequencies, so that its state is small and does not
depend on the input size. It is a *lower* bound on the supremum: use the ratio to the estimate at the last certified
refresh, or multiply by a margin. Cosine and sine parts are kept apart: no complex dtypes, which compilers do not like.
"""

import torch
from torch import Tensor

from solver_plugins.operators.geometry import Geometry
from solver_plugins.operators.precision import autocast_off, scaled_kernel
from solver_plugins.operators.symbol import frequencies, polyphase, tap_positions


def start_vectors(kernel: Tensor, geometry: Geometry) -> Tensor:
    """Returns vectors in no special direction to start from, shape ``(F, groups, n2/groups, 2)``, at least float32.

    One per frequency of the grid and group; the last dimension holds real and imaginary part. The same on every device
    and in every process; the global random state is left alone.
    """
    grid = _grid(kernel, geometry)
    count = len(frequencies(grid, torch.device("cpu"), torch.float32))
    rows = kernel.shape[0] // geometry.groups
    dtype = torch.promote_types(kernel.dtype, torch.float32)
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(count, geometry.groups, rows, 2, generator=generator, dtype=torch.float32)
    if count == 1:
        # A real matrix: its top vector is real, and an imaginary part would only be carried along.
        vectors = vectors * vectors.new_tensor([1.0, 0.0])
    return (vectors / torch.linalg.vector_norm(vectors, dim=(2, 3), keepdim=True)).to(device=kernel.device, dtype=dtype)


@torch.no_grad()
def power_step(
    kernel: Tensor, geometry: Geometry, vectors: Tensor, diagonal: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Takes one power step ``v <- P P^H v / |P P^H v|`` at every frequency.

    Args:
        kernel: ``[n2, n1/groups, *k]``.
        geometry: Stride, dilation and groups matter; padding does not.
        vectors: From :func:`start_vectors` or the last step.
        diagonal: Follows ``diag(d) A`` instead.

    Returns:
        The largest ``|P P^H v| / |v|`` as a 0-d tensor, a lower bound on the supremum, and the new vectors. Weights of
        zero give an estimate of zero and leave the vectors as they are.
    """
    with autocast_off(kernel.device):
        weight = scaled_kernel(kernel, diagonal, vectors.dtype)
        blocks = polyphase(weight, geometry.reduced_stride(), geometry.groups)
        groups, rows, columns = blocks.shape[:3]
        lengths = blocks.shape[3:]
        blocks = blocks.flatten(3) if len(lengths) else blocks.unsqueeze(-1)
        points = frequencies(_grid(kernel, geometry), weight.device, weight.dtype)
        angles = points @ tap_positions(lengths, weight.device).to(weight.dtype).T
        cos, sin = angles.cos()[:, None, None, :], angles.sin()[:, None, None, :]

        v = vectors.to(weight.dtype)
        count = v.shape[0]
        # W_t^T v for all taps and frequencies is one product with the plain kernel; phases are applied to its result.
        flat = blocks.reshape(groups, rows, -1)
        sides = v.permute(1, 0, 3, 2).reshape(groups, count * 2, rows)
        taps = (sides @ flat).reshape(groups, count, 2, columns, -1).permute(2, 1, 0, 3, 4)
        real = (taps[0] * cos - taps[1] * sin).sum(-1)
        imaginary = (taps[0] * sin + taps[1] * cos).sum(-1)
        # P^H v is scaled to length one, so that weights far from one neither overflow nor vanish.
        down = torch.sqrt(real.square().sum(-1) + imaginary.square().sum(-1))[..., None]
        safe = torch.where(down > 0, down, torch.ones_like(down))
        real, imaginary = (real / safe)[..., None], (imaginary / safe)[..., None]
        taps = torch.stack([real * cos + imaginary * sin, imaginary * cos - real * sin])
        sides = taps.permute(2, 1, 0, 3, 4).reshape(groups, count * 2, -1)
        new = (sides @ flat.mT).reshape(groups, count, 2, rows).permute(1, 0, 3, 2)

        up = torch.linalg.vector_norm(new, dim=(2, 3), keepdim=True)
        length = torch.linalg.vector_norm(v, dim=(2, 3), keepdim=True)
        moved = up > 0
        new = torch.where(moved, new / torch.where(moved, up, torch.ones_like(up)), v)
        quotient = down[..., None] * up / torch.where(length > 0, length, torch.ones_like(length))
        return quotient.amax(), new


def _grid(kernel: Tensor, geometry: Geometry) -> tuple[int, ...]:
    """Returns how many frequencies are followed per dimension: 1, 4, or the polyphase length made even."""
    lengths = [-(-taps // step) for taps, step in zip(kernel.shape[2:], geometry.reduced_stride(), strict=True)]
    return tuple(1 if length == 1 else 4 if length <= 3 else length + length % 2 for length in lengths)
