"""The modified sequential averaging method (SAM), which chooses among several fixed points."""

from typing import Literal, final

import pydantic
from torch import Tensor

from solver_plugins.equilibrium.problem import EquilibriumProblem
from solver_plugins.equilibrium.solvers.solver import (
    EquilibriumConfig,
    EquilibriumSolver,
    EquilibriumState,
    register_equilibrium_solver,
)


class SamConfig(EquilibriumConfig):
    """Options of ``sam``."""

    gradient: Literal["unrolled"] = pydantic.Field(
        "unrolled", description="SAM ends near a fixed point, not at one: only its iterations have a gradient."
    )
    eta: float = pydantic.Field(0.5, gt=0, le=1, description="beta_k = eta / k^rho.")
    rho: float = pydantic.Field(0.5, gt=0, lt=1, description="beta_k = eta / k^rho; rho + 2 c < 1 (Theorem 4).")
    decay: float = pydantic.Field(0.5, gt=0, le=1, description="lambda_k = decay L_z / k^c.")
    c: float = pydantic.Field(0.2, gt=0, lt=0.5, description="lambda_k = decay L_z / k^c; rho + 2 c < 1 (Theorem 4).")

    @pydantic.model_validator(mode="after")
    def _check_rates(self) -> "SamConfig":
        if not self.rho + 2 * self.c < 1:
            raise ValueError(f"Theorem 4 needs rho + 2 c < 1; found {self.rho} + 2 * {self.c}")
        return self


@register_equilibrium_solver
@final
class Sam(EquilibriumSolver):
    """Modified SAM iteration: tends to the fixed point with the smallest regulariser (equation 10, Theorem 4).

        z_k = b_k S_k(z_{k-1}) + (1 - b_k) T(z_{k-1}),     S_k(z) = (1 - g l_k) z - g lam grad R(z)
        b_k = eta / k^rho,    l_k = decay L_z / k^c,    g = 1 / (2 L_z max(1, lam))

    Without a regulariser ``b_k = 0`` (the paper's "no Reg").
    """

    name = "sam"
    tags = ("paper", "regularized")
    Config = SamConfig
    chooses = True

    def step(
        self, problem: EquilibriumProblem, state: EquilibriumState, image: Tensor, iteration: int
    ) -> EquilibriumState:
        if problem.chosen is None:
            return EquilibriumState(image)
        regularizer, lam = problem.chosen.regularizer, problem.chosen.lam
        k, smoothness = iteration + 1, regularizer.smoothness
        beta = self.config.eta / k**self.config.rho
        shrink = self.config.decay * smoothness / k**self.config.c
        gamma = 1 / (2 * smoothness * max(1.0, lam))
        z = image.new_zeros(image.shape) if state.z is None else state.z
        moved = (1 - gamma * shrink) * z - gamma * lam * regularizer.gradient(z, problem.sample_dims)
        z = image.lerp(moved, beta)
        return EquilibriumState(z, z)
