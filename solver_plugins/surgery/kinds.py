"""What a module or a function is to the matcher: decided by class and name, so that no library is imported."""

import re
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from solver_plugins.blocks.dropout import PassThrough
from solver_plugins.blocks.link import LINEAR, SUMS, words
from solver_plugins.errors import SolverPluginsError
from solver_plugins.operators.layers import LAYERS
from solver_plugins.prox import prox_for
from solver_plugins.prox.rejections import REJECTED_CLASSES, REJECTED_FUNCTIONS, REJECTED_LIBRARY_FUNCTIONS
from solver_plugins.prox.table import FUNCTIONS, LIBRARY_FUNCTIONS

ModuleKind = Literal["linear", "norm", "dropout", "droppath", "activation", "shape", "other"]

_SHAPE_MODULES = (nn.Identity, nn.Flatten, nn.Unflatten)
_CHANNEL_DROPOUTS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_DROPOUTS = frozenset(kind.forward for kind in (nn.Dropout, *_CHANNEL_DROPOUTS))
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NORMS = (_BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.instancenorm._InstanceNorm)
_NORM_NAME = re.compile(r"Norm|InplaceAbn|InPlaceABN")
_DROPPATH_NAME = re.compile(r"(DropPath|StochasticDepth)$")


_SHAPE_FUNCTIONS = words(
    "view reshape flatten unflatten ravel permute transpose t T mT H mH contiguous squeeze unsqueeze view_as "
    "reshape_as movedim moveaxis swapaxes swapdims to type type_as float double half bfloat16 clone alias _to_copy "
    "_unsafe_view positive __pos__"
)
"""Functions that move the numbers of their first argument around, or store them in another dtype."""
_CHANNEL_FUNCTIONS = words("dropout1d dropout2d dropout3d feature_dropout feature_dropout_")
_DROPOUT_FUNCTIONS = words("dropout dropout_ native_dropout") | _CHANNEL_FUNCTIONS
_OTHER_DROPOUTS = words("alpha_dropout alpha_dropout_ feature_alpha_dropout feature_alpha_dropout_")


def linear_like(module: nn.Module) -> bool:
    """Whether a module is a linear layer of any sort, whether the package can read it or not."""
    if isinstance(module, _TRANSPOSED):
        return True
    return any(f"{base.__module__}.{base.__qualname__}" in LAYERS for base in type(module).__mro__)


def module_kind(module: nn.Module) -> ModuleKind | None:
    """Returns what a module is, if its call is one step of the record; None if the record looks inside of it."""
    if linear_like(module):
        return "linear"
    if isinstance(module, _DropoutNd):
        return "dropout" if type(module).forward in _DROPOUTS else "other"
    if isinstance(module, _SHAPE_MODULES):
        return "shape"
    leaf = not module._modules
    # Norms that hold their activation (timm) are not leaves.
    if isinstance(module, _NORMS) or (_NORM_NAME.search(type(module).__name__) and _holds_only(module, "act", "drop")):
        return "norm"
    if not leaf:
        return None
    if _DROPPATH_NAME.search(type(module).__name__):
        return "droppath"
    if known_activation(module):
        return "activation"
    # torch's own leaves (pools, embeddings, recurrent layers) are steps; what others write is looked into.
    return "other" if type(module).__module__.startswith("torch.nn.modules") else None


def _holds_only(module: nn.Module, *names: str) -> bool:
    return all(name in names for name in module._modules)


def known_activation(module: nn.Module) -> bool:
    """Whether a module is known to be a proximal map, or known not to be one."""
    if any(f"{base.__module__}.{base.__qualname__}" in REJECTED_CLASSES for base in type(module).__mro__):
        return True
    # Asking costs an error message, so modules that cannot be activations are ruled out first.
    if len(module._parameters) > 1 or isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        return False
    try:
        prox_for(module)
    except SolverPluginsError:
        return type(module).__module__ == "torch.nn.modules.activation" and not isinstance(module, nn.Softmax)
    return True


def function_name(function: Callable[..., Any]) -> str:
    """Returns the bare name of a function as a torch mode sees it; for a getter, the name of its attribute."""
    name = getattr(function, "__name__", None) or repr(function)
    if name == "__get__":
        return getattr(getattr(function, "__self__", None), "__name__", name)
    # torch.ops.aten.relu_.default is called "relu_.default".
    return str(name).partition(".")[0]


def is_linear_function(function: Callable[..., Any]) -> bool:
    """Whether a function multiplies by one of its arguments."""
    return function_name(function) in LINEAR


def function_kind(function: Callable[..., Any]) -> Literal["dropout", "shape", "activation", "add", "other"]:
    """Returns what a function does; a "shape" function only moves numbers around or stores them in another dtype."""
    name = function_name(function)
    if name in _DROPOUT_FUNCTIONS:
        return "dropout"
    if name in _SHAPE_FUNCTIONS:
        return "shape"
    if _is_activation_function(function):
        return "activation"
    return "add" if name in SUMS else "other"


def torch_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns torch's function for an operator that was seen below it, inside of a scripted function."""
    if isinstance(function, torch._ops.OpOverload):
        return getattr(torch, function_name(function).rstrip("_"), function)
    return function


def drops_otherwise(module: nn.Module | None, function: Callable[..., Any] | None) -> bool:
    """Whether a module or function drops in a way that no solver takes over (alpha dropout, a subclass's own way)."""
    if module is not None:
        return isinstance(module, _DropoutNd) and not isinstance(module, PassThrough)
    return function is not None and function_name(function) in _OTHER_DROPOUTS


def drops_channels(module: nn.Module | None, name: str) -> bool:
    """Whether a dropout draws whole channels: the second axis of its input."""
    return name in _CHANNEL_FUNCTIONS if module is None else isinstance(module, _CHANNEL_DROPOUTS)


def _is_activation_function(function: Callable[..., Any]) -> bool:
    """Whether a function is known to be a proximal map, or known not to be one."""
    try:
        known = function in FUNCTIONS or function in REJECTED_FUNCTIONS
    except TypeError:  # not hashable
        return False
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
    return known or name in LIBRARY_FUNCTIONS or name in REJECTED_LIBRARY_FUNCTIONS
