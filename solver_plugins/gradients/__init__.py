"""How gradients pass through a solve. Nothing here knows ``nn.Module``."""

from solver_plugins.gradients.differentiate import differentiable_solve
from solver_plugins.gradients.implicit import solve_implicit

__all__ = ["differentiable_solve", "solve_implicit"]
