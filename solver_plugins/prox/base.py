"""The interface of a prior ``g``, seen through its proximal map.

    prox_{t g}(a) = argmin_x  g(x) + |x - a|^2 / (2 t)

At the unit step the proximal map *is* an activation: ``prior.prox(a, 1.0) == activation(a)``.
"""

import abc
from typing import ClassVar

import torch
from torch import Tensor

Step = float | Tensor
"""A step size: a Python number, or a 0-d tensor where it comes from a Lipschitz constant on the device."""


def is_unit(step: Step) -> bool:
    """Whether the step is the Python number one. A tensor never is: looking would stall a GPU and break a graph."""
    return not isinstance(step, Tensor) and step == 1


class Prior(abc.ABC):
    """A convex function ``g`` with a known proximal map.

    Attributes:
        separable: ``g(x) = sum_i g_i(x_i)``: the proximal map acts on each coordinate alone.
        scale_free: ``t g = g`` (an indicator function): the proximal map does not depend on the step.
        unit_step_only: Only ``prox_g`` is known, not ``prox_{t g}`` for other ``t``.
        bounded: The domain of ``g`` is bounded, so every block problem has a minimiser, even with ``lam = 0``.
        zero_argument: A number ``v`` with ``prox_g(v) = 0``, or None where there is none (sigmoid).
    """

    name: ClassVar[str]
    separable: ClassVar[bool] = True
    scale_free: ClassVar[bool] = False
    unit_step_only: ClassVar[bool] = False
    bounded: ClassVar[bool] = False
    zero_argument: ClassVar[float | None] = 0.0

    @abc.abstractmethod
    def prox(self, a: Tensor, step: Step = 1.0) -> Tensor:
        """Returns ``argmin_x g(x) + |x - a|^2 / (2 step)``, differentiable in ``a``."""

    @abc.abstractmethod
    def derivative(self, a: Tensor, step: Step = 1.0) -> Tensor:
        """Returns the derivative of ``prox(a, step)`` by ``a``, one number in [0, 1] per coordinate.

        A prior that is not separable has a matrix instead: it raises here and offers :meth:`vjp`.
        """

    @abc.abstractmethod
    def g(self, x: Tensor) -> Tensor:
        """Returns the terms ``g_i(x_i)`` whose sum is ``g(x)``; infinite outside the domain. Same shape as ``x``."""

    def vjp(self, a: Tensor, step: Step, grad: Tensor) -> Tensor:
        """Returns ``J^T grad`` with the Jacobian ``J`` of ``prox(., step)`` at ``a``. ``J`` is symmetric."""
        return self.derivative(a, step) * grad

    def argument(self, a: Tensor, step: Step = 1.0) -> Tensor:
        """Returns ``v`` with ``prox(v, 1) = prox(a, step)``: what to hand to an activation that stays outside.

        With ``x = prox_{t g}(a)``, ``(a - x)/t`` is a subgradient of ``g`` at ``x``, hence ``x = prox_g(x + (a - x)/t)``.
        """
        if self.scale_free or is_unit(step):
            return a
        x = self.prox(a, step)
        return x + (a - x) / step

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def infinite_where(condition: Tensor, values: Tensor) -> Tensor:
    """Returns ``values`` with infinity where ``condition`` holds: the indicator function of the complement."""
    return torch.where(condition, torch.full_like(values, torch.inf), values)
