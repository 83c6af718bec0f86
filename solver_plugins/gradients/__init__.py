"""How gradients pass through a solve. Nothing here knows ``nn.Module``."""

from solver_plugins.gradients.attach import refuse_second_derivative, with_adjoint
from solver_plugins.gradients.conjugate import conjugate_gradients
from solver_plugins.gradients.differentiate import differentiable_solve
from solver_plugins.gradients.implicit import solve_implicit
from solver_plugins.gradients.unrolled import fresh_gram

__all__ = [
    "conjugate_gradients",
    "differentiable_solve",
    "fresh_gram",
    "refuse_second_derivative",
    "solve_implicit",
    "with_adjoint",
]
