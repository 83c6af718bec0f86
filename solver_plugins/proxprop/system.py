"""The linear system of a unit, in the space where it is smaller: made first, solved and written later.

Making a system finds everything that can be wrong; finishing it cannot fail any more, so that either all gradients are
replaced or none.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from solver_plugins.proxprop.errors import NonFiniteError
from solver_plugins.proxprop.processes import Processes
from solver_plugins.proxprop.products import multiply
from solver_plugins.proxprop.solve import Outcome, batch_conjugate_gradients, conjugate_gradients, factorize
from solver_plugins.proxprop.unit import Call, Unit

Space = Literal["features", "batch", "matrix-free"]

_PART = 2**18
"""How many numbers of a solution are held at a time."""


@dataclass(frozen=True)
class StepReport:
    """What was done to the gradient of one weight.

    Attributes:
        space: Where the system was solved: "features" (``X^T X``), "batch" (``X X^T``) or "matrix-free".
        rows: Rows of ``X``, those of other processes included.
        columns: Columns of ``X``, those of biases included.
        iterations: Steps of conjugate gradients; 0 if it was solved exactly.
        residual: Relative residual of conjugate gradients; in the batch space that before the last step.
        jitter: What a factorisation needed beyond ``1/tau_theta`` on the diagonal.
    """

    space: Space
    rows: int
    columns: int
    iterations: int = 0
    residual: float = 0.0
    jitter: float = 0.0


@dataclass(frozen=True)
class System:
    """A checked system: ``finish`` solves it and writes the directions."""

    finish: Callable[[], StepReport]
    jitter: float = 0.0


@dataclass(frozen=True)
class Task:
    """What to solve.

    Attributes:
        steps: Steps of conjugate gradients, or None for exact.
        shift: ``1/tau`` (``N/tau`` for a mean Gram matrix).
        scale: What the solution is multiplied by (``N`` for a mean Gram matrix).
        total: Rows in all processes.
    """

    steps: int | None
    shift: float
    scale: float
    total: int


def feature_system(unit: Unit, task: Task, processes: Processes) -> System:
    """Makes the system with ``M = shift I + X^T X``, summed over processes."""
    gram = _assembled_gram(unit)
    processes.sum(gram)
    _check_finite(unit, gram.diagonal(dim1=-2, dim2=-1).sum(), unit.probed_gradient().sum())
    factor, jitter = (None, 0.0) if task.steps is not None else factorize(gram, task.shift)
    matrix = gram if factor is None else factor
    # Only one of the two is held until it is used.
    del gram, factor

    def finish() -> StepReport:
        g = unit.gradient(unit.dtype)
        outcome = Outcome()
        if task.steps is None:
            v = torch.cholesky_solve(g.mT, matrix).mT
        else:
            v, outcome = conjugate_gradients(lambda p: multiply(p, matrix).add_(p, alpha=task.shift), g, task.steps)
        unit.write(v if task.scale == 1 else v * task.scale)
        return StepReport("features", task.total, unit.columns, outcome.iterations, outcome.residual, jitter)

    return System(finish, jitter)


def _assembled_gram(unit: Unit) -> Tensor:
    """Adds up the Gram matrices of the unit's layers, with a column of ones for each bias."""
    d = unit.rows.columns
    total = torch.zeros(unit.rows.groups, unit.columns, unit.columns, dtype=unit.dtype, device=unit.weight.device)
    for tally, bias in zip(unit.tallies, unit.bias_of, strict=True):
        tally.fold()
        if tally.gram is None:
            continue
        total[:, :d, :d] += tally.gram.matrix
        if bias is not None:
            total[:, :d, d + bias] += tally.gram.sums
            total[:, d + bias, :d] += tally.gram.sums
            total[:, d + bias, d + bias] += tally.rows
    return total


def batch_system(unit: Unit, task: Task, calls: list[Call]) -> System:
    """Makes the system in the space of the rows, ``X^T (shift I + X X^T)^{-1} D`` (push-through).

    It needs gradients that are ``X^T D`` times a number; others (a penalty added to the gradient, a weight that is used
    elsewhere, a solver block) are recognised and solved for as they are.
    """
    inputs = [_prepared(unit, call, unit.dtype) for call in calls]
    parts = [unit.rows.output_rows(_gradient_of(call), unit.dtype) for call in calls]
    d = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    probed = unit.probed_gradient()
    _check_finite(unit, *(torch.linalg.vector_norm(x) for x in inputs), torch.linalg.vector_norm(d), probed.sum())
    factor = _factor_of_gradient(unit, inputs, calls, d, probed)
    if factor is None:
        return _general_system(unit, task, calls)
    lower, jitter = (None, 0.0) if task.steps is not None else factorize(_outer(unit, inputs, calls), task.shift)

    def finish() -> StepReport:
        outcome = Outcome()
        solution: Callable[[int, int], Tensor]
        if lower is not None:
            solution = lambda first, last: torch.cholesky_solve(d[..., first:last], lower)  # noqa: E731
        else:
            assert task.steps is not None
            solution, outcome = batch_conjugate_gradients(_outer(unit, inputs, calls), d, task.shift, task.steps)
        _write_pulled_back(unit, inputs, calls, solution, factor * task.scale)
        return StepReport("batch", task.total, unit.columns, outcome.iterations, outcome.residual, jitter)

    return System(finish, jitter)


def _prepared(unit: Unit, call: Call, dtype: torch.dtype) -> Tensor:
    assert call.record.x is not None
    return unit.rows.prepare(call.record.x, dtype)


def _gradient_of(call: Call) -> Tensor:
    assert call.record.d is not None
    return call.record.d


def _outer(unit: Unit, inputs: list[Tensor], calls: list[Call]) -> Tensor:
    k = unit.rows.outer(inputs)
    counts = torch.tensor([call.record.rows for call in calls], device=k.device)
    marks = torch.tensor([-1 if call.bias is None else call.bias for call in calls], device=k.device)
    marks = marks.repeat_interleave(counts)
    # Rows with the same bias have a one in the same column.
    k += ((marks[:, None] == marks[None, :]) & (marks >= 0)).to(k.dtype)
    return k


def _factor_of_gradient(unit: Unit, inputs: list[Tensor], calls: list[Call], d: Tensor, probed: Tensor) -> float | None:
    """Returns ``c`` if the gradient is ``c X^T D``, else None: compared after multiplication with fixed signs."""
    probe, columns = unit.probe(), unit.rows.columns
    seen = []
    for x, call in zip(inputs, calls, strict=True):
        y = unit.rows.project(x, probe[..., :columns])
        seen.append(y if call.bias is None else y + probe[..., columns + call.bias, None])
    expected = multiply(d.mT, torch.cat(seen, 1))[..., 0].double()
    found = probed.double()
    size = float(expected.square().sum())
    factor = float((expected * found).sum()) / size if size > 0 else 1.0
    low = min((_gradient_of(call).dtype for call in calls), key=lambda dtype: -torch.finfo(dtype).eps)
    rounding = max(torch.finfo(low).eps, torch.finfo(unit.weight.dtype).eps)
    # Not less than |X| |D|: every tap has a row of X of its own.
    squares = sum(float(torch.linalg.vector_norm(x).double()) ** 2 for x in inputs) * math.prod(unit.rows.taps)
    scale = float(torch.linalg.vector_norm(d).double()) * (squares + d.shape[1] * len(unit.biases)) ** 0.5
    bound = 2 * rounding * float(found.norm()) + 16 * torch.finfo(unit.dtype).eps * abs(factor) * scale
    return factor if float((found - factor * expected).norm()) <= bound else None


def _write_pulled_back(
    unit: Unit, inputs: list[Tensor], calls: list[Call], solution: Callable[[int, int], Tensor], factor: float
) -> None:
    """Writes ``factor X^T Y``, a few outputs at a time, straight into the gradient where its memory allows it."""
    rows, m = unit.rows, unit.rows.outputs
    total = sum(call.record.rows for call in calls) * rows.groups
    step = min(m, max(64, _PART // max(total, 1)))
    biases = torch.zeros(rows.groups, m, len(unit.biases), dtype=unit.dtype, device=unit.weight.device)
    target = unit.weight_gradient()
    direct = not rows.geometry.dims and target.dtype == unit.dtype and not unit.sharded
    collected = []
    for first in range(0, m, step):
        last = min(m, first + step)
        y = solution(first, last)
        pieces = y.split([call.record.rows for call in calls], 1)
        part: Tensor | None = None
        for index, (x, call, piece) in enumerate(zip(inputs, calls, pieces, strict=True)):
            if call.bias is not None:
                biases[:, first:last, call.bias] += factor * piece.sum(1)
            if direct:
                target[first:last].addmm_(piece[0].T, x, beta=0 if index == 0 else 1, alpha=factor)
            else:
                pulled = rows.pull_back(x, piece)
                part = pulled if part is None else part + pulled
        if part is not None:
            collected.append(part)
    if collected:
        unit.write_weight((factor * torch.cat(collected, 1)).reshape(rows.kernel_shape))
    unit.write_biases(biases)


def _general_system(unit: Unit, task: Task, calls: list[Call]) -> System:
    """Makes the system for any gradient: conjugate gradients without a matrix, or the Woodbury identity.

    ``M^{-1} g = (g - X^T (shift I + X X^T)^{-1} X g) / shift`` loses digits where ``X`` is large: done in float64.
    """
    if task.steps is not None:
        return matrix_free_system(unit, task, calls, None)
    # Only Apple's devices have no float64.
    dtype = unit.dtype if unit.weight.device.type == "mps" else torch.float64
    wide = [_prepared(unit, call, dtype) for call in calls]
    factor, jitter = factorize(_outer(unit, wide, calls), task.shift)

    def finish() -> StepReport:
        g = unit.gradient(dtype)
        y = torch.cat([_project(unit, x, call, g) for x, call in zip(wide, calls, strict=True)], 1)
        y = torch.cholesky_solve(y, factor)
        pieces = y.split([call.record.rows for call in calls], 1)
        for x, call, piece in zip(wide, calls, pieces, strict=True):
            g -= _pull_back(unit, x, call, piece)
        unit.write(g * (task.scale / task.shift))
        return StepReport("batch", task.total, unit.columns, jitter=jitter)

    return System(finish, jitter)


def matrix_free_system(unit: Unit, task: Task, calls: list[Call], processes: Processes | None) -> System:
    """Makes the system whose matrix is never built: products with it are a forward pass and a weight gradient.

    Args:
        unit: The unit.
        task: With a number of steps.
        calls: Those of this process, or of all.
        processes: Whom to sum products with, if the calls are those of this process.
    """
    probed = unit.probed_gradient()
    norms = sum((_prepared(unit, call, unit.dtype).sum() for call in calls), probed.sum())
    _check_finite(unit, norms if processes is None else processes.sum(norms))

    def apply(p: Tensor) -> Tensor:
        total = torch.zeros_like(p)
        for call in calls:
            x = _prepared(unit, call, unit.dtype)
            total += _pull_back(unit, x, call, _project(unit, x, call, p))
        return (total if processes is None else processes.sum(total)).add_(p, alpha=task.shift)

    def finish() -> StepReport:
        assert task.steps is not None
        v, outcome = conjugate_gradients(apply, unit.gradient(unit.dtype), task.steps)
        unit.write(v if task.scale == 1 else v * task.scale)
        return StepReport("matrix-free", task.total, unit.columns, outcome.iterations, outcome.residual)

    return System(finish)


def _project(unit: Unit, x: Tensor, call: Call, p: Tensor) -> Tensor:
    """Returns ``X p^T``, the column of the bias included."""
    columns = unit.rows.columns
    y = unit.rows.project(x, p[..., :columns])
    return y if call.bias is None else y + p[:, None, :, columns + call.bias]


def _pull_back(unit: Unit, x: Tensor, call: Call, y: Tensor) -> Tensor:
    """Returns ``y^T X``, the column of the bias included."""
    extra = y.new_zeros(y.shape[0], y.shape[2], len(unit.biases))
    if call.bias is not None:
        extra[..., call.bias] = y.sum(1)
    pulled = unit.rows.pull_back(x, y)
    return torch.cat([pulled, extra], 2) if unit.biases else pulled


def _check_finite(unit: Unit, *numbers: Tensor) -> None:
    if not all(bool(torch.isfinite(number)) for number in numbers):
        raise NonFiniteError(
            f"Expected finite activations and gradients; those of {unit.name} are not. No gradient was changed. "
            "Look for a loss that diverged, for inputs that are not normalised, or, with mixed precision, step through "
            "the GradScaler, which skips such steps."
        )
