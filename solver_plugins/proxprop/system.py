"""The linear system of a shared weight, in the space where it is smaller.

Making a system raises all errors; finishing it solves it, writes the directions and cannot fail. So either all
gradients are replaced or none.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from solver_plugins.prox.prior import in_float64
from solver_plugins.proxprop.capture import LayerCall
from solver_plugins.proxprop.errors import NonFiniteError
from solver_plugins.proxprop.processes import Processes
from solver_plugins.proxprop.rows import multiply
from solver_plugins.proxprop.shared_weight import SharedWeight
from solver_plugins.proxprop.solve import CgOutcome, batch_conjugate_gradients, conjugate_gradients, factorize

Space = Literal["features", "batch", "matrix-free"]

_PART = 2**18
"""The number of entries of a solution in memory at a time."""


@dataclass(frozen=True)
class StepReport:
    """What was done to the gradient of one weight.

    Attributes:
        space: Where the system was solved: "features" (``X^T X``), "batch" (``X X^T``) or "matrix-free".
        rows: Rows of ``X`` in all processes.
        columns: Columns of ``X``, including those of biases.
        iterations: Steps of conjugate gradients; 0 if it was solved exactly.
        residual: Relative residual of conjugate gradients; in the batch space, that before the last step.
        jitter: What a factorisation added to the diagonal beyond ``1/tau_theta``.
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
class SystemSettings:
    """How to solve a system.

    Attributes:
        steps: Steps of conjugate gradients, or None for an exact solve.
        joint: Whether conjugate gradients take one step length for all outputs, instead of one each.
        shift: ``1/tau`` (``N/tau`` for a mean Gram matrix).
        scale: The solution is multiplied by this (``N`` for a mean Gram matrix).
        total: Rows in all processes.
    """

    steps: int | None
    joint: bool
    shift: float
    scale: float
    total: int


def feature_system(shared: SharedWeight, settings: SystemSettings, processes: Processes) -> System:
    """Makes the system with ``M = shift I + X^T X``, summed over processes."""
    gram = _assembled_gram(shared)
    processes.sum(gram)
    _check_finite(shared, gram.diagonal(dim1=-2, dim2=-1).sum(), shared.probed_gradient().sum())
    factor, jitter = (None, 0.0) if settings.steps is not None else factorize(gram, settings.shift)
    matrix = gram if factor is None else factor
    # Only one of the two is kept.
    del gram, factor

    def finish() -> StepReport:
        g = shared.gradient(shared.dtype)
        outcome = CgOutcome()
        if settings.steps is None:
            v = torch.cholesky_solve(g.mT, matrix).mT
        else:
            v, outcome = conjugate_gradients(
                lambda p: multiply(p, matrix).add_(p, alpha=settings.shift), g, settings.steps, settings.joint
            )
        shared.write(v if settings.scale == 1 else v * settings.scale)
        return StepReport("features", settings.total, shared.columns, outcome.iterations, outcome.residual, jitter)

    return System(finish, jitter)


def _assembled_gram(shared: SharedWeight) -> Tensor:
    """Returns the sum of the Gram matrices of all layers, with a column of ones for each bias."""
    d = shared.rows.columns
    size = (shared.rows.groups, shared.columns, shared.columns)
    total = torch.zeros(size, dtype=shared.dtype, device=shared.weight.device)
    for tally, bias in zip(shared.tallies, shared.bias_of, strict=True):
        tally.fold()
        if tally.gram is None:
            continue
        total[:, :d, :d] += tally.gram.matrix
        if bias is not None:
            total[:, :d, d + bias] += tally.gram.sums
            total[:, d + bias, :d] += tally.gram.sums
            total[:, d + bias, d + bias] += tally.rows
    return total


def batch_system(shared: SharedWeight, settings: SystemSettings, calls: list[LayerCall]) -> System:
    """Makes the system in the space of the rows, ``X^T (shift I + X X^T)^{-1} D`` (push-through).

    It needs gradients that are ``X^T D`` times a number. Other gradients (with an added penalty, of a weight that is
    also used elsewhere, of a solver block) are recognised and use :func:`_general_system`.
    """
    inputs = [shared.rows.prepare(call.input(), shared.dtype) for call in calls]
    parts = [shared.rows.output_rows(call.output_gradient(), shared.dtype) for call in calls]
    d = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    probed = shared.probed_gradient()
    _check_finite(shared, *(torch.linalg.vector_norm(x) for x in inputs), torch.linalg.vector_norm(d), probed.sum())
    factor = _factor_of_gradient(shared, inputs, calls, d, probed)
    if factor is None:
        return _general_system(shared, settings, calls)
    matrix, jitter = _outer(shared, inputs, calls), 0.0
    if settings.steps is None:
        matrix, jitter = factorize(matrix, settings.shift)

    def finish() -> StepReport:
        steps, outcomes = settings.steps, [CgOutcome()]
        solution: Callable[[int, int], Tensor]
        if steps is None:
            solution = lambda first, last: torch.cholesky_solve(d[..., first:last], matrix)  # noqa: E731
        elif settings.joint:
            y, right, outcomes[0] = batch_conjugate_gradients(matrix, d, settings.shift, steps, joint=True)

            def solution(first: int, last: int) -> Tensor:
                return y[..., first:last] if right is None else multiply(y, right[..., first:last])
        else:

            def solution(first: int, last: int) -> Tensor:
                part = d[..., first:last]
                y, _, outcome = batch_conjugate_gradients(matrix, part, settings.shift, steps, joint=False)
                outcomes.append(outcome)
                return y

        _write_pulled_back(shared, inputs, calls, solution, factor * settings.scale)
        taken, residual = max(one.iterations for one in outcomes), max(one.residual for one in outcomes)
        return StepReport("batch", settings.total, shared.columns, taken, residual, jitter)

    return System(finish, jitter)


def _outer(shared: SharedWeight, inputs: list[Tensor], calls: list[LayerCall]) -> Tensor:
    k = shared.rows.outer(inputs)
    counts = torch.tensor([call.rows for call in calls], device=k.device)
    marks = torch.tensor([-1 if call.bias is None else call.bias for call in calls], device=k.device)
    marks = marks.repeat_interleave(counts)
    # Rows with the same bias share a column of ones.
    k += ((marks[:, None] == marks[None, :]) & (marks >= 0)).to(k.dtype)
    return k


def _factor_of_gradient(
    shared: SharedWeight, inputs: list[Tensor], calls: list[LayerCall], d: Tensor, probed: Tensor
) -> float | None:
    """Returns ``c`` if the gradient is ``c X^T D``, otherwise None; both are compared after a product with signs."""
    probe, columns = shared.probe(), shared.rows.columns
    seen = []
    for x, call in zip(inputs, calls, strict=True):
        y = shared.rows.project(x, probe[..., :columns])
        seen.append(y if call.bias is None else y + probe[..., columns + call.bias, None])
    expected = multiply(d.mT, torch.cat(seen, 1))[..., 0]
    expected, found = in_float64(expected), in_float64(probed)
    size = float(expected.square().sum())
    factor = float((expected * found).sum()) / size if size > 0 else 1.0
    low = min((call.output_gradient().dtype for call in calls), key=lambda dtype: -torch.finfo(dtype).eps)
    rounding = max(torch.finfo(low).eps, torch.finfo(shared.weight.dtype).eps)
    # An upper bound on |X| |D|: every entry of the input occurs at most once per tap.
    squares = sum(float(torch.linalg.vector_norm(x)) ** 2 for x in inputs) * math.prod(shared.rows.taps)
    scale = float(torch.linalg.vector_norm(d)) * (squares + d.shape[1] * len(shared.biases)) ** 0.5
    bound = 2 * rounding * float(found.norm()) + 16 * torch.finfo(shared.dtype).eps * abs(factor) * scale
    return factor if float((found - factor * expected).norm()) <= bound else None


def _write_pulled_back(
    shared: SharedWeight,
    inputs: list[Tensor],
    calls: list[LayerCall],
    solution: Callable[[int, int], Tensor],
    factor: float,
) -> None:
    """Writes ``factor X^T Y``, a few outputs at a time, directly into the gradient if its layout allows it."""
    rows, m = shared.rows, shared.rows.outputs
    total = sum(call.rows for call in calls) * rows.groups
    step = min(m, max(64, _PART // max(total, 1)))
    biases = torch.zeros(rows.groups, m, len(shared.biases), dtype=shared.dtype, device=shared.weight.device)
    target = shared.weight_gradient()
    direct = not rows.geometry.dims and target.dtype == shared.dtype and not shared.sharded
    collected = []
    for first in range(0, m, step):
        last = min(m, first + step)
        y = solution(first, last)
        pieces = y.split([call.rows for call in calls], 1)
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
        shared.write_weight((factor * torch.cat(collected, 1)).reshape(rows.kernel_shape))
    shared.write_biases(biases)


def _general_system(shared: SharedWeight, settings: SystemSettings, calls: list[LayerCall]) -> System:
    """Makes the system for any gradient: conjugate gradients without a matrix, or the Woodbury identity.

    ``M^{-1} g = (g - X^T (shift I + X X^T)^{-1} X g) / shift`` loses digits if ``X`` is large, so it uses float64.
    """
    if settings.steps is not None:
        return matrix_free_system(shared, settings, calls, None)
    # MPS has no float64.
    dtype = shared.dtype if shared.weight.device.type == "mps" else torch.float64
    wide = [shared.rows.prepare(call.input(), dtype) for call in calls]
    factor, jitter = factorize(_outer(shared, wide, calls), settings.shift)

    def finish() -> StepReport:
        g = shared.gradient(dtype)
        y = torch.cat([_project(shared, x, call, g) for x, call in zip(wide, calls, strict=True)], 1)
        y = torch.cholesky_solve(y, factor)
        pieces = y.split([call.rows for call in calls], 1)
        for x, call, piece in zip(wide, calls, pieces, strict=True):
            g -= _pull_back(shared, x, call, piece)
        shared.write(g * (settings.scale / settings.shift))
        return StepReport("batch", settings.total, shared.columns, jitter=jitter)

    return System(finish, jitter)


def matrix_free_system(
    shared: SharedWeight, settings: SystemSettings, calls: list[LayerCall], processes: Processes | None
) -> System:
    """Makes a system without its matrix: a product with it is a forward pass and a weight gradient.

    If the calls are those of this process alone, products are summed over ``processes``.
    """
    probed = shared.probed_gradient()
    norms = sum((shared.rows.prepare(call.input(), shared.dtype).sum() for call in calls), probed.sum())
    _check_finite(shared, norms if processes is None else processes.sum(norms))

    def apply(p: Tensor) -> Tensor:
        total = torch.zeros_like(p)
        for call in calls:
            x = shared.rows.prepare(call.input(), shared.dtype)
            total += _pull_back(shared, x, call, _project(shared, x, call, p))
        return (total if processes is None else processes.sum(total)).add_(p, alpha=settings.shift)

    def finish() -> StepReport:
        assert settings.steps is not None
        v, outcome = conjugate_gradients(apply, shared.gradient(shared.dtype), settings.steps, settings.joint)
        shared.write(v if settings.scale == 1 else v * settings.scale)
        return StepReport("matrix-free", settings.total, shared.columns, outcome.iterations, outcome.residual)

    return System(finish)


def _project(shared: SharedWeight, x: Tensor, call: LayerCall, p: Tensor) -> Tensor:
    """Returns ``X p^T``, including the column of the bias."""
    columns = shared.rows.columns
    y = shared.rows.project(x, p[..., :columns])
    return y if call.bias is None else y + p[:, None, :, columns + call.bias]


def _pull_back(shared: SharedWeight, x: Tensor, call: LayerCall, y: Tensor) -> Tensor:
    """Returns ``y^T X``, including the column of the bias."""
    extra = y.new_zeros(y.shape[0], y.shape[2], len(shared.biases))
    if call.bias is not None:
        extra[..., call.bias] = y.sum(1)
    pulled = shared.rows.pull_back(x, y)
    return torch.cat([pulled, extra], 2) if shared.biases else pulled


def _check_finite(shared: SharedWeight, *numbers: Tensor) -> None:
    if not all(bool(torch.isfinite(number)) for number in numbers):
        raise NonFiniteError(
            f"Expected finite activations and gradients; those of {shared.name} are not. No gradient was changed. "
            "Look for a loss that diverged, for inputs that are not normalised, or, with mixed precision, step through "
            "the GradScaler, which skips such steps."
        )
