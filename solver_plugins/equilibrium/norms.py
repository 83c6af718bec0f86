"""Bounds on the norms of an equilibrium's weights: certified, projected, or certified by construction.

``|W| <= 1`` makes the map nonexpansive, and ``|W| < 1`` gives it exactly one fixed point. The norm of a convolution is
that of the whole operator, for every input size; the norm of its reshaped kernel can be much too small.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from solver_plugins.errors import OptionError, ShapeError
from solver_plugins.operators import Geometry, lipschitz_from_kernel, read_layer
from solver_plugins.operators.precision import autocast_off


def certified_norm(kernel: Tensor, geometry: Geometry, tolerance: float = 0.02) -> Tensor:
    """Returns an upper bound on the spectral norm of a kernel, within about half of ``tolerance``, as a 0-d tensor."""
    return lipschitz_from_kernel(kernel, geometry, tolerance=tolerance).sqrt()


@torch.no_grad()
def project_(layer: nn.Module, norm: float = 1.0) -> Tensor:
    """Scales a layer's weight in place so that its certified norm is at most ``norm``; returns the norm that it had.

    Scaling keeps all directions. The nearest point of the ball would clip singular values, which has no closed form for
    a convolution of finite size.
    """
    check_norm(norm)
    kernel, geometry = read_layer(layer)
    found = certified_norm(kernel, geometry)
    if found > norm:
        _scale_down(kernel, norm / float(found))
    return found


@torch.no_grad()
def initialise_(layer: nn.Module, norm: float) -> None:
    """Draws orthogonal weights and scales them to the certified norm ``norm``; does nothing on the meta device."""
    kernel, geometry = read_layer(layer)
    if kernel.is_meta:
        return
    wide = torch.empty_like(kernel, dtype=torch.promote_types(kernel.dtype, torch.float32))
    nn.init.orthogonal_(wide)
    kernel.copy_(wide)
    _scale_down(kernel, norm / float(certified_norm(kernel, geometry)))


def _scale_down(kernel: Tensor, factor: float) -> None:
    # Rounding the product and the factor must not lead above the bound.
    kernel.mul_(factor * (1 - 2 * torch.finfo(kernel.dtype).eps))


def rescaled_kernel(kernel: Tensor, geometry: Geometry, norm: float = 1.0) -> Tensor:
    """Returns a kernel of certified spectral norm at most ``norm``: each input feature divided by its bound.

        W = norm V diag(d),    d_j = (sum_i |V^T V|_ij)^(-1/2)

    ``V^T V <= diag(sum_i |V^T V|_ij)`` by diagonal dominance, so ``|W| <= norm`` for any ``V``; for a convolution the
    sum runs over all shifts of its autocorrelation, and the bound holds for every input size with zero or circular
    padding (Prach & Lampert 2022, "almost-orthogonal Lipschitz layers"). One small product, differentiable, and exact
    (``W = norm V``) for orthogonal ``V``.
    """
    with autocast_off(kernel.device):
        wide = kernel.to(torch.promote_types(kernel.dtype, torch.float32))
        scale = wide.detach().abs().amax().clamp_min(torch.finfo(wide.dtype).tiny)
        wide = wide / scale
        sums = _gram_sums(wide, geometry)
        # Makes room for the rounding of the sums and of the result; zero columns stay zero.
        slack = norm * (1 - 64 * torch.finfo(wide.dtype).eps)
        factors = slack * sums.clamp_min(torch.finfo(wide.dtype).eps ** 2).rsqrt()
        return wide * factors.reshape((1, -1) + (1,) * (kernel.ndim - 2))


def _gram_sums(kernel: Tensor, geometry: Geometry) -> Tensor:
    """Returns ``sum_i |V^T V|_ij`` per input feature ``j``, summed over all shifts for a convolution."""
    if geometry.dims == 0:
        return _sizes(kernel.mT @ kernel, kernel).sum(0)
    if geometry.dims != 2 or geometry.groups != 1 or geometry.padding_mode not in ("zeros", "circular"):
        raise ShapeError(
            "constraint='aol' takes linear layers and Conv2d without groups, with zero or circular padding; found a "
            f"convolution with dims={geometry.dims}, groups={geometry.groups}, padding_mode={geometry.padding_mode!r}. "
            "Use constraint='none' and project_weights."
        )
    # Dilation moves taps apart and does not change the sums; a stride drops outputs, which only lowers the norm.
    swapped = kernel.transpose(0, 1)
    pads = [taps - 1 for taps in kernel.shape[2:]]
    return _sizes(functional.conv2d(swapped, swapped, padding=pads), kernel).sum((0, 2, 3))


def _sizes(products: Tensor, kernel: Tensor) -> Tensor:
    """Returns ``|products|``, with the slope 0 where a product is zero up to rounding.

    Orthogonal weights, with which training starts, have products of zero. Their sign is that of a rounding error: it
    would fill gradients with noise, and 0 is as good a slope of ``|.|`` there.
    """
    sizes = products.abs()
    noise = 2**-15 * kernel.detach().square().sum() / kernel.shape[1]
    return torch.where(sizes > noise, sizes, sizes.detach())


def check_norm(norm: float) -> None:
    """Raises OptionError unless ``0 < norm <= 1``."""
    if not 0 < norm <= 1:
        raise OptionError(
            f"Expected a norm in (0, 1]; found {norm!r}. Below 1 there is exactly one fixed point; above, perhaps none."
        )
