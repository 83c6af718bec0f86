"""What can go wrong between a backward pass and a preconditioned gradient.

Whatever is raised, gradients, parameters and the model are as they were before the call.
"""

from solver_plugins.errors import SolverPluginsError, SolverPluginsWarning


class ProxPropError(SolverPluginsError, RuntimeError):
    """Base class of the errors of ProxProp."""


class LayerNotRunError(ProxPropError):
    """A layer has no inputs to precondition with: it did not run, or no gradient reached its output."""


class EmptyBatchError(ProxPropError):
    """A layer ran on no samples at all."""


class OverwrittenError(ProxPropError):
    """Inputs whose memory was used for something else before they were needed."""


class NonFiniteError(ProxPropError):
    """Activations or gradients that are infinite or not a number."""


class ClosureError(ProxPropError):
    """An optimizer that evaluates the model itself: there is no moment between backward and step."""


class OptimizerError(SolverPluginsError, ValueError):
    """An optimizer that does not hold the parameters of the layers, or is none."""


class ReplicaError(ProxPropError):
    """Processes that do not hold the same gradients or do not run the same layers."""


class WrappedModelError(SolverPluginsError, TypeError):
    """A model in a wrapper whose layers cannot be listened to."""


class DetachedError(ProxPropError):
    """A ProxProp that has been detached from its model."""


class FactorizationError(ProxPropError):
    """A matrix that no reasonable jitter makes positive definite."""


class JitterWarning(SolverPluginsWarning):
    """A matrix needed a larger diagonal than ``1/tau_theta`` to be factorised in its precision."""
