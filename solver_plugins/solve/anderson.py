"""Safeguarded Anderson acceleration of the proximal-gradient map."""

from dataclasses import dataclass, replace
from typing import Literal

import pydantic
import torch
from torch import Tensor

from solver_plugins.operators import autocast_off, is_eager, solve_small
from solver_plugins.registry import register_solver
from solver_plugins.solve.base import ACCELERATED_LAM, DeterministicConfig, Draws, Solver, State
from solver_plugins.solve.problem import BlockProblem


class AndersonConfig(DeterministicConfig):
    """Options of ``anderson``."""

    lam: float | None = ACCELERATED_LAM
    window: int = pydantic.Field(5, ge=1, description="How many past steps are combined; more than 5 rarely helps.")
    ridge: float = pydantic.Field(
        1e-4,
        gt=0,
        description="Relative ridge on the small least-squares problem; smaller ones fill gradients with rounding.",
    )
    weights: Literal["constant", "differentiated"] = pydantic.Field(
        "constant",
        description="What the weights of a mixture are for the backward pass. Their own derivative can be a hundred "
        "times the rest of the gradient.",
    )


@dataclass(frozen=True)
class HistoryState(State):
    """A :class:`State` with what Anderson's method remembers.

    Attributes:
        image: ``T(x_k)``, flattened per sample.
        residual: ``f_k``, flattened per sample.
        image_moves: ``T(x_{j+1}) - T(x_j)`` of the last steps.
        moves: ``f_{j+1} - f_j`` of the last steps.
        normal: The inner products of the moves, one matrix per sample; None before the first.
        best_image: ``T(x)`` of the ``x`` with the smallest residual so far.
        best_size: That residual's squared norm.
    """

    image: Tensor
    residual: Tensor
    image_moves: tuple[Tensor, ...]
    moves: tuple[Tensor, ...]
    normal: Tensor | None
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
    ``proxgd``. The last step is always the plain one from the best point: nothing would look at the residual of a last
    mixture, which can raise the objective, and a plain step cannot. Every sample decides for itself.

    Gradients take the weights ``gamma`` as constants. The small problem is nearly singular whenever the method
    converges, so its derivative is large and says little about the minimiser: with ten iterations on trained layers the
    exact gradient points away from the minimiser's by 74 to 82 degrees, with constant weights by 55 to 69, and
    ``proxgd``'s by 60 to 72.

    With ``lam=1e-3`` ten iterations are as exact as some fifty of ``proxgd`` (ten of ``fista``: as thirty). Along small
    singular directions that is a larger output with larger gradients, and training diverges at learning rates at which
    ten iterations of ``proxgd`` train and fifty diverge. Therefore ``lam`` grows with ``1/iters`` by default.
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
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.config.weights == "differentiated"):
            moved = self.value(problem, State(problem.gated(image), step))
            # Under autocast an activation with parameters returns a half.
            residual = (moved if x is None else moved - x).to(image.dtype).flatten(flat_dims)
        size = residual.detach().square().sum(-1, keepdim=True)
        if state is None:
            return HistoryState(image, step, flat_image, residual, (), (), None, flat_image, size)
        better = size < state.best_size
        if iteration + 1 == self.config.iters:
            v = torch.where(_spread(better, flat_dims), image, state.best_image.reshape(image.shape))
            return replace(state, v=v, step=step)
        # Every difference is taken once, and so is every inner product: a window of them would be taken again.
        image_moves = (*state.image_moves, flat_image - state.image)[-self.config.window :]
        moves = (*state.moves, residual - state.residual)[-self.config.window :]
        with autocast_off(image.device):
            # The small solve keeps the working precision: autocast would run its products in half.
            df = torch.stack(moves, -2)
            normal = _bordered(state.normal, (df * moves[-1].unsqueeze(-2)).sum(-1))
            gamma = self._weights(normal, (df * residual.unsqueeze(-2)).sum(-1), flat_image, problem.rounding)
            mixed = flat_image - (gamma.unsqueeze(-1) * torch.stack(image_moves, -2)).sum(-2)
        # Shaped before the choice: a block that returned a view would lose FSDP2's hook to an in-place activation.
        v = mixed.reshape(image.shape)
        if is_eager(image.device) and bool(better.all()):
            # Not a view: an activation behind the block may work in place.
            return HistoryState(v.clone(), step, flat_image, residual, image_moves, moves, normal, flat_image, size)
        best_image, best_size = (
            torch.where(better, new, old) for new, old in ((flat_image, state.best_image), (size, state.best_size))
        )
        v = torch.where(_spread(better, flat_dims), v, best_image.reshape(image.shape))
        return HistoryState(v, step, flat_image, residual, image_moves, moves, normal, best_image, best_size)

    def _weights(self, normal: Tensor, right: Tensor, image: Tensor, rounding: float) -> Tensor:
        """Returns ``gamma``: the solution of the small least-squares problem of each sample."""
        size = normal.diagonal(dim1=-2, dim2=-1)
        # Differences below the rounding error of T carry no information; in half precision that is most of them.
        noise = rounding**2 * image.detach().square().sum(-1, keepdim=True)
        # Residuals of one active feature are all parallel: what excludes a singular matrix must be seen beside the
        # rounding error of each difference, the last of which are the smallest. Beside that of the largest, too:
        # gradients would be full of it.
        precision = torch.finfo(normal.dtype)
        share = max(self.config.ridge, 64 * precision.eps)
        ridge = share * (size + size.sum(-1, keepdim=True)) + noise + precision.tiny
        return solve_small(normal + ridge.diag_embed(), right)


def _spread(per_sample: Tensor, dims: int) -> Tensor:
    """Returns one number per sample, shape ``(..., 1)``, with ``-dims`` dimensions of one at the end."""
    return per_sample.reshape(*per_sample.shape[:-1], *(1,) * -dims)


def _bordered(normal: Tensor | None, row: Tensor) -> Tensor:
    """Returns a symmetric matrix with a row more at its end, and as many less at its start as that has no place for."""
    if normal is None:
        return row.unsqueeze(-1)
    count = row.shape[-1] - 1
    kept = normal[..., normal.shape[-1] - count :, normal.shape[-1] - count :]
    above = torch.cat([kept, row[..., :-1].unsqueeze(-1)], -1)
    return torch.cat([above, row.unsqueeze(-2)], -2)
