"""Runs a solve: as its solver writes it, or by the kernel."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from solver_plugins.operators import LinearMap, LinearOperator
from solver_plugins.prox.prior import is_unit
from solver_plugins.solve.base import Draws, SamplingSolver, Solver, State
from solver_plugins.solve.kernel import solve_recursion
from solver_plugins.solve.layout import Layout, matrix_of
from solver_plugins.solve.paths import images_kept, regroups
from solver_plugins.solve.problem import BlockProblem
from solver_plugins.solve.products import LARGE_BATCH
from solver_plugins.solve.recursion import Given, Rule, Samples
from solver_plugins.solve.steps import times


@dataclass(frozen=True)
class Diagnostics:
    """How a solve went.

    Attributes:
        objective: ``F(x_k) + g(x_k)`` of the problem actually solved, shape ``(iterations, *batch)``.
        residual: Relative size of a further proximal-gradient step (zero at a minimiser), same shape.
        iterations: How many proximal steps were taken.
    """

    objective: Tensor
    residual: Tensor
    iterations: int

    def converged(self, tolerance: float = 1e-4) -> Tensor:
        """Returns which samples ended with a residual of at most ``tolerance``."""
        return self.residual[-1] <= tolerance


@dataclass(frozen=True)
class Solution:
    """The end of a solve.

    Attributes:
        solver: Who solved.
        problem: What was solved.
        state: The solver's last state.
        diagnostics: How it went, where that was asked for.
        first: The argument of the first iterate, where that was asked for: the plain block's.
    """

    solver: Solver
    problem: BlockProblem
    state: Any
    diagnostics: Diagnostics | None = None
    first: Tensor | None = None

    @property
    def argument(self) -> Tensor:
        """``v`` with ``activation(v) = x``."""
        return self.solver.argument(self.problem, self.state)

    @property
    def value(self) -> Tensor:
        """The last iterate ``x``."""
        return self.solver.value(self.problem, self.state)


def solve(
    solver: Solver,
    problem: BlockProblem,
    *,
    draws: Draws | None = None,
    diagnose: bool = False,
    keep_first: bool = False,
) -> Solution:
    """Runs ``solver.config.iters`` iterations from ``x_0 = 0``.

    The number of iterations is fixed: a stopping rule would make a sample's result depend on its batch.

    Args:
        solver: The solver.
        problem: The problem.
        draws: Randomness for a sampling solver; None runs it with full gradients and the same steps.
        diagnose: Record objective and residual of every iterate (about doubles the cost).
        keep_first: Also return the argument of the first iterate.
    """
    state = solver.init(problem)
    first = None
    objectives, residuals = [], []
    for iteration in range(solver.config.iters):
        state = solver.step(problem, state, iteration, draws)
        if problem.gate is not None and iteration:
            state = solver.gated(problem, state)
        elif problem.gate is not None:
            problem.start = state.v
        if keep_first and iteration == 0:
            first = solver.argument(problem, state)
        if diagnose:
            with torch.no_grad():
                x = solver.value(problem, state)
                objectives.append(problem.objective(x))
                residuals.append(problem.residual(x))
    diagnostics = None
    if diagnose:
        diagnostics = Diagnostics(torch.stack(objectives), torch.stack(residuals), solver.config.iters)
    return Solution(solver, problem, state, diagnostics, first)


LARGEST = 2**21
"""This many numbers in a buffer: above, a large batch is better off with one product after the other."""


def runs_in_kernel(solver: Solver, problem: BlockProblem, draws: Draws | None) -> bool:
    """Whether the kernel can run this solve: it is declared, and no gradient reaches into the prior, or forwards."""
    prior, recursion = problem.prior, solver.recursion
    if recursion is None or solver.config.iters == 1 or prior.learnable or prior.opaque or is_transformed(problem):
        return False
    if not prior.separable:
        # A dimension that is counted from the front is not the same one after batch dimensions are merged.
        return draws is None and isinstance(problem.operator, LinearMap) and getattr(prior, "dim", 0) < 0
    if draws is None:
        return True
    if solver.samples == "outputs":
        # What was not drawn must have an argument, and that of the others must be v itself.
        unit = is_unit(problem.step) and recursion.factor is None
        return prior.zero_argument is not None and (prior.scale_free or unit)
    # A draw that depends on the iterates would have to be compiled with them.
    return solver.uniform or not torch.compiler.is_compiling()


def is_transformed(problem: BlockProblem) -> bool:
    """Whether a transform of ``torch.func``, or forward-mode differentiation, looks at this solve."""
    if torch.compiler.is_compiling():
        return False
    if torch._C._are_functorch_transforms_active():
        return True
    if forward_ad._current_level < 0:
        return False
    tensors = (problem.input, problem.operator.weight, problem.bias)
    return any(one is not None and forward_ad.unpack_dual(one).tangent is not None for one in tensors)


def solve_in_kernel(
    solver: Solver, problem: BlockProblem, path: str, draws: Draws | None, gram: Tensor | None, keep_first: bool
) -> Solution:
    """Runs what a solver declares, with the result of :func:`solve`.

    Args:
        solver: The solver.
        problem: The problem; gradients reach its input, weights and bias.
        path: "gram", "two_step", "masked" or "columns".
        draws: Where random numbers come from: the same ones as in the plain loop, on the CPU.
        gram: ``A A^T``, a constant, where it is known already.
        keep_first: Also return the argument of the first iterate.
    """
    operator, recursion, u, prior = problem.operator.folded(), solver.recursion, problem.input, problem.prior
    assert recursion is not None
    samples, by_input = Samples(), path in ("masked", "columns")
    if draws is not None and isinstance(solver, SamplingSolver):
        samples = solver.draw(problem, draws, indices=path == "columns")
    recursion = recursion if by_input else recursion.full()
    sampled, linear = by_input and recursion.reference is None, isinstance(operator, LinearMap)
    shape = torch.Size((*u.shape[: -len(operator.problem_dims)], *operator.output_shape))
    c = None if sampled else problem.first(problem.step)
    layout, chooser = Layout.of(operator, shape if c is None else c, path), samples.chooser
    rule = Rule(
        path=path,
        recursion=recursion,
        iterations=solver.config.iters,
        prior=prior,
        dtype=problem.product_dtype,
        unit=problem.formulation == "normalized",
        lam=0.0 if isinstance(problem.lam, Tensor) else problem.lam,
        inner=layout.inner,
        operator=None if linear or path == "gram" else operator,
        share=samples.share,
        chooser=None if chooser is None else lambda residual: layout.flat(chooser(residual.reshape(u.shape))),
        low=solver.low_memory,
    )
    _store(rule, solver, operator, u.shape, shape)
    exact = rule.dtype == problem.dtype and not (sampled and u.dtype != problem.dtype)
    rule.stacked = rule.stacked and exact and samples.outputs is None
    bias = problem.bias if sampled else None
    v, first = solve_recursion(
        Given(
            c=None if c is None else layout.flat(c),
            u=layout.flat(u) if sampled else None,
            weight=operator.weight if rule.operator is not None else matrix_of(operator),
            bias=layout.flat(bias.expand(shape)) if linear and bias is not None and bias.dim() > 1 else bias,
            gate=None if problem.gate is None else layout.per_feature(problem.gate),
            smoothness=problem.smoothness,
            lam=problem.lam if isinstance(problem.lam, Tensor) else None,
            gram=gram,
            inputs=samples.inputs if samples.inputs is None else layout.behind(samples.inputs, 1),
            # In the precision of what they choose from, once for all iterations.
            outputs=None if samples.outputs is None else layout.masks(samples.outputs.to(problem.dtype)),
            picks=None if samples.picks is None else layout.behind(samples.picks, 2),
            rule=rule,
        )
    )
    v, first = layout.back(v), c if first is None else layout.back(first)
    assert first is not None
    if samples.outputs is not None:
        drawn = samples.outputs[0]
        first = drawn * first + (1 - drawn) * (prior.zero_argument or 0.0) if keep_first else None
        return Solution(solver, problem, State(v, 1.0), first=first)
    factor = 1.0 if recursion.factor is None else recursion.factor(rule.iterations - 1, problem.smoothness)
    first = solver.argument(problem, State(first, problem.step)) if keep_first else None
    return Solution(solver, problem, State(v, times(problem.step, factor)), first=first)


def _store(rule: Rule, solver: Solver, operator: LinearOperator, input: torch.Size, output: torch.Size) -> None:
    """Writes into a rule what is kept for the backward pass, and how."""
    again, exporting = rule.iterations - 1, torch.compiler.is_exporting()
    rule.images = 0 if rule.path == "gram" else again
    # An exported program has no backward pass, and a choice by the size of this batch would hold for others like it.
    if exporting:
        return
    if rule.path == "two_step" and solver.memory == "auto":
        rule.images = images_kept(rule.iterations, input, output)
    if not isinstance(operator, LinearMap):
        return
    rows, features = math.prod(output[:-1]), operator.weight.shape
    rule.regrouped = rule.path == "two_step" and regroups((again - rule.images) * rows, features[1], features[0])
    rule.stacked = may_stack(rule, rows, max(features) if rule.sampled else features[0])


def may_stack(rule: Rule, rows: int, features: int) -> bool:
    """Whether a solve of this size by a matrix gains by buffers; ``features`` is the width of the largest."""
    recursion, prior = rule.recursion, rule.prior
    if recursion.momentum is not None or recursion.inertia or recursion.reference is not None or rule.iterations == 1:
        return False
    if not (prior.separable and prior.slope_from_value):
        return False
    if rule.sampled and (rule.path == "columns" or rule.chooser is not None):
        return False
    if not rule.sampled and (recursion.factor is not None or 0 < rule.images < rule.iterations - 1):
        return False
    return rows < LARGE_BATCH or rows * features * rule.iterations <= LARGEST
