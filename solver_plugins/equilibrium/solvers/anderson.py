"""Safeguarded Anderson acceleration of a nonexpansive map."""

from dataclasses import dataclass
from typing import Any, final

import pydantic
import torch
from torch import Tensor

from solver_plugins.equilibrium.problem import FixedPointProblem
from solver_plugins.equilibrium.solvers.base import (
    EquilibriumConfig,
    EquilibriumSolver,
    State,
    register_equilibrium_solver,
)


class AndersonConfig(EquilibriumConfig):
    """Options of ``anderson``."""

    window: int = pydantic.Field(5, ge=1, description="How many past differences are combined.")


@dataclass(frozen=True)
class HistoryState(State):
    """A :class:`State` with what Anderson's method remembers; everything is flattened per sample.

    Attributes:
        image: The last ``T(z)``.
        residual: The last ``T(z) - z``.
        history: Unit differences of residuals with those of the images.
        best: The image with the smallest residual so far.
        best_size: That residual's norm.
    """

    image: Tensor | None = None
    residual: Tensor | None = None
    history: "History | None" = None
    best: Tensor | None = None
    best_size: Tensor | None = None


@register_equilibrium_solver
@final
class Anderson(EquilibriumSolver):
    """Anderson acceleration with a safeguard; every sample for itself.

        f_k = T(z_k) - z_k
        z_{k+1} = T(z_k) - sum_j g_j (T(z_{j+1}) - T(z_j)),     g = argmin |f_k - sum_j g_j (f_{j+1} - f_j)|

    Differences are scaled to length one, so that late, small ones count as much as early ones. Where the residual did
    not fall below the best one so far, the next point is the plain step from the best point; a nonexpansive map then
    makes progress, so the method is never slower than half of the plain iteration.
    """

    name = "anderson"
    tags = ("accelerated",)
    Config = AndersonConfig

    def init(self) -> HistoryState:
        return HistoryState(None)

    def step(self, problem: FixedPointProblem, state: HistoryState, image: Tensor, iteration: int) -> HistoryState:
        shape = image.shape
        batch = shape[: image.ndim - len(problem.dims)].numel()
        g = image.reshape(batch, -1)
        f = g if state.z is None else g - state.z.reshape(batch, -1)
        size = torch.linalg.vector_norm(f.detach(), dim=1, keepdim=True)
        if state.image is None or state.residual is None or state.best is None or state.best_size is None:
            return HistoryState(image, image, g, f, None, g, size)
        history = state.history or History.like(g, self.config.window)
        df = f - state.residual
        scale = torch.linalg.vector_norm(df.detach(), dim=1, keepdim=True)
        # A difference that is rounding error alone, or none at all, becomes a zero row and takes no part.
        scale = torch.where(scale > 4 * torch.finfo(g.dtype).eps * size, scale, torch.inf).reciprocal()
        history = history.pushed(df * scale, (g - state.image) * scale)
        z = history.mixed(g, f)
        better = size < state.best_size
        if _can_look(g) and bool(better.all()):
            best, best_size = g, size
        else:
            best = torch.where(better, g, state.best)
            best_size = torch.where(better, size, state.best_size)
            z = torch.where(better, z, best)
        return HistoryState(z.reshape(shape), image, g, f, history, best, best_size)


class History:
    """The last differences of residuals ``F`` and images ``G``, and the Gram matrix of ``F``.

    Where nothing is recorded they stand in memory that is used again and again; otherwise each step makes a new one.
    """

    def __init__(self, window: int, rows: Any, images: Any, gram: Tensor, count: int):
        self.window, self.rows, self.images, self.gram, self.count = window, rows, images, gram, count

    @classmethod
    def like(cls, g: Tensor, window: int) -> "History":
        """Returns an empty history for samples like those in ``g``."""
        gram = g.new_zeros(len(g), window, window)
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return cls(window, (), (), gram, 0)
        space = g.new_empty(2, len(g), window, g.shape[1])
        return cls(window, space[0], space[1], gram, 0)

    def pushed(self, row: Tensor, image: Tensor) -> "History":
        """Returns the history with one more difference; the oldest one is dropped where it is full."""
        if isinstance(self.rows, tuple):
            rows, images = ((*old, new)[-self.window :] for old, new in ((self.rows, row), (self.images, image)))
            return History(self.window, rows, images, self.gram, self.count + 1)
        place = self.count % self.window
        self.rows[:, place] = row
        self.images[:, place] = image
        filled = min(self.count + 1, self.window)
        products = _dots(self.rows[:, :filled], row)
        self.gram[:, place, :filled] = products
        self.gram[:, :filled, place] = products
        return History(self.window, self.rows, self.images, self.gram, self.count + 1)

    def mixed(self, g: Tensor, f: Tensor) -> Tensor:
        """Returns ``g - G^T argmin_c |f - F^T c|``."""
        if isinstance(self.rows, tuple):
            rows, images = torch.stack(self.rows, 1), torch.stack(self.images, 1)
            gram = rows @ rows.mT
        else:
            filled = min(self.count, self.window)
            rows, images, gram = self.rows[:, :filled], self.images[:, :filled], self.gram[:, :filled, :filled]
        # Rows have length one: the ridge is relative, and only keeps rounding errors from being inverted.
        ridge = 30 * torch.finfo(g.dtype).eps
        eye = ridge * torch.eye(gram.shape[1], dtype=g.dtype, device=g.device)
        # solve_ex: checking for a singular matrix, which the ridge excludes, would stall a GPU.
        weights = torch.linalg.solve_ex(gram + eye, _dots(rows, f).unsqueeze(2)).result
        # A row times a matrix: ten times as fast, on a CPU, as the transposed matrix times a column.
        return g - (weights.mT @ images).squeeze(1)


def _dots(rows: Tensor, vector: Tensor) -> Tensor:
    """Returns the products of each sample's rows ``[batch, rows, n]`` with its vector ``[batch, n]``."""
    # Batched products of a matrix and a vector are five times slower on a CPU.
    return (rows * vector.unsqueeze(1)).sum(2)


def _can_look(tensor: Tensor) -> bool:
    """Whether a branch on values costs nothing: on the CPU, outside of a compiled graph."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()
