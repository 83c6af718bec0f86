"""The function ``h`` that the equilibrium of one layer minimises (Theorem 1).

With ``psi(z) = 1^T S(W z + c)``, ``S' = s``, a unit layer is ``grad psi = prox_phi`` for the convex ``phi = psi* -
|.|^2/2``. The functions here take units (:meth:`DeepOptEq.problem`) and are differentiable in ``z``.
"""

from torch import Tensor

from solver_plugins.equilibrium.activations import antiderivative
from solver_plugins.equilibrium.problem import Unit


def potential(unit: Unit, z: Tensor) -> Tensor:
    """Returns ``psi(z) = 1^T S(W z + c)`` per sample; its gradient is the unit layer."""
    return antiderivative(unit.prior, unit.argument(z)).sum(unit.operator.problem_dims)


def objective(unit: Unit, z: Tensor) -> Tensor:
    """Returns ``h(z) = |z|^2/2 - 1^T S(W z + c)`` per sample, convex for ``|W| <= 1``.

    ``grad h(z) = z - W^T s(W z + c)``: its minimiser is the equilibrium of one layer, for any ``alpha``.
    """
    return z.square().sum(unit.operator.problem_dims) / 2 - potential(unit, z)
