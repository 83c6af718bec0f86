"""Safeguarded Anderson acceleration of the proximal-gradient map."""

import itertools
from dataclasses import dataclass

import pydantic
import torch
from torch import Tensor

from solver_plugins.registry import register_solver
from solver_plugins.solve.base import DeterministicConfig, Draws, Solver, State
from solver_plugins.solve.problem import BlockProblem


class AndersonConfig(DeterministicConfig):
    """Options of ``anderson``."""

    window: int = pydantic.Field(5, ge=1, description="How many past steps are combined; more than 5 rarely helps.")
    ridge: float = pydantic.Field(
        1e-5,
        gt=0,
        description="Relative ridge on the small least-squares problem; smaller ones fill gradients with rounding.",
    )


@dataclass(frozen=True)
class HistoryState(State):
    """A :class:`State` with what Anderson's method remembers.

    Attributes:
        images: ``T(x_j)`` of the last steps, flattened per sample.
        residuals: ``prox(T(x_j)) - x_j`` of the last steps, flattened per sample.
        best_image: ``T(x)`` of the ``x`` with the smallest residual so far.
        best_size: That residual's squared norm.
    """

    images: tuple[Tensor, ...]
    residuals: tuple[Tensor, ...]
    best_image: Tensor
    best_size: Tensor


@register_solver
class Anderson(Solver):
    """Anderson acceleration of the map whose fixed point is the minimiser, with a safeguard.

        T(x) = x - t grad F(x),     f_j = prox_{t g}(T(x_j)) - x_j,     x_0 = 0
        v_{k+1} = T(x_k) - sum_j gamma_j (T(x_{j+1}) - T(x_j)),     gamma = argmin |f_k - sum_j gamma_j (f_{j+1} - f_j)|
        x_{k+1} = prox_{t g}(v_{k+1})

    Residuals are those of the iterates, not of the arguments of the proximal map: of a feature that it sets to zero the
    argument says nothing. The map ``prox(T(x))`` is nonexpansive. Where the residual did not fall below the best one so
    far, the next point is the plain step from the best point instead, so the method is never slower than half of
    ``proxgd``. Every sample decides for itself.
    """

    name = "anderson"
    tags = ("deterministic", "accelerated")
    Config = AndersonConfig
    samples = "nothing"
    stays_at_step = True

    def init(self, problem: BlockProblem) -> None:
        return None

    def step(
        self, problem: BlockProblem, state: HistoryState | None, iteration: int, draws: Draws | None
    ) -> HistoryState:
        step, flat_dims = problem.step, -len(problem.operator.problem_dims)
        x = None if state is None else self.value(problem, state)
        image = problem.first(step) if x is None else problem.descend(x, problem.gradient(x), step)
        flat_image = image.flatten(flat_dims)
        moved = self.value(problem, State(image, step))
        # Under autocast an activation with parameters returns a half.
        residual = (moved if x is None else moved - x).to(image.dtype).flatten(flat_dims)
        size = residual.detach().square().sum(-1, keepdim=True)
        if state is None:
            return HistoryState(image, step, (flat_image,), (residual,), flat_image, size)
        images = (*state.images, flat_image)[-self.config.window - 1 :]
        residuals = (*state.residuals, residual)[-self.config.window - 1 :]
        better = size < state.best_size
        best_image = torch.where(better, flat_image, state.best_image)
        mixed = self._mix(images, residuals, problem.rounding)
        # Shaped before the choice: a block that returned a view would lose FSDP2's hook to an in-place activation.
        chooses = better.reshape(*better.shape[:-1], *(1,) * -flat_dims)
        v = torch.where(chooses, mixed.reshape(image.shape), best_image.reshape(image.shape))
        best_size = torch.where(better, size, state.best_size)
        return HistoryState(v, step, images, residuals, best_image, best_size)

    def _mix(self, images: tuple[Tensor, ...], residuals: tuple[Tensor, ...], rounding: float) -> Tensor:
        # The small solve keeps the working precision: autocast would run its products in half.
        with torch.autocast(images[-1].device.type, enabled=False):
            df = torch.stack([b - a for a, b in itertools.pairwise(residuals)], -2)
            dt = torch.stack([b - a for a, b in itertools.pairwise(images)], -2)
            normal = df @ df.mT
            size = normal.diagonal(dim1=-2, dim2=-1)
            # Differences below the rounding error of T carry no information; in half precision that is most of them.
            noise = rounding**2 * images[-1].detach().square().sum(-1, keepdim=True)
            # Residuals of one active feature are all parallel: what excludes a singular matrix must be seen beside the
            # rounding error of each difference, the last of which are the smallest. Beside that of the largest, too:
            # gradients would be full of it.
            precision = torch.finfo(normal.dtype)
            share = max(self.config.ridge, 64 * precision.eps)
            ridge = share * (size + size.sum(-1, keepdim=True)) + noise + precision.tiny
            right = df @ residuals[-1].unsqueeze(-1)
            # solve_ex: checking for a singular matrix, which the ridge excludes, would stall a GPU.
            gamma = torch.linalg.solve_ex(normal + ridge.diag_embed(), right).result
            return images[-1] - (gamma.mT @ dt).squeeze(-2)
