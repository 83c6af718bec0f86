"""Proximal stochastic gradient with tau-nice or importance sampling (Prox-SG, Prop. 1)."""

from typing import Literal

import pydantic
import torch
from torch import Tensor

from solver_plugins.operators import LinearOperator, importance_mask, importance_weights, inclusion_probabilities
from solver_plugins.registry import register_solver
from solver_plugins.solvers.base import Draws, SamplingConfig, SamplingSolver, State
from solver_plugins.solvers.problem import BlockProblem
from solver_plugins.solvers.steps import StepRule, full_smoothness, sampled_smoothness

UNIFORM_SHARE = 0.5
"""Share of uniform sampling in ``sampling="gradient"``: bounds every weight by ``2 n1/tau``, however small a gradient
is."""


class ProxSGConfig(SamplingConfig):
    """Options of ``proxsg``."""

    step: StepRule = pydantic.Field("exp", description="Step-size rule; the paper decays exponentially.")
    sampling: Literal["uniform", "lipschitz", "gradient"] = pydantic.Field(
        "uniform",
        description="'uniform' is tau-nice; 'lipschitz' draws feature i with a probability proportional to |a_i|^2, "
        "'gradient' to |grad f_i(x)|.",
    )


@register_solver
class ProxSG(SamplingSolver):
    """Proximal stochastic gradient: one iteration is exact-count dropout -> linear -> activation.

        x_{k+1} = prox_{t_k g}(x_k - t_k (A (w * (A^T x_k - u)) - b + lam x_k)),     E[w] = 1

    with a fresh sample in each iteration (eq. 7). The weights are ``n1/tau`` on a uniform sample, the inverse inclusion
    probabilities on an importance sample (section 5); probabilities are constants for the backward pass.
    """

    name = "proxsg"
    tags = ("sampling",)
    Config = ProxSGConfig
    samples = "inputs"

    def smoothness(self, operator: LinearOperator, lipschitz: Tensor) -> Tensor:
        tau = self.tau(operator.in_features)
        if self.config.step != "expected_smoothness" or tau == operator.in_features:
            return full_smoothness(lipschitz, self.config.lam)
        norms = operator.column_norms_sq()
        probabilities = None
        if self.config.sampling == "lipschitz":
            probabilities = inclusion_probabilities(norms, tau)
        elif self.config.sampling == "gradient":
            # Only the uniform share is known in advance.
            probabilities = torch.full_like(norms, UNIFORM_SHARE * tau / norms.numel())
        return sampled_smoothness(lipschitz, self.config.lam, norms, tau, probabilities)

    def init(self, problem: BlockProblem) -> None:
        return None

    def step(self, problem: BlockProblem, state: State | None, iteration: int, draws: Draws | None) -> State:
        x = None if state is None else self.value(problem, state)
        step = self.step_at(problem, iteration)
        features = problem.operator.in_features
        tau = self.tau(features)
        if draws is None or tau == features:
            gradient = problem.gradient(x)
        else:
            gradient = problem.sampled_gradient(x, self._weights(problem, x, tau, draws))
        return State(problem.descend(x, gradient, step), step)

    def _weights(self, problem: BlockProblem, x: Tensor | None, tau: int, draws: Draws) -> Tensor:
        operator, u = problem.operator, problem.input
        if self.config.sampling == "uniform":
            return self.uniform_mask(u, operator.in_features, tau, operator, draws) * (operator.in_features / tau)
        with torch.no_grad():
            if self.config.sampling == "lipschitz":
                probabilities = inclusion_probabilities(operator.column_norms_sq().to(u.dtype), tau)
                probabilities = probabilities.expand(*self.batch_shape(u, operator), -1)
            else:
                probabilities = self._gradient_probabilities(problem, x, tau)
            mask = importance_mask(probabilities, generator=draws.generator)
            weights = importance_weights(mask, probabilities)
        return operator.per_feature(weights)

    def _gradient_probabilities(self, problem: BlockProblem, x: Tensor | None, tau: int) -> Tensor:
        """Returns inclusion probabilities that follow ``|grad f_i(x)| ~ |a_i| |a_i^T x - u_i|``, half uniform."""
        operator, u = problem.operator, problem.input
        residual = u if x is None else problem.scaled(operator.adjoint(x)) - u
        space = operator.problem_dims[1:]
        size = residual.square().sum(space).sqrt() if space else residual.abs()
        if not self.config.per_sample:
            size = size.reshape(-1, size.shape[-1]).square().sum(0).sqrt()
        scores = operator.column_norms_sq().sqrt().to(size.dtype) * size
        guided = inclusion_probabilities(scores, tau)
        probabilities = (1 - UNIFORM_SHARE) * guided + UNIFORM_SHARE * tau / operator.in_features
        return probabilities.to(u.dtype)
