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


_LIBRARIES = {
    "torch": "torch.nn.modules.activation.",
    "timm": "timm.layers.activations.",
    "timm_me": "timm.layers.activations_me.",
    "hf": "transformers.activations.",
}


def _falls(where: str) -> str:
    return f"it is not monotone (it decreases {where}), and every proximal map is"


_REJECTED = {
    _falls("below x = -0.75"): """
        gelu gelu_10 gelu_accurate gelu_fast gelu_new gelu_python gelu_python_tanh gelu_pytorch_tanh gelu_tanh
        quick_gelu torch.GELU timm.GELU timm.GELUTanh timm.QuickGELU timm.gelu timm.gelu_tanh timm.quick_gelu
        hf.GELUActivation hf.GELUTanh hf.PytorchGELUTanh hf.NewGELUActivation hf.FastGELUActivation
        hf.AccurateGELUActivation hf.ClippedGELUActivation hf.QuickGELUActivation""",
    _falls("below x = -1.28"): """
        silu swish torch.SiLU timm.Swish timm.swish timm_me.SwishMe timm_me.swish_me hf.SiLUActivation""",
    _falls("below x = -1.19"): """
        mish torch.Mish timm.Mish timm.mish timm_me.MishMe timm_me.mish_me hf.MishActivation""",
    _falls("between x = -3 and x = -1.5"): """
        hardswish hard_swish torch.Hardswish timm.HardSwish timm.hard_swish timm_me.HardSwishMe
        timm_me.hard_swish_me""",
    _falls(
        "between x = -2 and x = -1"
    ): "hard_mish timm.HardMish timm.hard_mish timm_me.HardMishMe timm_me.hard_mish_me",
    "its slope exceeds 1 (1.05 above 0, up to 1.76 below), and a proximal map is 1-Lipschitz": "selu torch.SELU",
    "its slope 2x exceeds 1 above x = 1/2, and a proximal map is 1-Lipschitz": "relu2 hf.ReLUSquaredActivation",
    "its slope grows without bound above 0, and a proximal map is 1-Lipschitz": "xielu hf.XIELUActivation",
    "its slope reaches 1.41 at x = 0.707, and a proximal map is 1-Lipschitz": "laplace hf.LaplaceActivation",
    "it jumps at +-lambd, and a proximal map is continuous": "hardshrink torch.Hardshrink",
    "its slope is drawn at random in training, so it is not one map; use LeakyReLU or PReLU": "rrelu torch.RReLU",
    "it maps 2n numbers to n, and a proximal map stays in its space": "glu torch.GLU",
    "it decreases in its own argument, and every proximal map is monotone": "softmin torch.Softmin",
    "its Jacobian is not symmetric, so it is not a gradient, and every proximal map is one": """
        log_softmax torch.LogSoftmax""",
}
"""Reasons, and what they hold for: names of torch's functions, classes and functions of the libraries."""

_PARTED = [(*full.rpartition(".")[::2], reason) for reason, names in _REJECTED.items() for full in names.split()]
REJECTED_NAMES: dict[str, str] = {name: reason for library, name, reason in _PARTED if not library}
REJECTED_CLASSES, REJECTED_LIBRARY_FUNCTIONS = (
    {_LIBRARIES[library] + name: reason for library, name, reason in _PARTED if library and name[0].isupper() is upper}
    for upper in (True, False)
)

_TORCH_NAMES = ("gelu", "silu", "mish", "hardswish", "selu", "hardshrink", "rrelu", "glu", "softmin", "log_softmax")

_PRELU = "its slope is a bare tensor here; pass the nn.PReLU module that owns it"

REJECTED_FUNCTIONS: dict[Callable[..., Any], str] = {
    **{function: REJECTED_NAMES[name] for name in _TORCH_NAMES for function in torch_functions(name)},
    **dict.fromkeys(torch_functions("prelu"), _PRELU),
}
