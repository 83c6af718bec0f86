"""The cost model: which way of computing the same iterates takes the fewest multiply-adds.

All paths are exact. With ``n1`` inputs, ``n2`` outputs, a batch of ``B`` problems and ``T`` iterations:

| path | an iteration multiplies by | multiply-adds of the iterations after the first |
|---|---|---|
| ``two_step`` | ``A^T``, then ``A`` | ``2 (T-1) B n1 n2`` |
| ``gram`` | ``A A^T``, formed once in every solve | ``(T-1) B n2^2 + n1 n2^2`` |
| ``masked`` | ``A^T``, then ``A``, with a mask between them | ``2 (T-1) B n1 n2`` |
| ``columns`` | the ``tau`` sampled columns, gathered in every iteration | ``2 (T-1) B tau n2``, and the gathering |
| ``collapsed`` | nothing: they are one weight, formed on the smaller side ``n`` | ``2 n^2 max(n1, n2) + j n^3`` |

``collapsed`` is for solves without a prior, whose polynomial takes ``j`` products of small matrices. A convolution
whose windows do not overlap is a matrix for each of its places.
``gram`` is cheaper where ``(T-1) B (2 n1 - n2) > n1 n2``. A backward pass takes twice as much on every path, but for
the Gram matrix itself; one rule serves evaluation and training, so that both compute the same numbers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from solver_plugins.operators import LinearMap, LinearOperator
from solver_plugins.prox import IdentityPrior, Prior
from solver_plugins.solve.base import SamplingSolver, Solver
from solver_plugins.solve.layout import is_matrix
from solver_plugins.solve.problem import GateKind

Path = Literal["loop", "two_step", "gram", "masked", "columns", "collapsed"]
"""How iterates are computed; ``loop`` is the iteration as it is written, differentiated by autograd."""

KEPT_WHOLE = 10
"""Up to this many iterations a backward pass may keep everything."""
KEPT_SHARE = 1.09
"""With more of them it keeps this many numbers per iteration and output, if ten whole iterations are not more."""

GATHERING = 24
"""Multiply-adds in the time that it takes to gather one weight, and to add its gradient where it came from."""


@dataclass(frozen=True)
class SolveSize:
    """The numbers that a cost depends on.

    Attributes:
        inputs: ``n1``: input features; for a convolution, channels.
        outputs: ``n2``: output features; for a convolution, channels.
        batch: ``B``: how many problems share the weights.
        iterations: ``T``: proximal steps.
        is_matrix: Whether ``A`` is a matrix. The Gram operator of a convolution whose windows overlap is not a
            convolution at the border, so that ``gram`` and ``columns`` are for matrices only.
        tau: How many inputs are sampled in every iteration; None for full gradients.
        shared: Whether all problems share one sample.
        affine: How many products of small matrices collapse the solve; None where it does not collapse.
        gated: Whether there is a gate per channel, so that it collapses by iterations on ``A`` or its output side.
        known: Whether the layer's output is computed in any case, so that a collapsed solve multiplies that.
        groups: How many such layers there are side by side.
    """

    inputs: int
    outputs: int
    batch: int
    iterations: int
    is_matrix: bool = True
    tau: int | None = None
    shared: bool = False
    affine: int | None = None
    known: bool = False
    groups: int = 1
    gated: bool = False


def choose_path(size: SolveSize) -> Path:
    """Returns the path with the fewest multiply-adds; the simpler one where two cost the same."""
    possible = possible_paths(size)
    return possible[0] if len(possible) == 1 else min(possible, key=lambda path: multiply_adds(path, size))


def possible_paths(size: SolveSize) -> tuple[Path, ...]:
    """Returns the paths that can compute a solve of this size, the simplest first."""
    if size.tau is None and size.is_matrix:
        return ("two_step", "gram") if size.affine is None else ("two_step", "gram", "collapsed")
    if size.tau is None:
        return ("two_step",)
    return ("masked", "columns") if size.is_matrix and size.shared else ("masked",)


def multiply_adds(path: Path, size: SolveSize) -> int:
    """Returns what the iterations after the first cost on a path, per position of a convolution.

    The first one is the plain layer on every path (``columns`` saves a part of it, too, which is not counted).
    """
    n1, n2, again, found = size.inputs, size.outputs, size.iterations - 1, 0
    if path == "gram":
        found = again * size.batch * n2 * n2 + n1 * n2 * n2 * (again > 0)
    elif path == "collapsed" and size.affine is not None:
        small = n2 if size.known else min(n1, n2)
        if size.gated and small < n2:
            return 2 * again * n1 * n1 * n2 * size.groups
        found = small * n1 * n2 + size.affine * small**3
        found += size.batch * n2 * n2 if size.known else small * n1 * n2
    elif path == "columns" and size.tau is not None:
        found = again * (2 * size.batch * size.tau * n2 + GATHERING * size.tau * n2)
    else:
        found = 2 * again * size.batch * n1 * n2
    return found * size.groups


def images_kept(iterations: int, input: Sequence[int], output: Sequence[int]) -> int:
    """Returns of how many iterations ``A^T x`` is kept beside the iterates, for a backward pass that uses it.

    As many as fit into ten whole iterations, or into 1.1 outputs for each iteration, whichever is more.

    Args:
        iterations: ``T``; one output less is kept.
        input: The shape of the input, and so of ``A^T x``.
        output: The shape of the output.
    """
    again = iterations - 1
    if iterations <= KEPT_WHOLE:
        return again
    image, iterate = math.prod(input), math.prod(output)
    budget = max(KEPT_SHARE * iterations * iterate, KEPT_WHOLE * (iterate + image))
    return min(again, int((budget - again * iterate) / image))


def regroups(rows: int, inputs: int, outputs: int) -> bool:
    """Whether ``(sum_k G_k x_k^T) A`` takes fewer multiply-adds than ``A^T x_k``, and two products, for each row."""
    return outputs * (rows + inputs) < 3 * rows * inputs


def gram_from(size: SolveSize) -> int | None:
    """Returns the smallest batch for which ``gram`` is chosen; None where it never is, or a larger one collapses."""
    slope = (size.iterations - 1) * (2 * size.inputs - size.outputs)
    if size.affine is not None or size.tau is not None or not size.is_matrix or slope <= 0:
        return None
    return math.floor(size.inputs * size.outputs / slope) + 1


def path_for(solver: Solver, size: SolveSize | None, *, gram_is_known: bool = False, kept: bool = False) -> Path:
    """Returns the path of a solve: the one that the solver's config asks for, where it exists, or the cheapest.

    Args:
        solver: The solver.
        size: From :func:`solve_size`.
        gram_is_known: Whether ``A A^T`` need not be computed.
        kept: Whether a collapsed weight is kept for further solves, so that forming it costs nothing.
    """
    if solver.path == "loop" or size is None:
        return "loop"
    possible, exporting = possible_paths(size), torch.compiler.is_exporting()
    if solver.path in possible:
        return solver.path
    # One exported program serves every batch, and what is made of weights alone is a constant of it.
    if "collapsed" in possible and (kept or exporting):
        return "collapsed"
    if "gram" in possible and (size.outputs < 2 * size.inputs if exporting else gram_is_known):
        return "gram"
    return possible[0] if exporting else choose_path(size)


def solve_size(
    solver: Solver,
    operator: LinearOperator,
    batch: int,
    *,
    sampling: bool,
    prior: Prior | None = None,
    known: bool = False,
    iterations: int | None = None,
    gate: GateKind | None = None,
) -> SolveSize | None:
    """Returns the numbers that a cost depends on; None for a sampled solve that declares nothing.

    Args:
        solver: The solver.
        operator: ``A``.
        batch: How many problems there are.
        sampling: Whether the solve samples (in training, say).
        prior: The prior; None for one that does not collapse.
        known: Whether the layer's output is computed in any case.
        iterations: How many there are, if not those of the solver's config.
        gate: Which gate there is.
    """
    iterations, recursion, linear = iterations or solver.config.iters, solver.recursion, isinstance(operator, LinearMap)
    sampled = sampling and isinstance(solver, SamplingSolver) and solver.thins(operator)
    tau, taps, groups, shared = None, 1, 1, False
    # Coordinate descent samples what it keeps of a full gradient.
    if sampled and solver.samples == "inputs" and isinstance(solver, SamplingSolver):
        if recursion is None:
            return None
        tau = solver.tau(operator.in_features)
        shared = solver.shares_sample and solver.uniform and recursion.reference is None
    matrix = linear or (recursion is not None and is_matrix(operator))
    if matrix and not linear:
        taps, groups = math.prod(operator.weight.shape[2:]), operator.in_features // operator.weight.shape[1]
        batch, tau = batch * math.prod(operator.output_shape[1:]), None if tau is None else tau * taps
    affine = None
    may = matrix and not sampled and not solver.implicit and isinstance(prior, IdentityPrior) and iterations > 1
    if may and recursion is not None and recursion.momenta(iterations) is not None:
        plain = recursion.is_constant(iterations) and gate != "channel"
        affine = power_products(iterations) if plain else max(0, iterations - 2)
    return SolveSize(
        inputs=operator.weight.shape[1] * taps,
        outputs=operator.out_features // groups,
        batch=batch,
        iterations=iterations,
        is_matrix=matrix,
        tau=tau,
        shared=shared and groups == 1,
        affine=affine,
        known=known,
        groups=groups,
        gated=gate == "channel",
    )


def power_products(count: int) -> int:
    """Returns how many products ``I + M + ... + M^(count-1)`` takes: squares, as in ``S_2k(M) = (I + M) S_k(M^2)``."""
    if count <= 2:
        return 0
    return 2 + power_products(count // 2) - (count == 2) if count % 2 == 0 else 1 + power_products(count - 1)
