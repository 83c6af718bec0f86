"""Forward and backward passes of a model under test, and how far apart two of them are."""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from solver_plugins.surgery import Inputs

SEED = 1
NEW_TOKENS = 3
_MODULE_SHARE = 1e-2
_MODEL_SHARE = 1e-5
"""A gradient far below those of its module or model is compared on their scale: the gradient of a bias before a norm is
zero, and what is computed is rounding."""


def seed_all() -> None:
    """Seeds every generator, for models that draw numbers although their dropout is off."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


def tensors_of(output: Any) -> list[Tensor]:
    """Returns the floating-point tensors of a model's output, in order."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, Mapping):
        return [tensor for item in output.values() for tensor in tensors_of(item)]
    if isinstance(output, list | tuple):
        return [tensor for item in output for tensor in tensors_of(item)]
    return []


def evaluate(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """Returns a model's outputs in evaluation mode."""
    model.eval()
    seed_all()
    args, kwargs = inputs.to(torch.device("cpu"))
    with torch.no_grad():
        return [tensor.clone() for tensor in tensors_of(model(*args, **kwargs))]


def generated(model: Any, inputs: Inputs) -> list[Tensor]:
    """Returns the scores and the tokens that a model generates, with its cache."""
    model.eval()
    seed_all()
    _, kwargs = inputs.to(torch.device("cpu"))
    given = {key: value for key, value in kwargs.items() if key not in ("use_cache", "decoder_input_ids")}
    with torch.no_grad():
        found = model.generate(
            **given, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, num_beams=1,
            use_cache=True, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
    if isinstance(found, Tensor):
        return [found.double()]
    return [found.sequences.double(), *(score.nan_to_num(neginf=0.0) for score in found.scores or ())]


def _loss(outputs: list[Tensor]) -> Tensor:
    generator = torch.Generator().manual_seed(SEED)
    total = torch.zeros(())
    for output in outputs:
        if output.requires_grad:
            weights = torch.randn(output.shape, generator=generator).to(output.dtype)
            total = total + (output * weights).sum()
    return total


@dataclass
class Gradients:
    """Gradients of one pass, or how another one compares with them.

    Attributes:
        values: Gradients by Parameter.
        errors: Largest difference, by Parameter.
        sizes: Largest number of each gradient, by Parameter.
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    sizes: dict[str, float] = field(default_factory=dict)

    def worst(self) -> tuple[str, float]:
        """Returns the Parameter whose gradient is furthest off, and by how much of its scale."""
        modules: dict[str, float] = {}
        for name, size in self.sizes.items():
            owner = name.rpartition(".")[0]
            modules[owner] = max(size, modules.get(owner, 0.0))
        largest = max(self.sizes.values(), default=0.0)
        found = ("", 0.0)
        for name, error in self.errors.items():
            around = modules.get(name.rpartition(".")[0], 0.0)
            scale = max(self.sizes.get(name, 0.0), _MODULE_SHARE * around, _MODEL_SHARE * largest, 1e-30)
            relative = error / scale
            if not relative <= found[1]:
                found = (name, relative)
                if relative != relative:
                    break
        return found


def _size(tensor: Tensor) -> float:
    return float(tensor.abs().amax()) if tensor.numel() else 0.0


def backward(model: nn.Module, outputs: list[Tensor], against: Gradients | None = None) -> Gradients:
    """Runs the backward pass, one gradient at a time: each is kept, or compared and freed at once.

    Args:
        model: The model.
        outputs: Of a forward pass.
        against: Gradients to compare with; they are freed on the way. A gradient that only one of the two has is an
            infinite error.
    """
    made = Gradients(sizes={} if against is None else dict(against.sizes))

    def take(name: str, grad: Tensor) -> None:
        if against is None:
            made.values[name], made.sizes[name] = grad, _size(grad)
        else:
            other = against.values.pop(name, None)
            made.errors[name] = math.inf if other is None else _size(grad - other)

    _hand_over_gradients(model, outputs, take)
    if against is not None:
        made.errors |= dict.fromkeys(against.values, math.inf)
    return made


def unfinite(model: nn.Module, outputs: list[Tensor]) -> list[str]:
    """Runs the backward pass and returns the names of Parameters whose gradient has a NaN or infinite number."""
    found: list[str] = []

    def take(name: str, grad: Tensor) -> None:
        if not bool(torch.isfinite(grad).all()):
            found.append(name)

    _hand_over_gradients(model, outputs, take)
    return found


def _hand_over_gradients(model: nn.Module, outputs: list[Tensor], take: Callable[[str, Tensor], None]) -> None:
    """Runs the backward pass; each gradient is taken as it comes, and not kept on its Parameter."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def hand_over(parameter: Tensor) -> None:
        grad = parameter.grad
        assert grad is not None
        parameter.grad = None
        take(names[id(parameter)], grad)

    handles = [p.register_post_accumulate_grad_hook(hand_over) for p in model.parameters() if p.requires_grad]
    try:
        _loss(outputs).backward()
    finally:
        for handle in handles:
            handle.remove()


def train(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """Returns a model's outputs in training mode, with their graph."""
    model.train()
    seed_all()
    args, kwargs = inputs.to(torch.device("cpu"))
    return tensors_of(model(*args, **kwargs))


def apart(one: list[Tensor], other: list[Tensor]) -> float:
    """Returns the largest difference of two passes' outputs, each in units of the first one's scale."""
    if [tensor.shape for tensor in one] != [tensor.shape for tensor in other]:
        return math.inf
    worst = 0.0
    for a, b in zip(one, other, strict=True):
        error = _size(a.detach() - b.detach()) / max(_size(a.detach()), 1e-30)
        worst = error if error != error else max(worst, error)
        if worst != worst:
            return math.inf
    return worst


def all_finite(tensors: list[Tensor]) -> bool:
    """Whether every number is finite."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def same_bits(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether two passes gave exactly the same numbers, NaN included."""
    if len(one) != len(other):
        return False
    return all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
        for a, b in zip(one, other, strict=True)
    )
