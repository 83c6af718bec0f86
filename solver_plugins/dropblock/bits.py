"""Independent random bits, and windows over them."""

import math

import torch
from torch import Tensor

from solver_plugins.operators.sampling import uniform

Device = torch.device | str | None
Source = torch.Generator | None
"""Where random numbers come from; None is the global random state."""

_RARE, _MANY = 0.05, 2**15
"""Below this rate, and from this many bits on, only the places of the false bits are drawn."""


def draw_bits(shape: tuple[int, ...], theta: float, device: Device, generator: Source) -> Tensor:
    """Draws independent bits, each true with probability ``theta``."""
    rate = 1 - theta
    if 0 < rate < _RARE and not torch.compiler.is_compiling() and math.prod(shape) >= _MANY:
        return _draw_rare(shape, rate, device, generator)
    # Twice as fast as bernoulli_ on a CPU; the rate is accurate to 2^-24.
    return uniform(shape, device, torch.float32, generator) >= rate


def _draw_rare(shape: tuple[int, ...], rate: float, device: Device, generator: Source) -> Tensor:
    """Draws bits by the (geometric) gaps between the false ones; large blocks have very few seeds."""
    n = math.prod(shape)
    # Ten standard deviations above the average, so they never run out.
    count = math.ceil(n * rate + 10 * math.sqrt(n * rate) + 30)
    wide = torch.float32 if torch.device(device or "cpu").type == "mps" else torch.float64
    gaps = (
        torch.empty(count, device=device, dtype=wide).exponential_(generator=generator) / -math.log1p(-rate)
    ).floor()
    places = ((gaps + 1).cumsum(0) - 1).clamp(max=n).long()
    bits = torch.ones(n + 1, dtype=torch.bool, device=device)
    # Places beyond the end are all mapped to one extra place.
    return bits.index_fill_(0, places, False)[:n].view(shape)


def all_in_window(keep: Tensor, window: int, dim: int) -> Tensor:
    """Returns whether all bits in a window are true, in O(log window) passes over bytes."""
    have = 1
    while have < window:
        step = min(have, window - have)
        length = keep.shape[dim] - step
        keep = keep.narrow(dim, 0, length) & keep.narrow(dim, step, length)
        have += step
    return keep
