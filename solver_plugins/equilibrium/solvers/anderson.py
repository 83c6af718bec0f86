"""Safeguarded Anderson acceleration of a nonexpansive map."""

from dataclasses import dataclass
from typing import Any, final

import pydantic
import torch
from torch import Tensor

from solver_plugins.equilibrium.problem import EquilibriumProblem, rows_of, states_of
from solver_plugins.equilibrium.solvers.solver import (
    EquilibriumConfig,
    EquilibriumSolver,
    EquilibriumState,
    register_equilibrium_solver,
)
from solver_plugins.operators import is_eager, solve_small


class EquilibriumAndersonConfig(EquilibriumConfig):
    """Options of ``anderson``."""

    window: int = pydantic.Field(5, ge=1, description="The number of past differences that are combined.")


@dataclass(frozen=True)
class MixingState(EquilibriumState):
    """The state of Anderson's method; all tensors have one row per sample.

    Attributes:
        image: The last ``T(z)``.
        residual: The last ``T(z) - z``.
        history: Differences of residuals, scaled to length one, and of images.
        best: The image with the smallest residual so far.
        best_size: The norm of that residual.
        rest: The residual of the last mixture; zero if the next point was not the mixture.
        relaxation: The last ``b_k``, one number per sample; None is one.
    """

    image: Tensor | None = None
    residual: Tensor | None = None
    history: "MixingHistory | None" = None
    best: Tensor | None = None
    best_size: Tensor | None = None
    rest: Tensor | None = None
    relaxation: Tensor | None = None


@register_equilibrium_solver
@final
class EquilibriumAnderson(EquilibriumSolver):
    """Anderson acceleration with a safeguard, separately for every sample.

        f_k = T(z_k) - z_k,     r_k = f_k - sum_j g_j (f_{j+1} - f_j),     g = argmin |r_k|
        z_{k+1} = T(z_k) - sum_j g_j (T(z_{j+1}) - T(z_j)) + (b_k - 1) r_k

    ``b_k = 1 / (1 - m_k)``, where ``m_k = <r, J r> / |r|^2`` is known from the last step. The Jacobian of a composition
    of proximal maps has its spectrum on one side of zero. So the part ``r_k`` that no past difference explains shrinks
    by ``J - m_k`` instead of ``J``, without a further evaluation.

    Differences are scaled to length one, so late, small ones count as much as early ones. If the residual did not fall
    below the best one so far, the next point is the plain step from the best point, which makes progress for a
    nonexpansive map. So the method takes at most twice as many evaluations as the plain iteration.
    """

    name = "anderson"
    tags = ("accelerated",)
    Config = EquilibriumAndersonConfig

    def init(self) -> MixingState:
        return MixingState(None)

    def step(self, problem: EquilibriumProblem, state: MixingState, image: Tensor, iteration: int) -> MixingState:
        g = rows_of(problem, image)
        if state.moved is None or state.distance is None:
            f = g if state.z is None else g - rows_of(problem, state.z)
            size = torch.linalg.vector_norm(f.detach(), dim=1, keepdim=True)
        else:
            f, size = state.moved, state.distance.unsqueeze(1)
        if state.image is None or state.residual is None or state.best is None or state.best_size is None:
            return MixingState(image, image, g, f, None, g, size, f)
        history = state.history or MixingHistory.like(g, self.config.window)
        df = f - state.residual
        scale = torch.linalg.vector_norm(df.detach(), dim=1, keepdim=True)
        # A difference of rounding errors, or of zero, becomes a zero row and has no effect.
        scale = torch.where(scale > 4 * torch.finfo(g.dtype).eps * size, scale, torch.inf).reciprocal()
        history = history.pushed(df, g - state.image, scale)
        z, rest = history.mixed(g, f)
        relaxation = _relaxation(state, f)
        z = torch.addcmul(z, rest, relaxation - 1)
        better = size < state.best_size
        if is_eager(g.device) and bool(better.all()):
            best, best_size = g, size
        else:
            best = torch.where(better, g, state.best)
            best_size = torch.where(better, size, state.best_size)
            z, rest = torch.where(better, z, best), torch.where(better, rest, 0.0)
        return MixingState(states_of(problem, z, image.shape), image, g, f, history, best, best_size, rest, relaxation)


def _relaxation(state: MixingState, f: Tensor) -> Tensor:
    """Returns ``b_k``, shape ``[batch, 1]``."""
    rest, old = state.rest, state.relaxation
    assert rest is not None
    size = rest.square().sum(1, keepdim=True)
    quotient = (f * rest).sum(1, keepdim=True) / torch.where(size > 0, size, 1.0)
    # The mixture left f = (1 - b) r + b J r, up to terms of second order.
    mean = quotient if old is None else 1 + (quotient - 1) / old
    # Up to 1/2 no part of r grows, because no eigenvalue exceeds 1.
    return 1 / (1 - torch.where(size > 0, mean, 0.0).clamp(0.0, 0.5))


class MixingHistory:
    """The last differences of residuals ``F`` and images ``G``, and the Gram matrix of ``F``.

    Without gradients they are written into the same memory at every step; otherwise each step makes new tensors.
    """

    def __init__(self, window: int, rows: Any, images: Any, gram: Tensor, count: int):
        self.window, self.rows, self.images, self.gram, self.count = window, rows, images, gram, count

    @classmethod
    def like(cls, g: Tensor, window: int) -> "MixingHistory":
        """Returns an empty history for samples like those in ``g``."""
        gram = g.new_zeros(g.shape[0], window, window)
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return cls(window, (), (), gram, 0)
        space = g.new_empty(2, g.shape[0], window, g.shape[1])
        return cls(window, space[0], space[1], gram, 0)

    def pushed(self, row: Tensor, image: Tensor, scale: Tensor) -> "MixingHistory":
        """Returns the history with one more scaled difference; if it is full, the oldest one is dropped."""
        if isinstance(self.rows, tuple):
            row, image = row * scale, image * scale
            rows, images = ((*old, new)[-self.window :] for old, new in ((self.rows, row), (self.images, image)))
            return MixingHistory(self.window, rows, images, self.gram, self.count + 1)
        place = self.count % self.window
        torch.mul(row, scale, out=self.rows[:, place])
        torch.mul(image, scale, out=self.images[:, place])
        filled = min(self.count + 1, self.window)
        products = _dots(self.rows[:, :filled], self.rows[:, place])
        self.gram[:, place, :filled] = products
        self.gram[:, :filled, place] = products
        return MixingHistory(self.window, self.rows, self.images, self.gram, self.count + 1)

    def mixed(self, g: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        """Returns ``g - G^T c`` and ``f - F^T c``, ``c = argmin_c |f - F^T c|``."""
        if isinstance(self.rows, tuple):
            rows, images = torch.stack(self.rows, 1), torch.stack(self.images, 1)
            gram = rows @ rows.mT
        else:
            filled = min(self.count, self.window)
            rows, images, gram = self.rows[:, :filled], self.images[:, :filled], self.gram[:, :filled, :filled]
        # Rows have length one, so the ridge is relative; it only keeps rounding errors from being inverted.
        ridge = 30 * torch.finfo(g.dtype).eps
        eye = ridge * torch.eye(gram.shape[1], dtype=g.dtype, device=g.device)
        # On a CPU, a row times a matrix is ten times as fast as the transposed matrix times a column.
        weights = solve_small(gram + eye, _dots(rows, f)).unsqueeze(1)
        return g - (weights @ images).squeeze(1), f - (weights @ rows).squeeze(1)


def _dots(rows: Tensor, vector: Tensor) -> Tensor:
    """Returns the products of each sample's rows ``[batch, rows, n]`` with its vector ``[batch, n]``."""
    # Batched products of a matrix and a vector are five times slower on a CPU.
    return (rows * vector.unsqueeze(1)).sum(2)
