"""The loops that run a solver: to a tolerance, or for a fixed number of iterations."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from solver_plugins.equilibrium.problem import EquilibriumProblem, Jacobian, may_look, rows_of
from solver_plugins.equilibrium.solvers.solver import EquilibriumSolver

_OPTIMISM = 10.0
"""The next evaluation is recorded if its expected residual is below this many tolerances; a wrong guess only costs
memory."""


@dataclass(frozen=True)
class Run:
    """How a solve went; numbers per sample have shape ``[batch]``.

    Attributes:
        value: The result: ``T`` of the last point (for SAM the last point).
        residual: ``|T(z) - z| / |T(z)|`` at the last point.
        first: ``|T(z) - z|`` at the first point.
        last: ``|T(z) - z|`` at the last point.
        iterations: Evaluations until the sample was done.
        evaluations: Evaluations of the map for the whole batch.
        jacobian: The Jacobian at the last point, if it was recorded.
    """

    value: Tensor
    residual: Tensor
    first: Tensor
    last: Tensor
    iterations: Tensor
    evaluations: int
    jacobian: Jacobian | None = None

    @property
    def contraction(self) -> Tensor:
        """The mean factor per iteration by which ``|T(z) - z|`` changed; NaN after a single evaluation."""
        ratio = self.last / self.first.clamp_min(torch.finfo(self.first.dtype).tiny)
        return ratio.pow(1 / (self.iterations - 1))


def unroll(solver: EquilibriumSolver, problem: EquilibriumProblem) -> Run:
    """Takes exactly ``iters`` iterations; autograd records them, and no value is read."""
    state = solver.init()
    first = None
    for iteration in range(solver.config.iters):
        z, image = state.z, problem.image(state.z)
        if first is None:
            _, first, _ = _sizes(problem, z, image)
        state = solver.step(problem, state, image, iteration)
    assert first is not None
    _, last, scale = _sizes(problem, z, image)
    iterations = torch.full_like(last, solver.config.iters)
    value = image if state.value is None else state.value
    return Run(value, _relative(last, scale), first, last, iterations, solver.config.iters)


def settle(
    solver: EquilibriumSolver,
    problem: EquilibriumProblem,
    *,
    start: Tensor | None = None,
    record: Literal["jacobian", "graph"] | None = None,
) -> Run:
    """Iterates until every sample is within ``tol``, at most ``iters`` times.

    A sample that is done stays where it is, so its result does not depend on how long the others take. With
    ``record`` the last evaluation also gives a Jacobian, and with ``"graph"`` it has a gradient. Which evaluation is
    the last is guessed from the rate of convergence; a right guess saves an evaluation.
    """
    config: Any = solver.config
    iters = config.iters
    looks = may_look()
    with torch.no_grad():
        state = dataclasses.replace(solver.init(), z=start)
    first = before = error = iterations = None
    jacobian: Jacobian | None = None
    evaluations, expected = 0, float("inf")
    for iteration in range(iters):
        # A NaN counts as not converged everywhere.
        final = iteration == iters - 1
        recorded = record if final or expected <= _OPTIMISM * config.tol else None
        image, jacobian = _evaluate(problem, state.z, recorded)
        evaluations += 1
        with torch.no_grad():
            moved, last, scale = _sizes(problem, state.z, image)
            error = _relative(last, scale)
            done = error <= config.tol
            if first is None or iterations is None:
                first, iterations = last, torch.ones_like(last)
            elif before is not None:
                iterations = iterations + ~(before <= config.tol)
            if looks and not final:
                rate = torch.ones_like(error) if before is None else (error / before).clamp(max=1.0)
                count, expected = torch.stack([done.sum(), (error * rate).amax()]).tolist()
                if count == len(done):
                    break
            if not final:
                state = dataclasses.replace(state, moved=moved, distance=last)
                new = solver.step(problem, state, image.detach(), iteration)
                if not looks or count:
                    new = _held(new, state.z, done)
                state, before = new, error
    assert first is not None and iterations is not None and error is not None
    if record and jacobian is None:
        # The solve ended sooner than expected.
        image, jacobian = _evaluate(problem, state.z, record)
        evaluations += 1
    return Run(image, error, first, last, iterations, evaluations, jacobian)


def _evaluate(problem: Any, z: Tensor | None, record: str | None) -> tuple[Tensor, Jacobian | None]:
    with torch.set_grad_enabled(record == "graph"):
        return (problem.image(z), None) if record is None else problem.image_and_jacobian(z)


def _held(state: Any, z: Tensor | None, done: Tensor) -> Any:
    """Returns the state with the old points of the samples that are done."""
    done = done.reshape(done.shape + (1,) * (state.z.ndim - 1))
    old = torch.zeros_like(state.z) if z is None else z
    return dataclasses.replace(state, z=torch.where(done, old, state.z))


def _sizes(problem: EquilibriumProblem, z: Tensor | None, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ``T(z) - z`` with one row per sample, its length, and ``|T(z)|``."""
    with torch.no_grad():
        rows = rows_of(problem, image.detach())
        scale = torch.linalg.vector_norm(rows, dim=1)
        if z is None:
            return rows, scale, scale
        moved = rows - rows_of(problem, z)
        return moved, torch.linalg.vector_norm(moved, dim=1), scale


def _relative(change: Tensor, scale: Tensor) -> Tensor:
    return change / scale.clamp_min(torch.finfo(scale.dtype).tiny)
