"""Weights for a check, which are cheap to make and let every layer matter.

A network as it is initialised would pass many checks for no reason: scales of zero close its residual branches, layer
scales of 1e-5 hide them, and the running statistics of its norms do not come from data.
"""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import init
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode

_POOL = 1_000_003
"""A prime, so that no row of a weight repeats another one."""
_DRAWS = frozenset({"normal_", "uniform_", "trunc_normal_", "exponential_", "kaiming_uniform_", "kaiming_normal_"}) | {
    "xavier_uniform_", "xavier_normal_", "orthogonal_", "sparse_", "erfinv_",
}  # fmt: skip
_SCALES = frozenset({"mul_", "div_"})
"""Initialisation also scales what it has drawn. Scaling all of a network that is shortened later would not fit into
memory."""
_DROPS = re.compile(r"Drop|StochasticDepth")


class _NoDraws(TorchFunctionMode):
    """Skips the random part of initialisation: drawing 300 million numbers takes longer than all checks."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # torch.nn.init hands its tensor on by name.
        target = args[0] if args else (kwargs or {}).get("tensor")
        name = getattr(func, "__name__", "")
        if name in _SCALES and isinstance(target, nn.Parameter) and target.dim() > 1:
            return target
        if name in _DRAWS and isinstance(target, Tensor):
            if target.numel() < 64 and not target.is_meta:
                return func(*args, **(kwargs or {}))
            return target
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def undrawn_weights() -> Iterator[None]:
    """Within it, modules are made without drawing random weights; see :func:`fill_weights`."""
    from timm.layers import weight_init

    truncated, torchs = weight_init._trunc_normal_, init._no_grad_trunc_normal_
    weight_init._trunc_normal_ = lambda tensor, *rest: tensor
    # torch draws again until all numbers lie between the bounds, which numbers that are not drawn may never do.
    init._no_grad_trunc_normal_ = lambda tensor, *rest, **options: tensor.detach().zero_()
    try:
        with _NoDraws():
            yield
    finally:
        weight_init._trunc_normal_, init._no_grad_trunc_normal_ = truncated, torchs


class _Numbers:
    """Normal numbers from a pool that is drawn once."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)
        self.pool = torch.randn(_POOL, generator=self.generator)
        self.start = 0

    def into(self, tensor: Tensor, std: float) -> None:
        """Fills a tensor."""
        if not tensor.is_contiguous():
            made = torch.empty(tensor.shape, dtype=tensor.dtype)
            self.into(made, std)
            tensor.copy_(made)
            return
        flat, done = tensor.view(-1), 0
        while done < flat.numel():
            piece = self.pool[self.start : self.start + flat.numel() - done]
            flat[done : done + len(piece)].copy_(piece).mul_(std)
            done += len(piece)
            self.start = (self.start + len(piece)) % _POOL

    def normal(self, like: Tensor, std: float) -> Tensor:
        return (torch.randn(like.shape, generator=self.generator) * std).to(like.dtype)

    def uniform(self, like: Tensor, low: float, high: float) -> Tensor:
        return (low + (high - low) * torch.rand(like.shape, generator=self.generator)).to(like.dtype)


@torch.no_grad()
def fill_weights(model: nn.Module, seed: int = 0) -> None:
    """Fills a model with random weights of sane scale, the same for the same seed."""
    numbers = _Numbers(seed)
    done: set[int] = set()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in done or not parameter.is_floating_point():
                continue
            done.add(id(parameter))
            _fill(module, name, parameter.data, numbers)


def _fill(module: nn.Module, name: str, tensor: Tensor, numbers: _Numbers) -> None:
    vector = tensor.numel() == max(tensor.shape, default=1)
    if isinstance(module, nn.PReLU):
        tensor.copy_(numbers.uniform(tensor, 0.1, 0.5))
    elif isinstance(module, nn.Embedding):
        numbers.into(tensor, 1.0)
    elif vector and name.endswith("bias"):
        tensor.copy_(numbers.normal(tensor, 0.1))
    elif vector and "Norm" in type(module).__name__:
        tensor.copy_(numbers.normal(tensor, 0.2).add_(1.0))
    elif not vector and name == "weight" and isinstance(module, nn.Linear | _ConvNd):
        fan = tensor[0].numel() if not getattr(module, "transposed", False) else tensor[:, 0].numel()
        numbers.into(tensor, 1.2 * fan**-0.5)
    elif vector and tensor.numel() > 0:
        # Layer scales, gains and temperatures stay near what they are, far enough from zero.
        base = torch.where(torch.isfinite(tensor) & (tensor.abs() < 100), tensor, 0.0)
        close = base.abs() < 0.1
        tensor.copy_(torch.where(close, 0.4, base) + numbers.normal(tensor, 0.1))
    elif tensor.numel() > 0:
        numbers.into(tensor, min(1.0, max(tensor.shape[-1], tensor.shape[-2]) ** -0.5))


def drop_nothing(model: nn.Module) -> list[tuple[nn.Module, str, float]]:
    """Sets every rate of dropout, stochastic depth and dropped layers to zero, and returns what they were."""
    before = []
    for module in model.modules():
        dropping = bool(_DROPS.search(type(module).__name__))
        for name, value in list(vars(module).items()):
            # Rates of functional dropouts are attributes of the modules that call them.
            if isinstance(value, float) and value > 0 and ("drop" in name or (dropping and name == "p")):
                before.append((module, name, value))
                setattr(module, name, 0.0)
    return before


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns copies of a model's buffers."""
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


@torch.no_grad()
def put_back(model: nn.Module, buffers: dict[str, Tensor]) -> None:
    """Writes copies of buffers back."""
    for name, buffer in model.named_buffers():
        if name in buffers and buffer.shape == buffers[name].shape:
            buffer.copy_(buffers[name])


@contextlib.contextmanager
def measured_statistics(model: nn.Module, seed: int = 0) -> Iterator[None]:
    """A forward pass within it, in training mode, gives every BatchNorm running statistics near those of its input."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    kept = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    try:
        yield
    finally:
        for norm, momentum in zip(norms, kept, strict=True):
            norm.momentum = momentum
    numbers = _Numbers(seed + 1)
    with torch.no_grad():
        for norm in norms:
            if norm.running_mean is not None and norm.running_var is not None:
                var = norm.running_var
                # Two images say little about a channel. A variance far below the others would make its scale explode.
                floor = 0.1 * var.mean() + 1e-3
                var.copy_((var.clamp_max(1e6) + floor) * numbers.uniform(var, 0.7, 1.4))
                norm.running_mean.add_(0.1 * var.sqrt() * numbers.normal(var, 1.0))
