"""Norms that are folded into a linear map: per feature they are ``y -> d y + e``, with a diagonal ``d``."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from solver_plugins.errors import UnsupportedLayerError

SMALL_ROW = 0.05
"""A reference row is at least this share of the largest, so that a scale near zero may grow without voiding ``L``."""


def check_foldable(norm: nn.Module | None) -> None:
    """Raises UnsupportedLayerError for a norm that is not a diagonal."""
    if norm is not None and not (isinstance(norm, _BatchNorm) or is_frozen(norm)):
        raise UnsupportedLayerError(f"Expected a BatchNorm, which is a diagonal; found {type(norm).__name__}.")


def is_frozen(norm: nn.Module) -> bool:
    """Whether it is a BatchNorm of torchvision's or timm's that always uses its running statistics."""
    kept = ("weight", "bias", "running_mean", "running_var")
    return (
        "FrozenBatchNorm" in type(norm).__name__
        and not isinstance(norm, _BatchNorm)
        and all(isinstance(getattr(norm, name, None), Tensor) for name in kept)
    )


def normalised(norm: nn.Module, input: Tensor) -> Tensor:
    """Returns what a norm that also holds an activation (timm's BatchNormAct2d) computes before it."""
    bn: Any = norm
    if is_frozen(norm):
        scale = bn.weight * (bn.running_var + bn.eps).rsqrt()
        shift = bn.bias - bn.running_mean * scale
        return input * scale.reshape(1, -1, 1, 1) + shift.reshape(1, -1, 1, 1)
    plain: Any = nn.SyncBatchNorm if isinstance(norm, nn.SyncBatchNorm) else nn.BatchNorm2d
    return plain.forward(bn, input)


def running_diagonal(norm: nn.Module, dtype: torch.dtype) -> Tensor:
    """Returns ``gamma / sqrt(var + eps)`` with the running variance (ones where none is kept)."""
    bn: Any = norm
    if is_frozen(norm):
        return _frozen_diagonal(norm, dtype)
    if bn.running_var is None:
        like = next(iter((*bn.parameters(), *bn.buffers())), torch.empty(0))
        var = torch.ones(bn.num_features, device=like.device)
    else:
        var = bn.running_var
    scale = torch.rsqrt(var.to(dtype) + bn.eps)
    if bn.weight is None:
        return scale
    weight = bn.weight.detach()
    # A shard of it (FSDP2) says nothing of the other rows.
    return scale * (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).to(dtype)


def reference_diagonal(norm: nn.Module, dtype: torch.dtype) -> Tensor:
    """Returns the diagonal that a block with this folded norm certifies its constant for."""
    size = running_diagonal(norm, dtype).abs()
    largest = size.amax()
    # Scales of zero (a residual branch that starts closed) say nothing of what they will be: assume ones.
    return torch.where(largest > 0, size.clamp_min(SMALL_ROW * largest), 1.0)


def uses_batch(norm: nn.Module) -> bool:
    """Whether a norm takes the statistics of the batch."""
    bn: Any = norm
    return not is_frozen(norm) and (bn.training or bn.running_var is None)


def diagonal_of(norm: nn.Module, y: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the diagonal that the norm applies to ``y`` in its present mode, differentiable."""
    bn: Any = norm
    if is_frozen(norm):
        return _frozen_diagonal(norm, dtype)
    if uses_batch(norm):
        y = y.to(dtype)
        group = _group(norm)
        var = y.var(_all_but_features(y), correction=0) if group is None else synchronised_variance(y, group)
    else:
        var = bn.running_var.to(dtype)
    scale = torch.rsqrt(var + bn.eps)
    return scale if bn.weight is None else scale * bn.weight.to(dtype)


def _frozen_diagonal(norm: nn.Module, dtype: torch.dtype) -> Tensor:
    """Returns the diagonal of a frozen norm, from its own formula where it does not say its ``eps``."""
    bn: Any = norm
    if hasattr(norm, "eps"):
        return torch.rsqrt(bn.running_var.to(dtype) + bn.eps) * bn.weight.to(dtype)
    # transformers writes its eps into the forward. The norm is affine, y -> d y + e: two looks tell d.
    plain = getattr(type(norm), "plain_class", type(norm))
    device = bn.running_var.device
    widest = torch.float32 if device.type == "mps" else torch.float64
    zeros = torch.zeros(1, len(bn.running_var), 1, 1, dtype=widest, device=device)
    return (plain.forward(bn, zeros + 1) - plain.forward(bn, zeros)).flatten().to(dtype)


def synchronised_variance(y: Tensor, group: Any) -> Tensor:
    """Returns the variance per feature over the batches of all processes, differentiable in each."""
    # Not torch.distributed.nn at the top: its import is slow, and few need it.
    from torch.distributed.nn.functional import all_reduce

    dims = _all_but_features(y)
    local = torch.cat([y.sum(dims), y.new_tensor([y.numel() / y.shape[1]])])
    total = all_reduce(local, group=group)
    count = total[-1].detach()
    shape = [1, -1] + [1] * (y.dim() - 2)
    centred = y - (total[:-1] / count).reshape(shape)
    return all_reduce(centred.square().sum(dims), group=group) / count


def _group(norm: nn.Module) -> Any:
    """Returns the processes over which a norm takes its statistics; None for this one alone."""
    if not isinstance(norm, nn.SyncBatchNorm) or not (dist.is_available() and dist.is_initialized()):
        return None
    group = norm.process_group or dist.group.WORLD
    return group if dist.get_world_size(group) > 1 else None


def _all_but_features(y: Tensor) -> tuple[int, ...]:
    return (0, *range(2, y.dim()))
