"""Activations that are not proximal maps, each with the reason.

A function of one variable is a proximal map if and only if it increases and is 1-Lipschitz (Moreau).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

_NAMESPACES = (torch, functional, torch.Tensor, torch.special, torch._C._nn)


def torch_functions(name: str) -> set[Callable[..., Any]]:
    """Returns every function of torch called ``name`` or ``name_``, as objects to compare with."""
    found = (getattr(space, key, None) for space in _NAMESPACES for key in (name, f"{name}_"))
    return {function for function in found if callable(function)}


_TORCH = "torch.nn.modules.activation."
_TIMM = "timm.layers.activations."
_TIMM_ME = "timm.layers.activations_me."
_HF = "transformers.activations."


def _falls(where: str) -> str:
    return f"it is not monotone (it decreases {where}), and every proximal map is"


_GELU = _falls("below x = -0.75")
_SILU = _falls("below x = -1.28")
_MISH = _falls("below x = -1.19")
_HARDSWISH = _falls("between x = -3 and x = -1.5")
_HARD_MISH = _falls("between x = -2 and x = -1")
_SELU = "its slope exceeds 1 (1.05 above 0, up to 1.76 below), and a proximal map is 1-Lipschitz"
_RELU2 = "its slope 2x exceeds 1 above x = 1/2, and a proximal map is 1-Lipschitz"
_XIELU = "its slope grows without bound above 0, and a proximal map is 1-Lipschitz"
_LAPLACE = "its slope reaches 1.41 at x = 0.707, and a proximal map is 1-Lipschitz"
_HARDSHRINK = "it jumps at +-lambd, and a proximal map is continuous"
_RRELU = "its slope is drawn at random in training, so it is not one map; use LeakyReLU or PReLU"
_GLU = "it maps 2n numbers to n, and a proximal map stays in its space"
_SOFTMIN = "it decreases in its own argument, and every proximal map is monotone"
_LOG_SOFTMAX = "its Jacobian is not symmetric, so it is not a gradient, and every proximal map is one"
_FUNCTIONAL_PRELU = "its slope is a bare tensor here; pass the nn.PReLU module that owns it"

REJECTED_CLASSES: dict[str, str] = {
    _TORCH + "GELU": _GELU,
    _TORCH + "SiLU": _SILU,
    _TORCH + "Mish": _MISH,
    _TORCH + "Hardswish": _HARDSWISH,
    _TORCH + "SELU": _SELU,
    _TORCH + "Hardshrink": _HARDSHRINK,
    _TORCH + "RReLU": _RRELU,
    _TORCH + "GLU": _GLU,
    _TORCH + "Softmin": _SOFTMIN,
    _TORCH + "LogSoftmax": _LOG_SOFTMAX,
    _TIMM + "GELU": _GELU,
    _TIMM + "GELUTanh": _GELU,
    _TIMM + "QuickGELU": _GELU,
    _TIMM + "Swish": _SILU,
    _TIMM + "Mish": _MISH,
    _TIMM + "HardSwish": _HARDSWISH,
    _TIMM + "HardMish": _HARD_MISH,
    _TIMM_ME + "SwishMe": _SILU,
    _TIMM_ME + "MishMe": _MISH,
    _TIMM_ME + "HardSwishMe": _HARDSWISH,
    _TIMM_ME + "HardMishMe": _HARD_MISH,
    _HF + "GELUActivation": _GELU,
    _HF + "GELUTanh": _GELU,
    _HF + "PytorchGELUTanh": _GELU,
    _HF + "NewGELUActivation": _GELU,
    _HF + "FastGELUActivation": _GELU,
    _HF + "AccurateGELUActivation": _GELU,
    _HF + "ClippedGELUActivation": _GELU,
    _HF + "QuickGELUActivation": _GELU,
    _HF + "SiLUActivation": _SILU,
    _HF + "MishActivation": _MISH,
    _HF + "LaplaceActivation": _LAPLACE,
    _HF + "ReLUSquaredActivation": _RELU2,
    _HF + "XIELUActivation": _XIELU,
}

REJECTED_NAMES: dict[str, str] = {
    "gelu": _GELU,
    "gelu_10": _GELU,
    "gelu_accurate": _GELU,
    "gelu_fast": _GELU,
    "gelu_new": _GELU,
    "gelu_python": _GELU,
    "gelu_python_tanh": _GELU,
    "gelu_pytorch_tanh": _GELU,
    "gelu_tanh": _GELU,
    "quick_gelu": _GELU,
    "silu": _SILU,
    "swish": _SILU,
    "mish": _MISH,
    "hardswish": _HARDSWISH,
    "hard_swish": _HARDSWISH,
    "hard_mish": _HARD_MISH,
    "selu": _SELU,
    "relu2": _RELU2,
    "xielu": _XIELU,
    "laplace": _LAPLACE,
    "hardshrink": _HARDSHRINK,
    "rrelu": _RRELU,
    "glu": _GLU,
    "softmin": _SOFTMIN,
    "log_softmax": _LOG_SOFTMAX,
}

_TORCH_NAMES = ("gelu", "silu", "mish", "hardswish", "selu", "hardshrink", "rrelu", "glu", "softmin", "log_softmax")

REJECTED_FUNCTIONS: dict[Callable[..., Any], str] = {
    **{function: REJECTED_NAMES[name] for name in _TORCH_NAMES for function in torch_functions(name)},
    **dict.fromkeys(torch_functions("prelu"), _FUNCTIONAL_PRELU),
}

REJECTED_LIBRARY_FUNCTIONS: dict[str, str] = {
    _TIMM + "gelu": _GELU,
    _TIMM + "gelu_tanh": _GELU,
    _TIMM + "quick_gelu": _GELU,
    _TIMM + "swish": _SILU,
    _TIMM + "mish": _MISH,
    _TIMM + "hard_swish": _HARDSWISH,
    _TIMM + "hard_mish": _HARD_MISH,
    _TIMM_ME + "swish_me": _SILU,
    _TIMM_ME + "mish_me": _MISH,
    _TIMM_ME + "hard_swish_me": _HARDSWISH,
    _TIMM_ME + "hard_mish_me": _HARD_MISH,
}
