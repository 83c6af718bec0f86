"""Runs a solve: as its solver writes it, or by the kernel."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from solver_plugins.operators import LinearMap
from solver_plugins.prox.prior import is_unit
from solver_plugins.solve.base import Draws, SamplingSolver, Solver, State
from solver_plugins.solve.kernel import solve_recursion
from solver_plugins.solve.layout import Layout
from solver_plugins.solve.paths import images_kept, regroups
from solver_plugins.solve.problem import BlockProblem
from solver_plugins.solve.products import LARGE_BATCH
from solver_plugins.solve.recursion import Given, Recursion, Rule, Samples


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
    solver: Solver,
    problem: BlockProblem,
    path: str,
    draws: Draws | None,
    *,
    gram: Tensor | None = None,
    keep_first: bool = False,
) -> Solution:
    """Runs what a solver declares; arguments and result are those of :func:`solver_plugins.solve.solve`.

    Args:
        solver: The solver.
        problem: The problem; gradients reach its input, weights and bias.
        path: "gram", "two_step", "masked" or "columns".
        draws: Where random numbers come from: the same ones as in the plain loop, on the CPU.
        gram: ``A A^T``, a constant, where it is known already.
        keep_first: Also return the argument of the first iterate.
    """
    operator, recursion, iterations = problem.operator.folded(), solver.recursion, solver.config.iters
    assert recursion is not None
    samples = Samples()
    if draws is not None and isinstance(solver, SamplingSolver):
        samples = solver.draw(problem, draws, indices=path == "columns")
    if recursion.reference is not None and path not in ("masked", "columns"):
        recursion = Recursion(recursion.factor, recursion.momentum, recursion.inertia)
    sampled = path in ("masked", "columns") and recursion.reference is None
    shape = torch.Size((*problem.input.shape[: -len(operator.problem_dims)], *operator.output_shape))
    c = None if sampled else problem.first(problem.step)
    rule = Rule(
        operator=operator,
        dtype=problem.product_dtype,
        path=path,
        recursion=recursion,
        iterations=iterations,
        prior=problem.prior,
        lam=0.0 if isinstance(problem.lam, Tensor) else problem.lam,
        unit=problem.formulation == "normalized",
        layout=Layout.of(operator, shape if c is None else c, problem.input.shape, path),
        samples=samples._replace(inputs=None, outputs=None, picks=None),
        low=solver.low_memory,
        gated=problem.gate is not None,
    )
    rule = _kept(rule, solver, problem, shape, samples)
    given = Given(
        c=c,
        u=problem.input if sampled else None,
        weight=operator.weight,
        bias=problem.bias if sampled else None,
        gate=problem.gate,
        smoothness=problem.smoothness,
        lam=problem.lam if isinstance(problem.lam, Tensor) else None,
        gram=gram,
        inputs=samples.inputs,
        outputs=samples.outputs,
        picks=samples.picks,
        rule=rule,
    )
    v, first = solve_recursion(given)
    last = (
        problem.step
        if recursion.factor is None
        else problem.step * recursion.factor(iterations - 1, problem.smoothness)
    )
    if samples.outputs is not None:
        first = c
        if keep_first and c is not None:
            drawn, number = samples.outputs[0], problem.prior.zero_argument
            first = drawn * c + (1 - drawn) * (number or 0.0)
        return Solution(solver, problem, State(v, 1.0), first=first if keep_first else None)
    started = c if first is None else first
    assert started is not None
    first = solver.argument(problem, State(started, problem.step)) if keep_first else None
    return Solution(solver, problem, State(v, last), first=first)


def _kept(rule: Rule, solver: Solver, problem: BlockProblem, shape: torch.Size, samples: Samples) -> Rule:
    """Returns the rule with what is kept for the backward pass, and how."""
    again, operator = rule.iterations - 1, rule.operator
    images, regrouped = (0 if rule.path == "gram" else again), False
    if rule.path == "two_step" and solver.memory == "auto" and not torch.compiler.is_exporting():
        images = images_kept(rule.iterations, problem.input.shape, shape)
    if torch.compiler.is_exporting():
        # There is no backward pass, and a choice by the size of this batch would hold for others like it alone.
        return replace(rule, images=images)
    rows = math.prod(shape[:-1]) if rule.is_flat else 0
    if rule.path == "two_step" and rule.is_flat:
        regrouped = regroups((again - images) * rows, operator.in_features, operator.out_features)
    rule = replace(rule, images=images, regrouped=regrouped)
    exact = problem.product_dtype == problem.dtype and (
        not rule.draws_gradients or problem.input.dtype == problem.dtype
    )
    features = max(operator.weight.shape[:2]) if rule.draws_gradients else operator.out_features
    if exact and samples.outputs is None and may_stack(rule, rows, features):
        return replace(rule, stacked=True)
    return rule


def may_stack(rule: Rule, rows: int, features: int) -> bool:
    """Whether a solve of this size gains by buffers; ``features`` is the width of the largest."""
    recursion, prior = rule.recursion, rule.prior
    plain = recursion.momentum is None and not recursion.inertia and recursion.reference is None
    if not (plain and rule.is_flat and prior.separable and prior.slope_from_value) or rule.iterations == 1:
        return False
    if rule.draws_gradients and (rule.path == "columns" or rule.samples.chooser is not None):
        return False
    if not rule.draws_gradients and (recursion.factor is not None or 0 < rule.images < rule.iterations - 1):
        return False
    return rows < LARGE_BATCH or rows * features * rule.iterations <= LARGEST
