"""Unrolled full-gradient solves whose backward pass is written by hand.

    x_k = prox(v_k),   y_k = x_k + b_k (x_k - x_{k-1}),   v_{k+1} = M y_k + c        (b_k = 0 without momentum)

    G_k = J_k ((1 + b_k) M G_{k+1} - b_{k+1} M G_{k+2}),     dc = sum_k G_k,     dA from products.py

``J_k`` is the derivative of the proximal map and ``G_T`` the incoming gradient. Kept for it are ``c`` and the iterates
``x_k`` but the first, ``prox(c)``, and ``J_k`` only where the iterate does not tell it (ReLU: its sign does). Where
derivatives of higher order are asked for, the backward pass is that of the iterations themselves, so that those are
right, too.
"""

import inspect
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from solver_plugins.operators import LinearMap, LinearOperator, autocast_off, product_dtype
from solver_plugins.prox import Prior
from solver_plugins.prox.base import Step
from solver_plugins.solve import stacked
from solver_plugins.solve.base import Solver, State
from solver_plugins.solve.fista import FISTA
from solver_plugins.solve.loop import Solution
from solver_plugins.solve.paths import images_kept, path_for, regroups
from solver_plugins.solve.problem import BlockProblem, working_dtype
from solver_plugins.solve.products import Map, products, symmetric_product
from solver_plugins.solve.proxgd import ProxGD
from solver_plugins.solve.rule import Rule


@dataclass(frozen=True, eq=False)
class Kept:
    """What one solve leaves for its backward pass, one entry per iteration.

    Attributes:
        iterates: ``x_k`` from the second one on.
        slopes: ``J_k`` where the iterate does not tell it; for a prior that is not separable, ``v_k``. As many.
        images: ``z_k`` of a two-step path, of the first iterations.
        momenta: ``b_k`` from the second iteration on.
        matrix: What the products made of ``A A^T``, once for both passes.
    """

    iterates: tuple[Tensor, ...] = ()
    slopes: tuple[Tensor, ...] = ()
    images: tuple[Tensor, ...] = ()
    momenta: tuple[Tensor, ...] = ()
    matrix: Tensor | None = None


def has_kernel(solver: Solver, problem: BlockProblem) -> bool:
    """Whether this solve can take the hand-written path: its gradients do not reach into the prior, nor forwards."""
    # By exact class: whoever stands in for a solver (to watch it) wants to see its steps.
    if type(solver) not in (ProxGD, FISTA) or solver.config.iters == 1:
        return False
    prior = problem.prior
    # A dimension that is counted from the front is not the same one after batch dimensions are merged.
    if not prior.separable and getattr(prior, "dim", 0) >= 0:
        return False
    return not (prior.learnable or prior.opaque or is_transformed(problem))


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


def fresh_gram(solver: Solver, prior: Prior, operator: LinearOperator, shape: torch.Size) -> Tensor | None:
    """Returns ``A A^T``, recorded nowhere, if :func:`solve_unrolled` will multiply by it; None if not.

    For who needs it, too: gradients of the weight do not come through it.

    Args:
        solver: The solver.
        prior: The prior.
        operator: ``A``.
        shape: Of the input.
    """
    if type(solver) not in (ProxGD, FISTA) or prior.learnable or prior.opaque or not isinstance(operator, LinearMap):
        return None
    weight = operator.weight
    if operator.diagonal is not None or product_dtype(weight) != working_dtype(weight.dtype):
        return None
    if path_for(solver, operator, math.prod(shape[:-1]), sampling=False) != "gram":
        return None
    with torch.no_grad():
        return symmetric_product(weight.detach())


def solve_unrolled(
    solver: Solver, problem: BlockProblem, path: str, *, gram: Tensor | None = None, keep_first: bool = False
) -> Solution:
    """Runs ``proxgd`` or ``fista``; arguments and result are those of :func:`solver_plugins.solve.solve`.

    Args:
        solver: The solver.
        problem: The problem; gradients reach its input, weights and bias.
        path: "gram" or "two_step".
        gram: ``A A^T``, a constant, where it is known already.
        keep_first: Also return the argument of the first iterate.
    """
    operator = problem.operator.folded()
    c = problem.first(problem.step)
    again = solver.config.iters - 1
    few_rows = regrouped = False
    images = again
    if path == "two_step" and solver.memory == "auto":
        images = images_kept(solver.config.iters, problem.input.shape, c.shape)
    if path == "two_step" and isinstance(operator, LinearMap):
        (n2, n1), batch = operator.weight.shape, math.prod(c.shape[:-1])
        few_rows, regrouped = again * batch < n2, regroups((again - images) * batch, n1, n2)
    rule = Rule(
        map=Map(operator, problem.lam, problem.product_dtype, few_rows, regrouped),
        path=path,
        prior=problem.prior,
        unit=problem.formulation == "normalized",
        iterations=solver.config.iters,
        momentum=isinstance(solver, FISTA),
        low=solver.low_memory,
        images=images,
    )
    exact = problem.product_dtype == c.dtype
    if exact and isinstance(operator, LinearMap) and stacked.may_stack(rule, math.prod(c.shape[:-1]), c.shape[-1]):
        rule = replace(rule, stacked=True)
    rate = problem.smoothness.reciprocal()
    if torch.is_grad_enabled() and (c.requires_grad or operator.weight.requires_grad):
        v = _Unrolled.apply(c, operator.weight, rate, gram, rule)[0]
    else:
        # The same operations as with gradients, so that the result is the same to the bit.
        with torch.no_grad():
            v = _advanced(c, operator.weight, rate, gram, rule, keep=False)[0]
    state = State(v, problem.step)
    first = solver.argument(problem, State(c, problem.step)) if keep_first else None
    return Solution(solver, problem, state, first=first)


def _iterate(
    c: Tensor,
    weight: Tensor,
    rate: Tensor,
    gram: Tensor | None,
    rule: Rule,
    keep: bool,
    matrix: Tensor | None = None,
) -> tuple[Tensor, Kept]:
    """Returns ``v_T`` and what the backward pass needs; differentiable, as it is written, to any order."""
    prior, inner = rule.prior, rule.map.operator.inner
    step: Step = 1.0 if rule.unit else rate
    iterates, slopes, images, momenta = [], [], [], []
    with autocast_off(c.device):
        made = products(rule.map, weight, rate, rule.path, gram, matrix)
        flat = _flattened(c, rule)
        v, before, ahead, theta = flat, None, None, None
        for iteration in range(rule.iterations - 1):
            # Where nothing else has seen v, and only its value is kept, memory is used again.
            fresh = v is not flat and prior.slope_from_value and not torch.is_grad_enabled()
            x = prior.prox_(v, step) if fresh else prior.prox(v, step)
            y = x
            if keep and iteration > 0:
                iterates.append(x)
                if not prior.slope_from_value:
                    slopes.append(prior.derivative(v, step) if prior.separable else v)
            if rule.momentum:
                # The restart, and the weights, as in solvers/fista.py.
                with torch.no_grad():
                    if before is None or theta is None or ahead is None:
                        theta = torch.full_like(inner(x, x), (1 + 5**0.5) / 2)
                        momentum = None
                    else:
                        start = torch.where(inner(ahead - x, x - before) > 0, 1.0, theta)
                        theta = (1 + (1 + 4 * start.square()).sqrt()) / 2
                        momentum = (start - 1) / theta
                if momentum is not None and before is not None:
                    y = x + momentum * (x - before)
                    if keep:
                        momenta.append(momentum)
                before, ahead = x, y
            v, z = made.advance(y, flat)
            if keep and z is not None and iteration < rule.images:
                images.append(z)
    kept = Kept(tuple(iterates), tuple(slopes), tuple(images), tuple(momenta), made.matrix)
    return unflattened(v, c.shape), kept


def _flattened(c: Tensor, rule: Rule) -> Tensor:
    """Returns the rows of a matrix as one batch; a convolution takes any batch as it is."""
    return c.reshape(-1, c.shape[-1]) if isinstance(rule.map.operator, LinearMap) else c


def unflattened(v: Tensor, shape: torch.Size) -> Tensor:
    """Returns a tensor in another shape, and not as a view: an activation may overwrite what a function returns."""
    return v if v.shape == shape else torch.ops.aten._unsafe_view(v, shape)


def _advanced(c: Tensor, weight: Tensor, rate: Tensor, gram: Tensor | None, rule: Rule, keep: bool) -> tuple[Any, ...]:
    """Returns ``v_T``, the matrix of the products, and what else the backward pass needs, in buffers or one by one."""
    if not rule.low and rule.stacked and stacked.at_hand(c, weight, rate):
        with autocast_off(c.device):
            v, *buffers = stacked.iterate(_flattened(c, rule), weight, rate, gram, rule)
        return (unflattened(v, c.shape), *buffers)
    v, kept = _iterate(c, weight, rate, gram, rule, keep=keep)
    return (v, kept.matrix, *kept.iterates, *kept.slopes, *kept.images, *kept.momenta)


class _Unrolled(torch.autograd.Function):
    """``v_T`` of ``c`` and the weight."""

    generate_vmap_rule = True

    @staticmethod
    def forward(c: Tensor, weight: Tensor, rate: Tensor, gram: Tensor | None, rule: Rule) -> tuple[Tensor | None, ...]:
        return _advanced(c, weight, rate, gram, rule, keep=not rule.low)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        c, weight, rate, gram, ctx.rule = inputs
        ctx.mark_non_differentiable(*(one for one in output[1:] if one is not None))
        # The last one, v_T, is not kept: an activation behind the block may overwrite it.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(c, weight, rate, gram, *output[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        c, weight, rate, gram, matrix, *rest = ctx.saved_tensors
        grad, rule = grads[0], ctx.rule
        needs_c, needs_weight = ctx.needs_input_grad[:2]
        if grad is None:
            return None, None, None, None, None
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # A derivative of this gradient is going to be taken. As views: c was computed from the weight, and what
            # reaches the weight through c is not asked for here.
            c, weight = c.view_as(c), weight.view_as(weight)
            live = [one for one, needed in ((c, needs_c), (weight, needs_weight)) if needed]
            v = _iterate(c, weight, rate, None if needs_weight else gram, rule, keep=False)[0]
            found = iter(torch.autograd.grad(v, live, grad, create_graph=True))
            return next(found) if needs_c else None, next(found) if needs_weight else None, None, None, None
        with autocast_off(c.device):
            flat, start = _flattened(grad, rule), _flattened(c, rule)
            buffers = rule.stacked and (rule.low or _is_stacked(rest, rule)) and stacked.at_hand(c, weight, rate, grad)
            if buffers:
                if rule.low:
                    _, matrix, iterates, images = stacked.iterate(start, weight, rate, gram, rule, matrix)
                else:
                    iterates, images = rest
                dc, dweight = stacked.backward(flat, start, weight, rate, rule, matrix, iterates, images, needs_weight)
            else:
                kept = _split(rest, rule, matrix)
                if rule.low:
                    kept = _iterate(c, weight, rate, gram, rule, keep=True, matrix=matrix)[1]
                dc, dweight = _backward(flat, start, weight, rate, rule, kept, needs_weight)
        return dc.reshape(c.shape) if needs_c else None, dweight, None, None, None


# torch looks the arguments up in every call, which takes as long as a few small products.
_Unrolled.forward.__signature__ = inspect.signature(_Unrolled.forward)  # type: ignore[attr-defined]


def _is_stacked(rest: list[Any], rule: Rule) -> bool:
    """Whether a forward pass has left buffers: these have one more dimension than the rows of a matrix."""
    return rule.stacked and len(rest) == 2 and rest[0].dim() == 3


def _split(rest: list[Tensor], rule: Rule, matrix: Tensor | None) -> Kept:
    again = rule.iterations - 1
    if _is_stacked(rest, rule):
        # A backward pass that is compiled or transformed, unlike its forward pass.
        return Kept(rest[0].unbind(), images=() if rest[1] is None else rest[1].unbind(), matrix=matrix)

    def take(count: int) -> tuple[Tensor, ...]:
        nonlocal rest
        taken, rest = rest[:count], rest[count:]
        return tuple(taken)

    iterates = take(again - 1)
    slopes = take(0 if rule.prior.slope_from_value else again - 1)
    images = take(rule.images if rule.path == "two_step" else 0)
    return Kept(iterates, slopes, images, tuple(rest), matrix)


def _backward(
    grad: Tensor, c: Tensor, weight: Tensor, rate: Tensor, rule: Rule, kept: Kept, needs_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns the gradients of ``c`` and of the weight."""
    made = products(rule.map, weight, rate, rule.path, matrix=kept.matrix)
    prior, momenta = rule.prior, kept.momenta
    step: Step = 1.0 if rule.unit else rate
    iterates = (prior.prox(c, step), *kept.iterates)
    slopes: tuple[Tensor, ...] = ()
    if not prior.slope_from_value:
        slopes = (prior.derivative(c, step) if prior.separable else c, *kept.slopes)
    in_place = stacked.at_hand(c, weight, rate, grad)
    incoming = total = grad
    later = None
    for k in range(rule.iterations - 2, -1, -1):
        # The first iteration has no momentum.
        momentum = momenta[k - 1] if momenta and k > 0 else None
        dy, h = made.pull(grad)
        if needs_weight:
            y = iterates[k] if momentum is None else iterates[k] + momentum * (iterates[k] - iterates[k - 1])
            made.collect(grad, y, kept.images[k] if k < len(kept.images) else None, h)
        dx = dy if momentum is None else dy + momentum * dy
        if later is not None:
            dx = dx - later
        later = None if momentum is None else momentum * dy
        if not slopes:
            # Nothing else has seen dx.
            grad = (prior.vjp_ if in_place else prior.vjp)(iterates[k], step, dx)
        elif prior.separable:
            grad = slopes[k] * dx
        else:
            grad = prior.vjp(slopes[k], step, dx)
        # In place from the second one on: the first is not ours to write to.
        total = total + grad if total is incoming else total.add_(grad)
    return total, made.weight_gradient() if needs_weight else None
