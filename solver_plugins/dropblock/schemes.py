"""Schemes, by name or by a sampler: which units are dropped together.

A scheme draws masks ``z`` with mean ``mu`` and knows their average effect (Lemma 3.1). For the logits
``U diag(z/mu) h`` of a last layer,

    sum_c Var(logit_c) = h^T (Cbar o U^T U) h,    Cbar_ij = Cov(z_i, z_j)/(mu_i mu_j)

which is the regulariser of the squared loss, one number per sample. Each scheme uses the structure of its ``Cbar``.
"""

import abc
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from solver_plugins.dropblock.estimate import Estimate, estimate
from solver_plugins.dropblock.retain import check_block_size, check_divides, check_theta, seed_retain_probability
from solver_plugins.errors import OptionError, ShapeError
from solver_plugins.operators.sampling import uniform
from solver_plugins.registry import Registry

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


Shape = Sequence[int]
Sampler = Callable[[int, tuple[int, ...], Source], Tensor]
"""``sampler(n, size, generator)`` draws ``n`` independent masks, a tensor of shape ``(n, *size)``."""

ESTIMATE_SAMPLES = 2**14
"""The number of masks that are drawn to estimate the characteristic matrix of a sampler."""


class Scheme(abc.ABC):
    """How units are dropped."""

    name: ClassVar[str]

    @property
    @abc.abstractmethod
    def mean(self) -> float | Tensor:
        """The mean ``mu`` of the mask: one number, or one number per unit."""

    @abc.abstractmethod
    def mask(self, batch: Shape, size: Shape, *, device: Device = None, generator: Source = None) -> Tensor:
        """Draws one mask for each element of the batch, shape ``(*batch, *size)``; units with a zero are dropped."""

    @abc.abstractmethod
    def characteristic_matrix(self, size: Shape) -> Tensor:
        """Returns ``Cbar`` (eq. 16) in float64, for units in the order of ``flatten``."""

    def variance(self, weight: Tensor, features: Tensor) -> Tensor:
        """Returns ``h^T (Cbar o U^T U) h`` for each row ``h`` of the features, with the weight ``U``."""
        matrix = self._matrix_for(weight) * (weight.mT @ weight)
        return ((features @ matrix) * features).sum(-1)

    def weighted_variance(self, weight: Tensor, features: Tensor, probabilities: Tensor) -> Tensor:
        """Returns ``tr((diag(p) - p p^T) Cov(logits))`` for each row, with probabilities ``p``, ``(..., a)``."""
        matrix = self._matrix_for(weight)
        parts = weight * features[..., None, :]
        each = ((parts @ matrix) * parts).sum(-1)
        middle = (probabilities @ weight) * features
        return (probabilities * each).sum(-1) - ((middle @ matrix) * middle).sum(-1)

    def _matrix_for(self, weight: Tensor) -> Tensor:
        return self.characteristic_matrix((weight.shape[-1],)).to(weight)


@dataclass(frozen=True)
class _BlockScheme(Scheme):
    """A scheme that keeps every unit with probability ``theta``, and drops it together with its block."""

    theta: float
    block_size: int

    def __post_init__(self) -> None:
        check_theta(self.theta)
        check_block_size(self.block_size)

    @property
    def mean(self) -> float:
        return float(self.theta)

    @property
    def odds(self) -> float:
        """``(1 - theta) / theta``, the variance of a rescaled unit."""
        return (1 - self.theta) / self.theta


SCHEMES: Registry[type[_BlockScheme]] = Registry("scheme")


@SCHEMES.register_class
@dataclass(frozen=True)
class GridBlocks(_BlockScheme):
    """Whole blocks of a grid: the DropBlock of the paper (Algorithm 1)."""

    name: ClassVar[str] = "dropblock"

    def mask(self, batch: Shape, size: Shape, *, device: Device = None, generator: Source = None) -> Tensor:
        check_divides(self.block_size, *size)
        mask = draw_bits((*batch, *(n // self.block_size for n in size)), self.theta, device, generator)
        for dim in range(-len(size), 0) if self.block_size > 1 else ():
            mask = mask.repeat_interleave(self.block_size, dim)
        return mask

    def characteristic_matrix(self, size: Shape) -> Tensor:
        check_divides(self.block_size, *size)
        same = torch.ones(1, 1, dtype=torch.float64)
        for n in size:
            index = torch.arange(n) // self.block_size
            same = torch.kron(same, (index[:, None] == index).to(same))
        return self.odds * same

    def variance(self, weight: Tensor, features: Tensor) -> Tensor:
        w, h = self._blocks(weight), self._blocks(features)
        return self.odds * torch.einsum("...kr,krs,...ks->...", h, torch.einsum("akr,aks->krs", w, w), h)

    def weighted_variance(self, weight: Tensor, features: Tensor, probabilities: Tensor) -> Tensor:
        # The contribution of each block to each logit; blocks are independent.
        parts = torch.einsum("...kr,akr->...ka", self._blocks(features), self._blocks(weight))
        p = probabilities[..., None, :]
        middle = (p * parts).sum(-1, keepdim=True)
        return self.odds * (p * (parts - middle).square()).sum((-2, -1))

    def _blocks(self, x: Tensor) -> Tensor:
        check_divides(self.block_size, x.shape[-1])
        return x.unflatten(-1, (-1, self.block_size))


@SCHEMES.register_class
@dataclass(frozen=True)
class OverlappingBlocks(_BlockScheme):
    """Blocks anywhere, as in the original DropBlock; those that reach over the border are cut off.

    Every unit, even at the border, lies in ``r`` (maps: ``r^2``) possible blocks and is kept with probability
    ``theta``.
    """

    name: ClassVar[str] = "overlapping"

    def mask(self, batch: Shape, size: Shape, *, device: Device = None, generator: Source = None) -> Tensor:
        extended = (n + self.block_size - 1 for n in size)
        keep = draw_bits(
            (*batch, *extended), seed_retain_probability(self.theta, self.block_size, len(size)), device, generator
        )
        for dim in range(-1, -len(size) - 1, -1):
            keep = all_in_window(keep, self.block_size, dim)
        return keep

    def characteristic_matrix(self, size: Shape) -> Tensor:
        shared = torch.ones(1, 1, dtype=torch.float64)
        for n in size:
            index = torch.arange(n, dtype=torch.float64)
            overlap = (1 - (index[:, None] - index).abs() / self.block_size).clamp(min=0)
            shared = torch.kron(shared, overlap)
        return torch.special.expm1(-math.log(self.theta) * shared)

    def variance(self, weight: Tensor, features: Tensor) -> Tensor:
        return _band(weight, features, self._diagonals())

    def weighted_variance(self, weight: Tensor, features: Tensor, probabilities: Tensor) -> Tensor:
        return _band(weight, features, self._diagonals(), probabilities)

    def _diagonals(self) -> list[float]:
        return [math.expm1(-math.log(self.theta) * (1 - k / self.block_size)) for k in range(self.block_size)]


@SCHEMES.register_class
@dataclass(frozen=True)
class Dropout(OverlappingBlocks):
    """Every unit on its own: blocks of one."""

    name: ClassVar[str] = "dropout"
    block_size: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size != 1:
            raise OptionError(
                f"The scheme 'dropout' drops single units; found block_size={self.block_size}. "
                "Use 'dropblock' or 'overlapping' for blocks."
            )


class SampledScheme(Scheme):
    """Any scheme, given by ``sampler(n, size, generator)``, which draws ``n`` masks of the given size.

    ``mean`` is the mean of a mask, a number or a tensor of a mask's shape, by which layers rescale. By default it is
    estimated together with the characteristic matrix.
    """

    name = "sampled"

    def __init__(self, sampler: Sampler, mean: float | Tensor | None = None):
        if not callable(sampler):
            raise OptionError(f"Expected a sampler to be a function of n, size and generator; found {sampler!r}.")
        if mean is not None and not bool((torch.as_tensor(mean) != 0).all()):
            raise OptionError("Expected a mean without zeros: a unit that is always dropped cannot be rescaled.")
        self.sampler = sampler
        self._mean = mean
        self._matrices: dict[tuple[int, ...], Tensor] = {}

    @property
    def mean(self) -> float | Tensor:
        if self._mean is None:
            raise OptionError(
                "Masks are rescaled by their mean, and this sampler came without one: pass mean=, or take it from "
                "estimate_characteristic_matrix(sampler, d).mean."
            )
        return self._mean

    def mask(self, batch: Shape, size: Shape, *, device: Device = None, generator: Source = None) -> Tensor:
        n = math.prod(batch)
        mask = self.sampler(n, tuple(size), generator)
        if not isinstance(mask, Tensor) or mask.shape != (n, *size):
            found = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise ShapeError(f"Expected the sampler to draw masks of shape {(n, *size)}; found {found}.")
        return mask.to(device).reshape(*batch, *size)

    def characteristic_matrix(self, size: Shape) -> Tensor:
        """Returns an estimate from 2^14 masks, drawn with a fixed seed, so it is the same in every process."""
        key = tuple(size)
        if key not in self._matrices:
            generator = torch.Generator().manual_seed(0)
            self._matrices[key] = self.estimate(key, ESTIMATE_SAMPLES, generator).matrix
        return self._matrices[key]

    def estimate(self, size: Shape, samples: int, generator: Source = None) -> Estimate:
        """Estimates the characteristic matrix from this many masks."""
        mean = self._mean.flatten() if isinstance(self._mean, Tensor) else self._mean
        return estimate(lambda n: self.mask((n,), size, generator=generator), math.prod(size), samples, mean)

    def __repr__(self) -> str:
        return f"SampledScheme({getattr(self.sampler, '__name__', self.sampler)!r})"


def make_scheme(
    scheme: str | Scheme | Sampler,
    theta: float | None = None,
    block_size: int | None = None,
    mean: float | Tensor | None = None,
) -> Scheme:
    """Returns a scheme, given a name, a scheme, or a sampler.

    Args:
        scheme: "dropout", "dropblock" (on a grid), "overlapping", a :class:`Scheme`, or a sampler.
        theta: The retain probability; only for a name.
        block_size: The block size; only for a name.
        mean: The mean of the masks; only for a sampler.

    Raises:
        UnknownNameError: If the name is unknown.
        OptionError: If an option is missing, out of range, or given for a scheme that has its own.
        BlockSizeError: If the block size is not a positive whole number.
    """
    if isinstance(scheme, Scheme) or (callable(scheme) and not isinstance(scheme, type)):
        if theta is not None or block_size is not None:
            raise OptionError("theta and block_size belong to schemes given by name; this one has its own.")
        if not isinstance(scheme, Scheme):
            return SampledScheme(scheme, mean)
    if mean is not None:
        raise OptionError("mean belongs to a sampler; a scheme knows its own.")
    if isinstance(scheme, Scheme):
        return scheme
    made = SCHEMES.get(scheme)  # type: ignore[arg-type]
    if theta is None:
        raise OptionError(f"The scheme {scheme!r} needs theta, the probability that a unit is kept.")
    if block_size is None and made is not Dropout:
        raise OptionError(f"The scheme {scheme!r} needs a block_size.")
    return made(theta, 1 if block_size is None else block_size)


def _band(weight: Tensor, features: Tensor, diagonals: Sequence[float], probabilities: Tensor | None = None) -> Tensor:
    """Returns the (weighted) variances for ``Cbar_ij = diagonals[|i - j|]``, in O(d r (a + N)) unless weighted."""
    d = weight.shape[-1]
    mean = None if probabilities is None else probabilities @ weight
    terms = []
    for k, value in enumerate(diagonals[:d]):
        products = weight[..., : d - k] * weight[..., k:]
        if probabilities is None or mean is None:
            gram = products.sum(-2)
        else:
            gram = probabilities @ products - mean[..., : d - k] * mean[..., k:]
        terms.append((1 if k == 0 else 2) * value * (features[..., : d - k] * features[..., k:] * gram).sum(-1))
    return functools.reduce(torch.add, terms)
