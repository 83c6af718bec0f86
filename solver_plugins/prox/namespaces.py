"""Where torch keeps an elementwise function: ``torch``, ``nn.functional``, ``Tensor``, and their in-place forms."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

_NAMESPACES = (torch, functional, torch.Tensor, torch.special, torch._C._nn)


def torch_functions(name: str) -> set[Callable[..., Any]]:
    """Returns every function of torch called ``name`` or ``name_``, as objects to compare with."""
    found = (getattr(space, key, None) for space in _NAMESPACES for key in (name, f"{name}_"))
    return {function for function in found if callable(function)}
