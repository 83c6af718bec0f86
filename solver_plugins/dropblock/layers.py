"""Structured dropout as functions and modules.

``theta`` is the probability that a unit is kept, as in the paper; a drop rate ``p`` is ``theta = 1 - p``. As the theory
requires, every unit is kept at exactly this rate at every size, and kept units are divided by the mean ``theta`` of the
mask, not by the share that was kept in the batch. In evaluation the input is returned.

Masks come from the global random state unless a generator is given.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from solver_plugins.dropblock.retain import check_theta
from solver_plugins.dropblock.schemes import GridBlocks, OverlappingBlocks, Sampler, Scheme, draw_bits, make_scheme
from solver_plugins.errors import OptionError, ShapeError


def structured_dropout(
    x: Tensor,
    scheme: Scheme,
    *,
    dims: int = 1,
    couple_channels: bool = False,
    training: bool = True,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Drops units by a scheme and rescales by its mean.

    Args:
        x: Of shape ``(..., d)`` for ``dims=1`` and ``(..., height, width)`` for ``dims=2``.
        scheme: The scheme (see :func:`make_scheme`).
        dims: A mask reaches over this many of the last dimensions; each of the other indices has its own mask.
        couple_channels: Lets all channels, the dimension before the masked ones, share a mask.
        training: False returns the input.
        generator: The source of randomness.

    Raises:
        ShapeError: If the input has too few dimensions.
        BlockSizeError: If blocks of a grid do not divide the size.
    """
    if dims < 1:
        raise OptionError(f"Expected masks over at least one dimension; found dims={dims}.")
    if x.ndim < dims + couple_channels:
        channels = " and one of channels" if couple_channels else ""
        raise ShapeError(f"Expected {dims} masked dimensions{channels}; found the shape {tuple(x.shape)}.")
    if not training:
        return x
    mean = scheme.mean
    if not isinstance(mean, Tensor) and mean == 1:
        return x
    batch, size = list(x.shape[: x.ndim - dims]), tuple(x.shape[x.ndim - dims :])
    if couple_channels:
        batch[-1] = 1
    mask = scheme.mask(batch, size, device=x.device, generator=generator)
    if isinstance(mean, Tensor):
        return x * (mask / mean.to(mask.device)).to(x.dtype)
    return _multiply(x, mask, 1 / mean)


def _multiply(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    if x.dtype in (torch.float16, torch.bfloat16):
        # In half precision the scale would be rounded, which shifts every output in the same direction.
        return x * mask * scale
    return x * (mask.to(x.dtype) * scale)


def drop_block_1d(
    x: Tensor,
    theta: float,
    block_size: int,
    *,
    overlapping: bool = False,
    couple_channels: bool = False,
    training: bool = True,
    generator: torch.Generator | None = None,
) -> Tensor:
    """DropBlock along the last dimension: of vectors, or of sequences ``(..., channels, length)``.

    ``block_size`` neighbours are dropped together, on a grid (the paper's blocks) or, ``overlapping``, anywhere (the
    original DropBlock). ``couple_channels`` lets all channels share a mask.
    """
    scheme = (OverlappingBlocks if overlapping else GridBlocks)(theta, block_size)
    return structured_dropout(x, scheme, couple_channels=couple_channels, training=training, generator=generator)


def drop_block_2d(
    x: Tensor,
    theta: float,
    block_size: int,
    *,
    overlapping: bool = False,
    couple_channels: bool = False,
    training: bool = True,
    generator: torch.Generator | None = None,
) -> Tensor:
    """DropBlock over the last two dimensions of maps ``(..., channels, height, width)``; see :func:`drop_block_1d`."""
    scheme = (OverlappingBlocks if overlapping else GridBlocks)(theta, block_size)
    return structured_dropout(
        x, scheme, dims=2, couple_channels=couple_channels, training=training, generator=generator
    )


def drop_connect_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    theta: float,
    training: bool = True,
    generator: torch.Generator | None = None,
) -> Tensor:
    """A linear layer that drops single weights (DropConnect), the same for all samples of a batch, but keeps its bias.

    A mask of its own for each sample would need much memory, and a loss that sums over samples has the same
    expectation.
    """
    check_theta(theta)
    if training and theta < 1:
        mask = draw_bits(tuple(weight.shape), theta, weight.device, generator)
        weight = _multiply(weight, mask, 1 / theta)
    return functional.linear(x, weight, bias)


class StructuredDropout(nn.Module):
    """Structured dropout by any scheme; see :func:`make_scheme` and :func:`structured_dropout` for the arguments."""

    def __init__(
        self,
        scheme: str | Scheme | Sampler,
        theta: float | None = None,
        block_size: int | None = None,
        *,
        mean: float | Tensor | None = None,
        dims: int = 1,
        couple_channels: bool = False,
    ):
        super().__init__()
        self.scheme = make_scheme(scheme, theta, block_size, mean)
        self.dims = dims
        self.couple_channels = couple_channels

    def forward(self, x: Tensor) -> Tensor:
        return structured_dropout(
            x, self.scheme, dims=self.dims, couple_channels=self.couple_channels, training=self.training
        )

    def extra_repr(self) -> str:
        coupled = ", couple_channels=True" if self.couple_channels else ""
        return f"{self.scheme}, dims={self.dims}{coupled}"


class _DropBlock(StructuredDropout):
    _dims = 1

    def __init__(self, theta: float, block_size: int, *, overlapping: bool = False, couple_channels: bool = False):
        scheme = "overlapping" if overlapping else "dropblock"
        super().__init__(scheme, theta, block_size, dims=self._dims, couple_channels=couple_channels)


class DropBlock1d(_DropBlock):
    """DropBlock along the last dimension; arguments as in :func:`drop_block_1d`."""


class DropBlock2d(_DropBlock):
    """DropBlock over the last two dimensions of maps; arguments as in :func:`drop_block_1d`."""

    _dims = 2


class DropConnectLinear(nn.Linear):
    """A linear layer that drops single weights in training; see :func:`drop_connect_linear`.

    ``theta`` is the probability that a weight is kept; the other arguments are those of ``nn.Linear``.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, theta: float, device: Any = None,
        dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__(in_features, out_features, bias, device, dtype)
        self.theta = check_theta(theta)

    @classmethod
    def from_linear(cls, layer: nn.Linear, theta: float) -> "DropConnectLinear":
        """Returns a layer with the Parameters (the same objects) and the mode of a plain one."""
        made = cls(layer.in_features, layer.out_features, layer.bias is not None, theta=theta, device="meta")
        made.weight, made.bias = layer.weight, layer.bias
        return made.train(layer.training)

    def forward(self, input: Tensor) -> Tensor:
        return drop_connect_linear(input, self.weight, self.bias, theta=self.theta, training=self.training)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, theta={self.theta:g}"


def averaged_dropout(
    x: Tensor, p: float, masks: int = 10, training: bool = True, generator: torch.Generator | None = None
) -> Tensor:
    """Returns the mean of ``masks`` independent dropouts of ``x`` at the rate ``p``; one mask is ordinary dropout.

    A layer behind it has the noise of dropout at the rate ``q/(1 + q)``, ``q = p / (masks (1 - p))``: 0.25 for three
    masks at 0.5. It is the control of a sampling solver, which averages over its iterations, too.
    """
    if not 0 <= p < 1 or masks < 1:
        raise OptionError(f"Expected a rate p in [0, 1) and at least one mask; found p={p}, masks={masks}.")
    if not training or p == 0:
        return x
    # At least float32: half precision would round a mean of masks.
    keep = torch.full_like(x, 1 - p, dtype=torch.promote_types(x.dtype, torch.float32), requires_grad=False)
    count = torch.bernoulli(keep, generator=generator)
    for _ in range(masks - 1):
        count = count + torch.bernoulli(keep, generator=generator)
    return (x * (count / (masks * (1 - p)))).to(x.dtype)


class AveragedDropout(nn.Module):
    """The mean of several dropout masks as a module; see :func:`averaged_dropout`."""

    def __init__(self, p: float = 0.5, masks: int = 10):
        super().__init__()
        averaged_dropout(torch.zeros(0), p, masks)
        self.p, self.masks = p, masks

    def forward(self, input: Tensor) -> Tensor:
        return averaged_dropout(input, self.p, self.masks, self.training)

    def extra_repr(self) -> str:
        return f"p={self.p:g}, masks={self.masks}"
