"""Independent random bits, and windows over them."""

import math

import torch
from torch import Tensor

from solver_plugins.operators.sampling import uniform

_RARE, _MANY = 0.05, 2**15
"""Below this rate, and for so many bits, the places of the false ones are drawn instead of all bits."""


def draw_bits(
    shape: tuple[int, ...], theta: float, device: torch.device | str | None, generator: torch.Generator | None
) -> Tensor:
    """Draws independent bits, each true with probability ``theta``."""
    rate = 1 - theta
    if 0 < rate < _RARE and not torch.compiler.is_compiling() and math.prod(shape) >= _MANY:
        return _draw_rare(shape, rate, device, generator)
    # Twice as fast as bernoulli_ on a CPU; the rate is hit to 2^-24.
    return uniform(shape, device, torch.float32, generator) >= rate


def _draw_rare(
    shape: tuple[int, ...], rate: float, device: torch.device | str | None, generator: torch.Generator | None
) -> Tensor:
    """Draws bits by the gaps between the false ones, which are geometric: seeds of large blocks are very few."""
    n = math.prod(shape)
    # Ten standard deviations more than there are on average: they never run out.
    count = math.ceil(n * rate + 10 * math.sqrt(n * rate) + 30)
    wide = torch.float32 if torch.device(device or "cpu").type == "mps" else torch.float64
    gaps = (
        torch.empty(count, device=device, dtype=wide).exponential_(generator=generator) / -math.log1p(-rate)
    ).floor()
    places = ((gaps + 1).cumsum(0) - 1).clamp(max=n).long()
    bits = torch.ones(n + 1, dtype=torch.bool, device=device)
    # What lies beyond the end goes to a place of its own.
    return bits.index_fill_(0, places, False)[:n].view(shape)


def all_in_window(keep: Tensor, window: int, dim: int) -> Tensor:
    """Returns whether all of ``window`` neighbours are true, in O(log window) passes over bytes."""
    have = 1
    while have < window:
        step = min(have, window - have)
        length = keep.shape[dim] - step
        keep = keep.narrow(dim, 0, length) & keep.narrow(dim, step, length)
        have += step
    return keep
