"""Activations with their priors: torch's classes and functions, and those of timm and transformers.

The two libraries are matched by qualified name, so they need not be installed.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

from solver_plugins.errors import NotProximalError, OptionError
from solver_plugins.prox.boxes import HardtanhPrior, IdentityPrior, Relu6Prior, ReluPrior
from solver_plugins.prox.exponential import CeluPrior, EluPrior
from solver_plugins.prox.leaky import LeakyReluPrior, PreluPrior
from solver_plugins.prox.prior import Prior
from solver_plugins.prox.rejections import torch_functions
from solver_plugins.prox.shrink import SoftshrinkPrior, TanhshrinkPrior
from solver_plugins.prox.sigmoids import AtanPrior, HardsigmoidPrior, SigmoidPrior, SoftsignPrior, TanhPrior
from solver_plugins.prox.softmax import SoftmaxPrior
from solver_plugins.prox.softplus import LogSigmoidPrior, SoftplusPrior, SqrtSoftplusPrior

ModuleFactory = Callable[[Any], Prior]
"""Builds the prior of an activation module."""
FunctionFactory = Callable[..., Prior]
"""Builds the prior of a function from the parameters that follow its input."""


def _interval(low: float, high: float) -> Prior:
    """Returns the prior of a clip to an interval; ReLU is one of them."""
    return ReluPrior() if low == 0 and high == math.inf else HardtanhPrior(low, high)


def _threshold(threshold: float, value: float, inplace: bool = False) -> Prior:
    if threshold != value:
        raise NotProximalError(
            f"Threshold({threshold!r}, {value!r}) is not a proximal map: it jumps at the threshold, and a proximal map "
            "is continuous. It is a proximal map if both numbers are equal."
        )
    return _interval(threshold, math.inf)


def _box(min: float | None = None, max: float | None = None) -> Prior:
    if not all(bound is None or isinstance(bound, int | float) for bound in (min, max)):
        raise NotProximalError("A clamp has a prior only if its bounds are Python numbers; found a tensor.")
    return _interval(-math.inf if min is None else min, math.inf if max is None else max)


def _softmax(dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> Prior:
    if dim is None:
        raise OptionError("A softmax without dim is ambiguous; give the dimension of the features.")
    return SoftmaxPrior(dim)


def _fixed(prior: type[Prior]) -> FunctionFactory:
    """Returns the factory of a function whose only parameter is ``inplace``."""

    def factory(inplace: bool = False) -> Prior:
        return prior()

    return factory


_TORCH = "torch.nn.modules.activation."

CLASSES: dict[str, ModuleFactory] = {
    "torch.nn.modules.linear.Identity": lambda m: IdentityPrior(),
    _TORCH + "ReLU": lambda m: ReluPrior(),
    _TORCH + "ReLU6": lambda m: Relu6Prior(),
    _TORCH + "Hardtanh": lambda m: _interval(m.min_val, m.max_val),
    _TORCH + "Threshold": lambda m: _threshold(m.threshold, m.value),
    _TORCH + "LeakyReLU": lambda m: LeakyReluPrior(m.negative_slope),
    _TORCH + "PReLU": PreluPrior,
    _TORCH + "Softshrink": lambda m: SoftshrinkPrior(m.lambd),
    _TORCH + "Tanhshrink": lambda m: TanhshrinkPrior(),
    _TORCH + "ELU": lambda m: EluPrior(m.alpha),
    _TORCH + "CELU": lambda m: CeluPrior(m.alpha),
    _TORCH + "Tanh": lambda m: TanhPrior(),
    _TORCH + "Sigmoid": lambda m: SigmoidPrior(),
    _TORCH + "Hardsigmoid": lambda m: HardsigmoidPrior(),
    _TORCH + "LogSigmoid": lambda m: LogSigmoidPrior(),
    _TORCH + "Softplus": lambda m: SoftplusPrior(m.beta, m.threshold),
    _TORCH + "Softsign": lambda m: SoftsignPrior(),
    _TORCH + "Softmax": lambda m: _softmax(m.dim),
    _TORCH + "Softmax2d": lambda m: SoftmaxPrior(-3),
    "timm.layers.activations.Sigmoid": lambda m: SigmoidPrior(),
    "timm.layers.activations.Tanh": lambda m: TanhPrior(),
    "timm.layers.activations.HardSigmoid": lambda m: HardsigmoidPrior(),
    "timm.layers.activations.PReLU": PreluPrior,
    "timm.layers.activations_me.HardSigmoidMe": lambda m: HardsigmoidPrior(),
    "transformers.activations.LinearActivation": lambda m: IdentityPrior(),
    "transformers.activations.SqrtSoftplusActivation": lambda m: SqrtSoftplusPrior(),
}

_BY_NAME: dict[str, FunctionFactory] = {
    "relu": _fixed(ReluPrior),
    "relu6": _fixed(Relu6Prior),
    "hardtanh": lambda min_val=-1.0, max_val=1.0, inplace=False: _interval(min_val, max_val),
    "threshold": _threshold,
    "leaky_relu": lambda negative_slope=0.01, inplace=False: LeakyReluPrior(negative_slope),
    "softshrink": lambda lambd=0.5: SoftshrinkPrior(lambd),
    "tanhshrink": _fixed(TanhshrinkPrior),
    "elu": lambda alpha=1.0, inplace=False: EluPrior(alpha),
    "celu": lambda alpha=1.0, inplace=False: CeluPrior(alpha),
    "tanh": _fixed(TanhPrior),
    "sigmoid": _fixed(SigmoidPrior),
    "expit": _fixed(SigmoidPrior),
    "hardsigmoid": _fixed(HardsigmoidPrior),
    "logsigmoid": _fixed(LogSigmoidPrior),
    "softplus": lambda beta=1.0, threshold=20.0: SoftplusPrior(beta, threshold),
    "softsign": _fixed(SoftsignPrior),
    "atan": _fixed(AtanPrior),
    "arctan": _fixed(AtanPrior),
    "softmax": _softmax,
    "clamp": _box,
    "clip": _box,
    "clamp_min": lambda min: _box(min=min),
    "clamp_max": lambda max: _box(max=max),
}

FUNCTIONS: dict[Callable[..., Any], FunctionFactory] = {
    function: factory for name, factory in _BY_NAME.items() for function in torch_functions(name)
}

LIBRARY_FUNCTIONS: dict[str, FunctionFactory] = {
    "timm.layers.activations.sigmoid": _fixed(SigmoidPrior),
    "timm.layers.activations.tanh": _fixed(TanhPrior),
    "timm.layers.activations.hard_sigmoid": _fixed(HardsigmoidPrior),
    "timm.layers.activations_me.hard_sigmoid_me": _fixed(HardsigmoidPrior),
}

ALIASES: dict[str, str] = {
    "linear": "identity",
    "none": "identity",
    "hard_sigmoid": "hardsigmoid",
    "sqrtsoftplus": "sqrt_softplus",
}
"""Names of timm and transformers for priors that are registered under another name."""


def bind(factory: FunctionFactory, label: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Prior:
    """Calls a factory with those parameters of a call that follow the input; OptionError if they do not fit."""
    signature = inspect.signature(factory)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        valid = ", ".join(signature.parameters) or "none"
        raise OptionError(f"{label}: {error}; parameters after the input: {valid}.") from None
    return factory(*bound.args, **bound.kwargs)
