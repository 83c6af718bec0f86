"""Proximal stochastic gradient with tau-nice or importance sampling (Prox-SG, Prop. 1)."""

from functools import partial
from typing import Literal

import pydantic
import torch
from torch import Tensor

from solver_plugins.operators import LinearOperator, importance_mask, importance_weights, inclusion_probabilities
from solver_plugins.registry import register_solver
from solver_plugins.solve.base import Draws, RateConfig, SamplingSolver, State
from solver_plugins.solve.problem import BlockProblem
from solver_plugins.solve.recursion import Samples
from solver_plugins.solve.steps import StepRule, full_smoothness, sampled_smoothness

UNIFORM_SHARE = 0.5
"""Share of uniform sampling in ``sampling="gradient"``: bounds every weight by ``2 n1/tau``, however small a gradient
is."""


class ProxSGConfig(RateConfig):
    """Options of ``proxsg``."""

    step: StepRule = pydantic.Field("exp", description="Step-size rule; the paper decays exponentially.")
    sampling: Literal["uniform", "lipschitz", "gradient"] = pydantic.Field(
        "uniform",
        description="'uniform' is tau-nice; 'lipschitz' draws feature i with a probability proportional to |a_i|^2, "
        "'gradient' to |grad f_i(x)|.",
    )
    path: Literal["auto", "loop", "masked", "columns"] = pydantic.Field(  # type: ignore[assignment]
        "auto",
        description="How a sampled gradient is computed; 'auto' counts multiply-adds. 'columns' gathers the sampled "
        "columns and needs per_sample=False; 'loop': masks, plain autograd.",
    )
    memory: Literal["full", "low"] = pydantic.Field(
        "full", description="'low' keeps no iterates for the backward pass and computes them again there."
    )

    @pydantic.model_validator(mode="after")
    def _path_fits_the_sampling(self) -> "ProxSGConfig":
        if self.path == "columns" and (self.per_sample or self.sampling != "uniform"):
            raise ValueError(
                "option path='columns' needs one uniform sample for the whole batch; found "
                f"per_sample={self.per_sample}, sampling={self.sampling!r}. Use per_sample=False, sampling='uniform'."
            )
        if self.memory == "low" and (self.path == "loop" or self.sampling != "uniform"):
            raise ValueError(
                "option 'memory' only acts with sampling='uniform' and a path other than 'loop'; found "
                f"sampling={self.sampling!r}, path={self.path!r}."
            )
        return self


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
            return full_smoothness(lipschitz, self.lam(lipschitz))
        norms = operator.column_norms_sq()
        probabilities = None
        if self.config.sampling == "lipschitz":
            probabilities = inclusion_probabilities(norms, tau)
        elif self.config.sampling == "gradient":
            # Only the uniform share is known in advance.
            probabilities = torch.full_like(norms, UNIFORM_SHARE * tau / norms.numel())
        return sampled_smoothness(lipschitz, self.lam(lipschitz), norms, tau, probabilities)

    recursion = SamplingSolver.recursion

    def draw(self, problem: BlockProblem, draws: Draws, *, indices: bool) -> Samples:
        iterations = self.config.iters
        if self.config.sampling == "uniform":
            return super().draw(problem, draws, indices=indices)
        tau, norms = self.tau(problem.operator.in_features), self._norms(problem)
        if self.config.sampling == "gradient":
            return Samples(chooser=partial(self._chosen, problem, tau, norms, draws))
        probabilities = self._probabilities(problem, problem.input, tau, norms)
        return Samples(torch.stack([self._weights(problem, probabilities, tau, draws) for _ in range(iterations)]))

    def _chosen(self, problem: BlockProblem, tau: int, norms: Tensor, draws: Draws, residual: Tensor) -> Tensor:
        probabilities = self._probabilities(problem, residual, tau, norms)
        return self._weights(problem, probabilities, tau, draws)

    def init(self, problem: BlockProblem) -> None:
        return None

    def step(self, problem: BlockProblem, state: State | None, iteration: int, draws: Draws | None) -> State:
        x, step = None if state is None else self.value(problem, state), self.step_at(problem, iteration)
        tau = self.tau(problem.operator.in_features)
        if draws is None or not self.thins(problem.operator):
            return State(problem.descend(x, problem.gradient(x), step), step)
        probabilities = None
        if self.config.sampling != "uniform":
            with torch.no_grad():
                residual = problem.input.to(problem.dtype)
                residual = residual if x is None else problem.scaled(problem.operator.adjoint(x)) - residual
            probabilities = self._probabilities(problem, residual, tau, self._norms(problem))
        gradient = problem.sampled_gradient(x, self._weights(problem, probabilities, tau, draws))
        return State(problem.descend(x, gradient, step), step)

    @torch.no_grad()
    def _norms(self, problem: BlockProblem) -> Tensor:
        """Returns ``|a_i|^2``."""
        return problem.operator.column_norms_sq().to(problem.dtype)

    def _weights(self, problem: BlockProblem, probabilities: Tensor | None, tau: int, draws: Draws) -> Tensor:
        """Draws a sample and returns its weights, of mean one, shaped like the input's features."""
        operator, u = problem.operator, problem.input
        if probabilities is None:
            return self.masks(problem, draws, 1)[0].to(u.dtype) * (operator.in_features / tau)
        mask = importance_mask(probabilities, generator=draws.generator)
        return operator.per_feature(importance_weights(mask, probabilities).to(u.dtype))

    @torch.no_grad()
    def _probabilities(self, problem: BlockProblem, residual: Tensor, tau: int, norms: Tensor) -> Tensor:
        """Returns inclusion probabilities in the working precision, one row per draw, given ``s A^T x - u``."""
        operator, u = problem.operator, problem.input
        if self.config.sampling == "lipschitz":
            return inclusion_probabilities(norms, tau).expand(*self.batch_shape(u, operator), -1)
        # |grad f_i(x)| ~ |a_i| |a_i^T x - u_i|, half uniform.
        space = operator.problem_dims[1:]
        size = torch.linalg.vector_norm(residual, dim=space) if space else residual.abs()
        if not self.config.per_sample:
            size = torch.linalg.vector_norm(size.reshape(-1, size.shape[-1]), dim=0)
        guided = inclusion_probabilities(norms.sqrt() * size, tau)
        return (1 - UNIFORM_SHARE) * guided + UNIFORM_SHARE * tau / operator.in_features
