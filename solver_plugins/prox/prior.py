"""The interface of a prior ``g``, seen through its proximal map, and the registry of priors.

    prox_{t g}(a) = argmin_x  g(x) + |x - a|^2 / (2 t)

At the unit step the proximal map *is* an activation: ``prior.prox(a, 1.0) == activation(a)``. A third-party
distribution adds a prior by an entry point of the group ``solver_plugins.priors``.
"""

import abc
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from solver_plugins.errors import OptionError
from solver_plugins.registry import Registry, subclasses_of

Step = float | Tensor
"""A step size: a Python number, or a 0-d tensor if it comes from a Lipschitz constant on the device."""


def is_unit(step: Step) -> bool:
    """Whether the step is the Python number one; always False for a tensor, whose value would have to be read."""
    return not isinstance(step, Tensor) and step == 1


def step_like(step: Step, a: Tensor) -> Step:
    """Returns the step in the dtype of ``a``, so that a 0-d float64 step does not promote a 0-d float32 ``a``.

    It raises OptionError for a number that is not positive; the value of a tensor is not read.
    """
    if isinstance(step, Tensor):
        return step.to(a.dtype)
    if not step > 0:
        raise OptionError(f"A proximal step must be positive; found {step!r}.")
    return float(step)


def widened(a: Tensor) -> Tensor:
    """Returns half-precision tensors in float32, because their mantissa is too short for a Newton step."""
    return a.float() if a.dtype in (torch.bfloat16, torch.float16) else a


def in_float64(x: Tensor) -> Tensor:
    """Returns a tensor without gradient in float64; on the CPU, if its device has no such numbers (MPS)."""
    return (x.detach().cpu() if x.device.type == "mps" else x.detach()).double()


def infinite_where(condition: Tensor, values: Tensor) -> Tensor:
    """Returns ``values`` with infinity where ``condition`` holds: the indicator function of the complement."""
    return torch.where(condition, torch.full_like(values, torch.inf), values)


class Prior(abc.ABC):
    """A convex function ``g`` with a known proximal map.

    Read the flags from an *instance*: some depend on the parameters (a box may or may not contain 0).

    Attributes:
        name: The registered name.
        tags: Words to filter the registry by.
        separable: ``g(x) = sum_i g_i(x_i)``: the proximal map acts on each coordinate alone.
        scale_free: ``t g = g`` (an indicator function): the proximal map does not depend on the step.
        unit_step_only: Only ``prox_g`` is known, not ``prox_{t g}`` for other ``t``.
        learnable: ``g`` has trained parameters. Their gradients flow through :meth:`prox` (by autograd), not through
            :meth:`derivative` and :meth:`vjp`, which only know ``a``.
        opaque: ``g`` is made of the user's own functions, which may also hold trained parameters.
        slope_from_value: ``derivative(prox(a, t), t) == derivative(a, t)``. A backward pass that keeps the value of
            the proximal map then needs neither its argument nor its derivative.
    """

    name: ClassVar[str]
    tags: ClassVar[frozenset[str]] = frozenset()
    separable: ClassVar[bool] = True
    scale_free: ClassVar[bool] = False
    unit_step_only: ClassVar[bool] = False
    learnable: ClassVar[bool] = False
    opaque: ClassVar[bool] = False
    slope_from_value: ClassVar[bool] = False

    @property
    def bounded(self) -> bool:
        """Whether the domain of ``g`` is bounded: then every block problem has a minimiser, even with ``lam = 0``."""
        return False

    @property
    def zero_argument(self) -> float | None:
        """A number ``v`` with ``prox_g(v) = 0``, or None if there is none (sigmoid)."""
        return 0.0

    @abc.abstractmethod
    def prox(self, a: Tensor, step: Step = 1.0) -> Tensor:
        """Returns ``argmin_x g(x) + |x - a|^2 / (2 step)``, differentiable in ``a``."""

    def prox_(self, a: Tensor, step: Step = 1.0) -> Tensor:
        """Returns :meth:`prox` and may overwrite ``a`` with it; only where no gradient is recorded."""
        return self.prox(a, step)

    @abc.abstractmethod
    def derivative(self, a: Tensor, step: Step = 1.0) -> Tensor:
        """Returns the derivative of ``prox(a, step)`` by ``a``, one number in [0, 1] per coordinate.

        At a kink it is the one that autograd takes. A prior that is not separable has a Jacobian matrix: it raises
        here and offers :meth:`vjp`.
        """

    @abc.abstractmethod
    def g(self, x: Tensor) -> Tensor:
        """Returns the terms ``g_i(x_i)`` whose sum is ``g(x)``, in the shape of ``x``; infinite outside the domain."""

    def vjp(self, a: Tensor, step: Step, grad: Tensor) -> Tensor:
        """Returns ``J^T grad`` with the (symmetric) Jacobian ``J`` of ``prox(., step)`` at ``a``."""
        return self.derivative(a, step) * grad

    def vjp_(self, a: Tensor, step: Step, grad: Tensor) -> Tensor:
        """Returns :meth:`vjp` and may overwrite ``grad`` with it; only where no gradient is recorded."""
        return self.vjp(a, step, grad)

    def argument(self, a: Tensor, step: Step = 1.0) -> Tensor:
        """Returns ``v`` with ``prox(v, 1) = prox(a, step)``: the input for an activation that stays outside.

        With ``x = prox_{t g}(a)``, ``(a - x)/t`` is a subgradient of ``g`` at ``x``; so ``x = prox_g(x + (a - x)/t)``.
        """
        if self.scale_free or is_unit(step):
            return a
        x = self.prox(a, step)
        return x + (a - x) / step_like(step, a)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


PRIORS: Registry[type[Prior]] = Registry(
    "prior", entry_point_group="solver_plugins.priors", check=subclasses_of(Prior, "solver_plugins.prox.Prior")
)
register_prior = PRIORS.register_class
"""Class decorator: registers a prior under its ``name``; the first line of its docstring is the description."""


def list_priors(filter: str | Iterable[str] | None = None) -> list[str]:
    """Returns the names of the priors; ``filter`` is a glob or a tag ("activation", "paper", "indicator")."""
    return PRIORS.names(filter)


def make_prior(name: str, **parameters: Any) -> Prior:
    """Builds a registered prior by its name and parameters (``gamma``, ``negative_slope``, ...)."""
    return PRIORS.make(name, parameters)
