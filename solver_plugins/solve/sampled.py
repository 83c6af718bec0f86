"""Unrolled ``proxsg`` with uniform samples, whose backward pass is written by hand.

    r_k = m_k * (s A^T x_k - u),     v_{k+1} = (1 - t_k s lam) x_k - t_k (q A r_k - b),     q = n1/tau,  x_0 = 0

    h_k = m_k * A^T (t_k q G_{k+1}),       du = sum_k h_k,       db = sum_k t_k G_{k+1}
    G_k = J_k ((1 - t_k s lam) G_{k+1} - s A h_k),      dA = - sum_k (t_k q G_{k+1} r_k^T + s x_k h_k^T)

The masks ``m_k`` of all iterations are drawn in one call. Where the whole batch shares one sample, its columns can be
gathered instead: ``A_S`` in the place of ``A`` with a mask.
"""

import inspect
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from solver_plugins.operators import LinearMap, autocast_off
from solver_plugins.prox.base import Step
from solver_plugins.solve import sampled_stacked
from solver_plugins.solve.base import Draws, Solver, State
from solver_plugins.solve.loop import Solution
from solver_plugins.solve.problem import BlockProblem
from solver_plugins.solve.proxsg import ProxSG
from solver_plugins.solve.sampled_products import Samples, WeightGradient
from solver_plugins.solve.sampled_rule import Given, Rule
from solver_plugins.solve.unrolled import is_transformed, unflattened


def has_sampled_kernel(solver: Solver, problem: BlockProblem) -> bool:
    """Whether this solve can take the hand-written path."""
    prior = problem.prior
    if type(solver) is not ProxSG or not prior.separable or prior.learnable or prior.opaque:
        return False
    return not is_transformed(problem)


def solve_sampled(
    solver: Solver, problem: BlockProblem, path: str, draws: Draws, *, keep_first: bool = False
) -> Solution:
    """Runs ``proxsg`` with uniform samples; gradients reach input, weights and bias.

    Args:
        solver: The solver.
        problem: The problem.
        path: "masked" or "columns".
        draws: Where random numbers come from: the same ones as in the plain loop, on the CPU.
        keep_first: Also return the argument of the first iterate.
    """
    assert isinstance(solver, ProxSG)
    operator, iterations = problem.operator.folded(), solver.config.iters
    tau = solver.tau(operator.in_features)
    steps = [solver.step_at(problem, iteration) for iteration in range(iterations)]
    numbers = tuple(one for one in steps if isinstance(one, float))
    measured = None
    if len(numbers) < iterations:
        measured = torch.stack(
            [torch.as_tensor(one, dtype=problem.dtype, device=problem.smoothness.device) for one in steps]
        )
        numbers = ()
    rule = Rule(
        operator=operator,
        dtype=problem.product_dtype,
        columns=path == "columns",
        prior=problem.prior,
        lam=problem.lam,
        share=operator.in_features / tau,
        unit=problem.formulation == "normalized",
        steps=numbers,
        iterations=iterations,
        low=solver.low_memory,
    )
    if problem.input.dtype == problem.dtype == problem.product_dtype and isinstance(operator, LinearMap):
        rows, features = math.prod(problem.input.shape[:-1]), max(operator.weight.shape)
        rule = replace(rule, stacked=sampled_stacked.may_stack(rule, rows, features))
    samples = solver.uniform_samples(problem, tau, iterations, draws, indices=rule.columns)
    given = Given(problem.input, operator.weight, problem.bias, samples, problem.smoothness, measured, rule)
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in given[:3]):
        v, first = _Sampled.apply(*given)[:2]
    else:
        # The same operations as with gradients, so that the result is the same to the bit.
        with torch.no_grad():
            v, first = _advanced(given, keep=False)[:2]
    state = State(v, steps[-1])
    started = solver.argument(problem, State(first, steps[0])) if keep_first else None
    return Solution(solver, problem, state, first=started)


def _step(given: Given, k: int) -> Step:
    return given.rule.steps[k] if given.steps is None else given.steps[k]


def _iterate(given: Given, keep: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Returns ``v_T``, ``v_1``, and for the backward pass iterates, slopes and residuals; differentiable."""
    rule, shape = given.rule, given.u.shape[:-1]
    prior = rule.prior
    kept: list[list[Tensor]] = [[], [], []]
    with autocast_off(given.u.device):
        given = _flattened(given)
        made = Samples(given.u, given.weight, given.samples, given.smoothness, rule)
        x, v, first = None, None, None
        for k in range(rule.iterations):
            step = _step(given, k)
            if v is not None:
                before = _step(given, k - 1)
                fresh = v is not first and prior.slope_from_value and not torch.is_grad_enabled()
                x = prior.prox_(v, before) if fresh else prior.prox(v, before)
                if keep:
                    # The identity returns what it was given, and v_1 is an output of its own.
                    kept[0].append(x.clone() if x is first else x)
                    if not prior.slope_from_value:
                        kept[1].append(prior.derivative(v, before))
            r = made.residual(x, k)
            if keep and k > 0:
                kept[2].append(r)
            v = made.descend(_base(x, given.bias, r, step, made.scale, rule), r, k, step * rule.share)
            first = v if k == 0 else first
        assert v is not None and first is not None
        if made.matrix:
            v, first = (unflattened(one, torch.Size((*shape, one.shape[-1]))) for one in (v, first))
    return v, first, [one for part in kept for one in part]


def _base(x: Tensor | None, bias: Tensor | None, r: Tensor, step: Step, scale: Step, rule: Rule) -> Tensor:
    """Returns ``(1 - t s lam) x + t b``."""
    if x is not None:
        base = x * (1 - step * rule.lam * scale)
        return base if bias is None else base + step * bias
    features = getattr(rule.operator, "output_size", ())
    batch = r.shape[: r.dim() - len(rule.operator.problem_dims)]
    zero = r.new_zeros(()).expand(*batch, rule.operator.out_features, *features)
    return zero if bias is None else zero + step * bias


def _flattened(given: Given) -> Given:
    """Returns the rows of a matrix as one batch; a convolution takes any batch as it is."""
    u, bias, samples = given.u, given.bias, given.samples
    if not isinstance(given.rule.operator, LinearMap):
        return given
    if not given.rule.columns and samples.dim() > 2:
        samples = samples.reshape(samples.shape[0], -1, samples.shape[-1])
    if bias is not None and bias.dim() > 1:
        bias = bias.expand(*u.shape[:-1], bias.shape[-1]).reshape(-1, bias.shape[-1])
    return given._replace(u=u.reshape(-1, u.shape[-1]), bias=bias, samples=samples)


def _advanced(given: Given, keep: bool) -> tuple[Tensor, ...]:
    """Returns ``v_T``, ``v_1``, and what the backward pass needs, in buffers or one by one."""
    if sampled_stacked.stacks(given):
        with autocast_off(given.u.device):
            v, first, *kept = sampled_stacked.iterate(_flattened(given), keep)
        shape = torch.Size((*given.u.shape[:-1], v.shape[-1]))
        return unflattened(v, shape), unflattened(first, shape), *(kept if keep else ())
    v, first, kept = _iterate(given, keep)
    return v, first, *kept


class _Sampled(torch.autograd.Function):
    """``v_T`` and ``v_1`` of the input, the weight and the bias."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        u: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        samples: Tensor,
        smoothness: Tensor,
        steps: Tensor | None,
        rule: Rule,
    ) -> tuple[Tensor, ...]:
        given = Given(u, weight, bias, samples, smoothness, steps, rule)
        v, first, *kept = _advanced(given, keep=not rule.low)
        return (v, first if first is not v else v.clone(), *kept)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.rule = inputs
        ctx.mark_non_differentiable(*output[2:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output[2:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        u, weight, bias, samples, smoothness, steps, *rest = ctx.saved_tensors
        given = Given(u, weight, bias, samples, smoothness, steps, ctx.rule)
        (grad, grad_first), rule = grads[:2], ctx.rule
        needs = ctx.needs_input_grad[:3]
        if grad is None and grad_first is None:
            return (None,) * 7
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return (*_recorded(grad, grad_first, given, needs), None, None, None, None)
        buffers = sampled_stacked.stacks(given, grad if grad is not None else grad_first)
        if rule.low:
            rest = _advanced(given, keep=True)[2:] if buffers else _iterate(given, keep=True)[2]
        backward = _backward
        if _is_stacked(rest, rule) and buffers:
            backward = _stacked_backward
        elif _is_stacked(rest, rule):
            # A backward pass that is compiled or transformed, unlike its forward pass.
            rest = [*rest[0].unbind(), *rest[1].unbind()[1:]]
        with autocast_off(given.u.device):
            gradients = backward(grad, grad_first, given, rest, needs)
        return (*gradients, None, None, None, None)


# torch looks the arguments up in every call, which takes as long as a few small products.
_Sampled.forward.__signature__ = inspect.signature(_Sampled.forward)  # type: ignore[attr-defined]


def _recorded(
    grad: Tensor | None, grad_first: Tensor | None, given: Given, needs: tuple[bool, ...]
) -> list[Tensor | None]:
    """Returns the gradients of input, weight and bias as functions of all they depend on, for a derivative of them."""
    # As views: one may have been computed from another.
    u, weight, bias = given.u.view_as(given.u), given.weight.view_as(given.weight), given.bias
    bias = None if bias is None else bias.view_as(bias)
    live = [one for one, needed in zip((u, weight, bias), needs, strict=True) if needed and one is not None]
    out = _iterate(given._replace(u=u, weight=weight, bias=bias), keep=False)[:2]
    pairs = [(one, above) for one, above in zip(out, (grad, grad_first), strict=True) if above is not None]
    found = iter(
        torch.autograd.grad(
            [one for one, _ in pairs], live, [above for _, above in pairs], create_graph=True, allow_unused=True
        )
    )
    return [next(found) if needed else None for needed in needs]


def _is_stacked(rest: Sequence[Tensor], rule: Rule) -> bool:
    """Whether a forward pass has left buffers: these have one more dimension than the rows of a matrix."""
    return rule.stacked and len(rest) == 2 and rest[0].dim() == 3


def _stacked_backward(
    grad: Tensor | None, grad_first: Tensor | None, given: Given, kept: Sequence[Tensor], needs: tuple[bool, ...]
) -> list[Tensor | None]:
    """Returns the gradients of input, weight and bias."""
    shape, bias = given.u.shape, given.bias
    grad, grad_first = (None if one is None else one.reshape(-1, one.shape[-1]) for one in (grad, grad_first))
    iterates, residuals = kept
    given = _flattened(given._replace(bias=None))
    du, dweight, db = sampled_stacked.backward(grad, grad_first, given, iterates, residuals, needs)
    if db is not None and bias is not None:
        db = db.reshape(*shape[:-1], db.shape[-1]).sum_to_size(bias.shape)
    return [None if du is None else du.reshape(shape), dweight, db]


def _backward(
    grad: Tensor | None, grad_first: Tensor | None, given: Given, kept: Sequence[Tensor], needs: tuple[bool, ...]
) -> list[Tensor | None]:
    """Returns the gradients of input, weight and bias."""
    rule, shape, bias = given.rule, given.u.shape, given.bias
    prior, again = rule.prior, rule.iterations - 1
    iterates, slopes = kept[:again], kept[again : len(kept) - again]
    residuals = kept[len(kept) - again :]
    given = _flattened(given._replace(bias=None))
    u, weight, samples = given.u, given.weight, given.samples
    made = Samples(u, weight, samples, given.smoothness, rule)
    if made.matrix:
        grad, grad_first = (None if one is None else one.reshape(-1, one.shape[-1]) for one in (grad, grad_first))
    if grad is None:
        assert grad_first is not None
        grad = torch.zeros_like(grad_first)
    du = _InputGradient(u, made.working, rule.columns)
    db: Tensor | None = None
    total = WeightGradient(made, rule, weight)
    for k in range(again, -1, -1):
        step = _step(given, k)
        if k == 0 and grad_first is not None:
            grad = grad + grad_first
        moved = grad * (step * rule.share)
        if needs[2]:
            db = moved if db is None else db + moved
        h = made.pull(moved, k)
        if needs[0]:
            du.add(h, samples[k])
        if needs[1]:
            total.add(moved, residuals[k - 1] if k > 0 else made.residual(None, k), k)
            if k > 0:
                total.add_second(iterates[k - 1], h, k)
        if k == 0:
            break
        base = grad * (1 - step * rule.lam * made.scale)
        back = made.push(base, h, k)
        before = _step(given, k - 1)
        grad = slopes[k - 1] * back if slopes else prior.vjp(iterates[k - 1], before, back)
    found_u = du.result().reshape(shape).to(u.dtype) if needs[0] else None
    found_b = None
    if needs[2] and db is not None and bias is not None:
        db = db.reshape(*shape[:-1], db.shape[-1]) if made.matrix else db
        found_b = (db.sum_to_size(bias.shape) / rule.share).to(bias.dtype)
    return [found_u, total.result() if needs[1] else None, found_b]


class _InputGradient:
    """Sums the ``h_k``, where they belong."""

    def __init__(self, u: Tensor, dtype: torch.dtype, columns: bool):
        self.columns = columns
        self.total = torch.zeros_like(u, dtype=dtype) if columns else None
        self.owned = False

    def add(self, h: Tensor, sample: Tensor) -> None:
        if self.total is None:
            # Also a factor of the weight's gradient: nothing may be added to it in place.
            self.total = h
        elif self.columns:
            self.total = self.total.index_add(-1, sample, h)
        elif self.owned:
            self.total.add_(h)
        else:
            self.total, self.owned = self.total + h, True

    def result(self) -> Tensor:
        assert self.total is not None
        return self.total
