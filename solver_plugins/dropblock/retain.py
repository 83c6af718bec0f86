"""Retain probabilities and block sizes: their ranges, and how they depend on the width."""

from solver_plugins.dropblock.errors import BlockSizeError
from solver_plugins.errors import OptionError


def check_theta(theta: float, name: str = "theta") -> float:
    """Returns the retain probability as a float, or raises OptionError if it is not in (0, 1]."""
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not 0 < theta <= 1:
        raise OptionError(
            f"Expected {name}, the probability that a unit is kept, in (0, 1]; found {theta!r}. "
            "A drop rate p is theta = 1 - p."
        )
    return float(theta)


def check_block_size(block_size: int) -> int:
    """Returns the block size, or raises BlockSizeError if it is not a positive whole number."""
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
        raise BlockSizeError(f"Expected block_size to be a positive whole number; found {block_size!r}.")
    return block_size


def check_divides(block_size: int, *sizes: int) -> None:
    """Raises BlockSizeError, with the nearest valid block sizes, unless the block size divides all sizes."""
    if all(size % block_size == 0 for size in sizes):
        return
    fitting = [size for size in range(1, max(sizes) + 1) if all(n % size == 0 for n in sizes)]
    below = max((size for size in fitting if size < block_size), default=None)
    above = min((size for size in fitting if size > block_size), default=None)
    nearest = " or ".join(str(size) for size in (below, above) if size is not None)
    found = " x ".join(str(size) for size in sizes)
    raise BlockSizeError(
        f"Blocks on a grid have to divide the width; found block_size={block_size} for {found}. The nearest that "
        f"divide it: {nearest}. Overlapping blocks (scheme 'overlapping') take any size."
    )


def theta_of_width(theta_bar: float, d: int, block_size: int) -> float:
    """Returns ``theta(d) = theta_bar r / (theta_bar r + (1 - theta_bar) d)`` (eq. 7) for blocks of size ``r``.

    ``theta_bar`` is the retain probability of a layer with a single block (``d = r``). With this rule, layers of all
    widths ``d`` are regularised alike: ``(1 - theta(d))/theta(d)`` grows like ``d/r``.
    """
    kept = check_theta(theta_bar, "theta_bar") * check_block_size(block_size)
    return kept / (kept + (1 - theta_bar) * _check_width(d))


def theta_bar_of(theta: float, d: int, block_size: int) -> float:
    """Returns the ``theta_bar`` whose ``theta(d)`` is ``theta``: the inverse of :func:`theta_of_width`."""
    kept = check_theta(theta) * _check_width(d)
    return kept / (kept + (1 - theta) * check_block_size(block_size))


def seed_retain_probability(theta: float, block_size: int, dims: int = 1) -> float:
    """Returns ``theta^(1/r^dims)``, the probability that overlapping DropBlock starts no block at a position.

    Each unit lies in ``r^dims`` possible blocks and is kept if none of them is dropped, so it is kept with probability
    ``theta``, as in the grid scheme. Section 5.3 of the paper prints ``1 - (1 - theta)^(1/(2k - 1))``, which confuses
    "some block is dropped" with "all blocks are dropped".
    """
    return check_theta(theta) ** (1 / check_block_size(block_size) ** dims)


def _check_width(d: int) -> int:
    if isinstance(d, bool) or not isinstance(d, int) or d < 1:
        raise OptionError(f"Expected a width d of at least one; found {d!r}.")
    return d
