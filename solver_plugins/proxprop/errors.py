"""The errors of ProxProp; gradients, parameters and the model are unchanged after each of them."""

from solver_plugins.errors import SolverPluginsError, SolverPluginsWarning


class ProxPropError(SolverPluginsError, RuntimeError):
    """Base class of the errors of ProxProp."""


class LayerNotRunError(ProxPropError):
    """A layer has no inputs to precondition with: it did not run, or no gradient reached its output."""


class EmptyBatchError(ProxPropError):
    """A layer ran on an empty batch."""


class OverwrittenError(ProxPropError):
    """An input was changed in place before it was needed."""


class NonFiniteError(ProxPropError):
    """Activations or gradients are infinite or not a number."""


class ClosureError(ProxPropError):
    """The optimizer evaluates the model itself, so there is no moment between backward and step."""


class OptimizerError(SolverPluginsError, ValueError):
    """The optimizer does not hold the parameters of the layers, or is not an optimizer."""


class ReplicaError(ProxPropError):
    """Processes have different gradients, or train different layers."""


class WrappedModelError(SolverPluginsError, TypeError):
    """The model is in a wrapper that hides its layers."""


class DetachedError(ProxPropError):
    """The ProxProp has been detached from its model."""


class FactorizationError(ProxPropError):
    """A matrix is not positive definite, even with a large jitter."""


class JitterWarning(SolverPluginsWarning):
    """A matrix needed a larger diagonal than ``1/tau_theta`` to be factorised in its precision."""
