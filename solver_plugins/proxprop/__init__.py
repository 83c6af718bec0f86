"""ProxProp: implicit steps for the weights of linear layers, as preconditioned gradients for any optimizer.

(I/tau_theta + X^T X)^{-1} grad, with X the inputs of a layer: equation (13) of "Proximal Backpropagation" (Frerix,
Möllenhoff, Moeller and Cremers, ICLR 2018).
"""

from solver_plugins.proxprop.errors import (
    ClosureError,
    DetachedError,
    EmptyBatchError,
    FactorizationError,
    JitterWarning,
    LayerNotRunError,
    NonFiniteError,
    OptimizerError,
    OverwrittenError,
    ProxPropError,
    ReplicaError,
    WrappedModelError,
)
from solver_plugins.proxprop.proxprop import ProxProp
from solver_plugins.proxprop.system import StepReport

__all__ = [
    "ClosureError",
    "DetachedError",
    "EmptyBatchError",
    "FactorizationError",
    "JitterWarning",
    "LayerNotRunError",
    "NonFiniteError",
    "OptimizerError",
    "OverwrittenError",
    "ProxProp",
    "ProxPropError",
    "ReplicaError",
    "StepReport",
    "WrappedModelError",
]
