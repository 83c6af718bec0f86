"""The interface of a prior ``g``, seen through its proximal map.

    prox_{t g}(a) = argmin_x  g(x) + |x - a|^2 / (2 t)

At the unit step the proximal map *is* an activation: ``prior.prox(a, 1.0) == activation(a)``.
"""

import abc
from typing import ClassVar

import torch
from torch import Tensor

from solver_plugins.errors import OptionError

Step = float | Tensor
"""A step size: a Python number, or a 0-d tensor where it comes from a Lipschitz constant on the device."""


def is_unit(step: Step) -> bool:
    """Whether the step is the Python number one. A tensor never is: looking would stall a GPU and break a graph."""
    return not isinstance(step, Tensor) and step == 1


def step_like(step: Step, a: Tensor) -> Step:
    """Returns the step in the dtype of ``a``, so that a 0-d float64 step does not promote a 0-d float32 ``a``.

    Raises:
        OptionError: If the step is a number that is not positive. A tensor is not looked at, as in :func:`is_unit`.
    """
    if isinstance(step, Tensor):
        return step.to(a.dtype)
    if not step > 0:
        raise OptionError(f"A proximal step must be positive; found {step!r}.")
    return float(step)


def widened(a: Tensor) -> Tensor:
    """Returns ``a`` in float32 if its dtype is a half precision one, whose mantissa cannot carry a Newton step."""
    return a.float() if a.dtype in (torch.bfloat16, torch.float16) else a


class Prior(abc.ABC):
    """A convex function ``g`` with a known proximal map.

    Flags are read on an *instance*: for some priors they depend on the parameters (a box may or may not contain 0).

    Attributes:
        name: The registered name.
        tags: Words to filter the registry by.
        separable: ``g(x) = sum_i g_i(x_i)``: the proximal map acts on each coordinate alone.
        scale_free: ``t g = g`` (an indicator function): the proximal map does not depend on the step.
        unit_step_only: Only ``prox_g`` is known, not ``prox_{t g}`` for other ``t``.
        learnable: ``g`` has parameters that are trained. Their gradients flow through :meth:`prox` (by autograd), not
            through :meth:`derivative` and :meth:`vjp`, which know ``a`` only.
        opaque: ``g`` is made of functions of the user's, which may hold such parameters, too.
        slope_from_value: ``derivative(prox(a, t), t) == derivative(a, t)``, so that whoever keeps the value of the
            proximal map for a backward pass need not keep its argument, nor the derivative.
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
        """A number ``v`` with ``prox_g(v) = 0``, or None where there is none (sigmoid)."""
        return 0.0

    @abc.abstractmethod
    def prox(self, a: Tensor, step: Step = 1.0) -> Tensor:
        """Returns ``argmin_x g(x) + |x - a|^2 / (2 step)``, differentiable in ``a``."""

    def prox_(self, a: Tensor, step: Step = 1.0) -> Tensor:
        """Returns :meth:`prox`, and may overwrite ``a`` with it; not for use where gradients are recorded."""
        return self.prox(a, step)

    @abc.abstractmethod
    def derivative(self, a: Tensor, step: Step = 1.0) -> Tensor:
        """Returns the derivative of ``prox(a, step)`` by ``a``, one number in [0, 1] per coordinate.

        At a kink it is the one that autograd takes. A prior that is not separable has a matrix instead: it raises here
        and offers :meth:`vjp`.
        """

    @abc.abstractmethod
    def g(self, x: Tensor) -> Tensor:
        """Returns the terms ``g_i(x_i)`` whose sum is ``g(x)``; infinite outside the domain. Same shape as ``x``."""

    def vjp(self, a: Tensor, step: Step, grad: Tensor) -> Tensor:
        """Returns ``J^T grad`` with the Jacobian ``J`` of ``prox(., step)`` at ``a``. ``J`` is symmetric."""
        return self.derivative(a, step) * grad

    def vjp_(self, a: Tensor, step: Step, grad: Tensor) -> Tensor:
        """Returns :meth:`vjp`, and may overwrite ``grad`` with it; not for use where gradients are recorded."""
        return self.vjp(a, step, grad)

    def argument(self, a: Tensor, step: Step = 1.0) -> Tensor:
        """Returns ``v`` with ``prox(v, 1) = prox(a, step)``: what to hand to an activation that stays outside.

        With ``x = prox_{t g}(a)``, ``(a - x)/t`` is a subgradient of ``g`` at ``x``; so ``x = prox_g(x + (a - x)/t)``.
        """
        if self.scale_free or is_unit(step):
            return a
        x = self.prox(a, step)
        return x + (a - x) / step_like(step, a)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def infinite_where(condition: Tensor, values: Tensor) -> Tensor:
    """Returns ``values`` with infinity where ``condition`` holds: the indicator function of the complement."""
    return torch.where(condition, torch.full_like(values, torch.inf), values)
