"""Runs any declared recursion, with a backward pass that is written by hand.

    G_T = dv_T,     dx_k = M_k G_{k+1} + ...,     G_k = J_k dx_k,     dc = sum_k f_k G_{k+1} + G_1,     dA: products.py

``J_k`` is the derivative of the proximal map. What an iteration takes from an earlier iterate (momentum, a reference
point, outputs that were not drawn) returns to it in ``pending``. The iterates are kept, ``J_k`` only where the iterate
does not tell it (ReLU: its sign does), and ``z_k`` as the rule says. They are kept one by one, or where layers are
small, which take longer to call than to multiply, in one buffer for all iterations: every product then writes where
its result is kept. Where derivatives of higher order are asked for, the backward pass is that of the iterations
themselves, so that those are right, too.

A gate per output channel has its place in :meth:`Products.advance` (``base + a * (M d)``) and :meth:`Products.pull`,
which then multiplies ``a * G``: ``M`` stays symmetric.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from solver_plugins.operators import autocast_off
from solver_plugins.prox.base import Step
from solver_plugins.solve.products import (
    LARGE_BATCH,
    Given,
    Numbers,
    Products,
    Rule,
    has_values,
    make_products,
    plus,
    times,
)

LARGEST = 2**21
"""This many numbers in a buffer: above, a large batch is better off with one product after the other."""


@dataclass(eq=False)
class Kept:
    """What a solve leaves for its backward pass: one entry per iteration, or one buffer for all.

    Attributes:
        iterates: ``x_k``; where ``c`` is given, without the first, ``prox(c)``, but in buffers.
        slopes: ``J_k`` where the iterate does not tell it; for a prior that is not separable, ``v_k``. As many.
        images: ``z_k`` of the first iterations; of a sampled gradient without the very first, but in buffers.
        momenta: ``b_k`` from the second iteration on, where they are tensors.
        weights: What a chooser has drawn.
        matrix: What the products made of ``A A^T``, once for both passes.
    """

    iterates: Sequence[Tensor] = ()
    slopes: Sequence[Tensor] = ()
    images: Sequence[Tensor] = ()
    momenta: Sequence[Tensor] = ()
    weights: Sequence[Tensor] = ()
    matrix: Tensor | None = None

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Returns all of it, in the order of :meth:`split`."""
        return (self.matrix, *self.iterates, *self.slopes, *self.images, *self.momenta, *self.weights)

    @classmethod
    def split(cls, tensors: Sequence[Tensor | None], rule: Rule) -> "Kept":
        """Sorts what :meth:`tensors` returned."""
        matrix, *rest = tensors
        again = rule.iterations - 1
        if is_stacked(rest, rule):
            return cls(rest[:1], images=rest[1:], matrix=matrix)  # type: ignore[arg-type]
        first = 1 if rule.draws_gradients else 2
        slopes = 0 if rule.prior.slope_from_value else again + 1 - first
        momenta = rule.recursion.momenta(rule.iterations)
        counts = [again + 1 - first, slopes, rule.images, again - 1 if momenta is None else 0, len(rest)]
        parts, start = [], 0
        for count in counts:
            parts.append(rest[start : start + count])
            start += count
        return cls(*parts, matrix=matrix)  # type: ignore[arg-type]


def may_stack(rule: Rule, rows: int, features: int) -> bool:
    """Whether a solve of this size gains by buffers.

    Args:
        rule: The solve.
        rows: How many samples there are.
        features: How many numbers each has in the largest buffer.
    """
    recursion, prior = rule.recursion, rule.prior
    if not rule.is_flat or rule.path == "columns" or rule.iterations == 1 or rule.samples.chooser is not None:
        return False
    if recursion.momentum is not None or recursion.inertia or recursion.reference:
        return False
    if not (prior.separable and prior.slope_from_value) or (
        rule.path == "two_step" and rule.images < rule.iterations - 1
    ):
        return False
    if recursion.factor is not None and not rule.draws_gradients:
        return False
    return rows < LARGE_BATCH or rows * features * rule.iterations <= LARGEST


def is_stacked(rest: Sequence[Any], rule: Rule) -> bool:
    """Whether a forward pass has left buffers: these have one more dimension than the rows of a matrix."""
    return rule.stacked and len(rest) <= 2 and len(rest) > 0 and rest[0].dim() == 3


def solve_recursion(given: Given) -> tuple[Tensor, Tensor | None]:
    """Returns ``v_T``, and ``v_1`` where that is not ``c``; gradients reach ``c``, the input, the weight and the bias."""
    live = (given.c, given.u, given.weight, given.bias)
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in live):
        v, first = _Solve.apply(*given)[:2]
        return v, first
    # The same operations as with gradients, so that the result is the same to the bit.
    with torch.no_grad():
        return _advanced(given, keep=False)[:2]


def _flattened(given: Given) -> Given:
    """Returns the solve with its dimensions merged, as its layout says."""
    rule, layout = given.rule, given.rule.layout
    c, u, bias, inputs, outputs, picks = given.c, given.u, given.bias, given.inputs, given.outputs, given.picks
    if outputs is not None and layout.kind != "space":
        outputs = torch.stack([layout.flat(one.expand(layout.shape)) for one in outputs])
    if rule.is_flat:
        u = None if u is None else u.reshape(-1, u.shape[-1])
        if bias is not None and bias.dim() > 1:
            bias = bias.expand(*layout.shape[:-1], bias.shape[-1]).reshape(-1, bias.shape[-1])
        if inputs is not None and rule.path == "masked" and inputs.dim() > 2:
            inputs = inputs.reshape(len(inputs), -1, inputs.shape[-1])
        if picks is not None:
            picks = picks.reshape(*picks.shape[:2], -1, 1)
    return given._replace(
        c=None if c is None else layout.flat(c), u=u, bias=bias, inputs=inputs, outputs=outputs, picks=picks
    )


class _Iteration:
    """What both passes know of a solve.

    Attributes:
        made: The products.
        numbers: The scalars.
        momenta: ``b_k`` of every iteration but the first, where these are numbers.
    """

    def __init__(self, given: Given, matrix: Tensor | None, weights: Sequence[Tensor] = ()):
        self.given, self.rule = given, given.rule
        rule = given.rule
        self.numbers = Numbers(given.smoothness, rule.recursion, rule.iterations, unit=rule.unit, lam=rule.lam)
        self.made: Products = make_products(given, self.numbers, matrix)
        self.made.weights = list(weights)
        self.momenta = given.rule.recursion.momenta(given.rule.iterations)

    def base(self, k: int) -> Tensor | None:
        """Returns what a full step adds: ``f_k c``, or ``t_k b`` of a sampled gradient."""
        if self.given.c is not None:
            return times(self.given.c, self.numbers.factors[k])
        return None if self.given.bias is None else times(self.given.bias, self.numbers.steps[k])

    def moves(self, k: int) -> bool:
        """Whether iteration ``k`` moves the reference point."""
        inner = self.rule.recursion.reference
        return inner is not None and k % inner == 0

    def picks(self, k: int) -> list[tuple[int, Step]]:
        """Returns which iterates make up the reference point of iteration ``k``, and their shares."""
        inner = self.rule.recursion.reference
        assert inner is not None
        if self.given.picks is None:
            return [(k, 1.0)]
        return list(zip(range(k - inner + 1, k + 1), self.given.picks[k // inner - 1].unbind(), strict=True))

    def reference(self, k: int, iterates: dict[int, Tensor]) -> Tensor | None:
        """Returns the reference point that iteration ``k`` sees; None is zero."""
        inner = self.rule.recursion.reference
        start = 0 if inner is None else k // inner * inner
        if start == 0:
            return None
        parts = [times(iterates[place], share) for place, share in self.picks(start)]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def relative(self, k: int) -> Step:
        """Returns the step of an iteration over that of its loop's first."""
        inner = self.rule.recursion.reference
        assert inner is not None
        factors = self.numbers.factors
        return factors[k] / factors[k // inner * inner]


def _iterate(
    given: Given, keep: bool, stacked: bool = False, matrix: Tensor | None = None, weights: Sequence[Tensor] = ()
) -> tuple[Tensor, Tensor, Kept]:
    """Returns ``v_T``, ``v_1`` and what the backward pass needs; differentiable, as it is written, to any order."""
    state = _Iteration(given, matrix, weights)
    rule, made, numbers = state.rule, state.made, state.numbers
    prior, recursion, again = rule.prior, rule.recursion, rule.iterations - 1
    iterates, slopes, images, momenta = [], [], [], []
    v, z = (given.c, None) if given.c is not None else made.advance(0, None, state.base(0))
    slots: Sequence[Any] = ()
    places: Sequence[Any] = (None,) * rule.iterations
    if stacked:
        buffer = v.new_empty((again, *v.shape))
        slots = buffer.unbind()
        if rule.path != "gram":
            start = 0 if rule.draws_gradients else 1
            whole = v.new_empty((rule.iterations - start, len(v), given.weight.shape[1]))
            places = (*(None,) * start, *whole.unbind())
            images.append(whole)
            if start == 0 and z is not None:
                places[0].copy_(z)
        iterates.append(buffer)
    first, anchor, out = v, v, None
    values: dict[int, Tensor] = {}
    before = ahead = memory = None
    for k in range(1, rule.iterations):
        step = numbers.steps[k - 1]
        if stacked:
            target = slots[k - 1] if v is slots[k - 1] else slots[k - 1].copy_(v)
            x = written(prior.prox_(target, step), target)
        else:
            # Where nothing else has seen v, and only its value is kept, memory is used again.
            fresh = v is not first and v is not anchor and given.outputs is None and prior.slope_from_value
            x = prior.prox_(v, step) if fresh and not torch.is_grad_enabled() else prior.prox(v, step)
        if given.outputs is not None:
            drawn = given.outputs[k - 1]
            out = drawn * v + ((1 - drawn) * out if out is not None else _undrawn(drawn, rule))
            x = drawn * x if before is None else drawn * x + (1 - drawn) * before
        if keep and not stacked and (k > 1 or given.c is None):
            # The identity returns what it was given, and v_1 is an output of its own.
            iterates.append(x.clone() if x is first else x)
            if not prior.slope_from_value:
                slopes.append(prior.derivative(v, step) if prior.separable else v)
        y, base, moved = x, None, None
        if recursion.reference is not None:
            values[k] = x
            if state.moves(k):
                y, base = state.reference(k, values), state.base(k)  # type: ignore[assignment]
            else:
                r, share = state.reference(k, values), state.relative(k)
                y = x if r is None else x - r
                base = times(anchor, share) if r is None else _anchored(anchor, r, share)
        else:
            base = state.base(k)
        if recursion.momentum is not None or recursion.inertia:
            moved = x if before is None else x - before
            weight: Step | None = None
            if state.momenta is not None:
                weight = state.momenta[k - 1] or None
            elif recursion.momentum is not None:
                with torch.no_grad():
                    weight, memory = recursion.momentum.weight(x, before, ahead, memory, rule.layout.inner)
                if keep and isinstance(weight, Tensor):
                    momenta.append(weight)
            y = x if weight is None else plus(x, moved, weight)
            ahead = y
        before = x
        v, z = made.advance(k, y, base, slots[k] if stacked and k < again else None, places[k])
        if recursion.inertia and moved is not None:
            v = v + recursion.inertia * moved
        if state.moves(k):
            anchor = v
        if keep and not stacked and z is not None and len(images) < rule.images:
            images.append(z)
    if given.outputs is not None:
        drawn = given.outputs[again]
        v = drawn * v + ((1 - drawn) * out if out is not None else _undrawn(drawn, rule))
    kept = Kept(iterates, slopes, images, momenta, made.weights if keep else (), made.matrix)
    return v, first, kept


def _undrawn(drawn: Tensor, rule: Rule) -> Any:
    """Returns the argument of outputs that have never been drawn, whose value is zero."""
    number = rule.prior.zero_argument
    assert number is not None
    return 0.0 if number == 0 else (1 - drawn) * number


def _anchored(anchor: Tensor, r: Tensor, share: Step) -> Tensor:
    """Returns ``share * v + (1 - share) r``."""
    return anchor if isinstance(share, float) and share == 1.0 else plus(anchor * share, r, 1 - share)


def written(result: Tensor, slot: Tensor) -> Tensor:
    """Returns the slot, with a result in it that may be there already."""
    return slot if result is slot else slot.copy_(result)


def _advanced(given: Given, keep: bool) -> tuple[Any, ...]:
    """Returns ``v_T``, ``v_1``, and what else the backward pass needs."""
    layout = given.rule.layout
    with autocast_off(given.weight.device):
        stacked = keep and given.rule.stacked and has_values(given.c, given.u, given.weight, given.smoothness)
        v, first, kept = _iterate(_flattened(given), keep, stacked)
        v = layout.back(v)
        started = None if given.c is not None else layout.back(first) if first is not v else v.clone()
    return (v, started, *(kept.tensors() if keep else (kept.matrix,)))


class _Solve(torch.autograd.Function):
    """``v_T``, and ``v_1`` of a sampled gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        c: Tensor | None,
        u: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        smoothness: Tensor,
        gram: Tensor | None,
        inputs: Tensor | None,
        outputs: Tensor | None,
        picks: Tensor | None,
        rule: Rule,
    ) -> tuple[Tensor | None, ...]:
        given = Given(c, u, weight, bias, smoothness, gram, inputs, outputs, picks, rule)
        return _advanced(given, keep=not rule.low)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        *tensors, ctx.rule = inputs
        ctx.mark_non_differentiable(*(one for one in output[2:] if one is not None))
        # The last one, v_T, is not kept: an activation behind the block may overwrite it.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output[2:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors, rest = ctx.saved_tensors[:9], ctx.saved_tensors[9:]
        given, needs = Given(*tensors, ctx.rule), ctx.needs_input_grad[:4]
        grad, grad_first = grads[:2]
        if grad is None and grad_first is None:
            return (None,) * 10
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return (*_recorded(grad, grad_first, given, rest, needs), *(None,) * 6)
        with autocast_off(given.weight.device):
            found = _backward(grad, grad_first, given, rest, needs)
        return (*found, *(None,) * 6)


# torch looks the arguments up in every call, which takes as long as a few small products.
_Solve.forward.__signature__ = inspect.signature(_Solve.forward)  # type: ignore[attr-defined]


def _recorded(
    grad: Tensor | None, grad_first: Tensor | None, given: Given, rest: Sequence[Any], needs: Sequence[bool]
) -> list[Tensor | None]:
    """Returns the gradients as functions of all they depend on, for a derivative of them."""
    # As views: one may have been computed from another, and what reaches it through that is not asked for here.
    views = [None if one is None else one.view_as(one) for one in given[:4]]
    live = [one for one, needed in zip(views, needs, strict=True) if needed and one is not None]
    weights = () if given.rule.samples.chooser is None else Kept.split(rest, given.rule).weights
    given = Given(*views, *given[4:])  # type: ignore[arg-type]
    given = given._replace(gram=None) if needs[2] else given
    with autocast_off(given.weight.device):
        out = _iterate(_flattened(given), keep=False, weights=weights)[:2]
    out = [given.rule.layout.back(one) for one in out]
    pairs = [(one, above) for one, above in zip(out, (grad, grad_first), strict=True) if above is not None]
    outs, above = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(outs, live, above, create_graph=True, allow_unused=True))
    return [next(found) if needed else None for needed in needs]


def _backward(
    grad: Tensor | None, grad_first: Tensor | None, given: Given, rest: Sequence[Any], needs: Sequence[bool]
) -> list[Tensor | None]:
    """Returns the gradients of ``c``, the input, the weight and the bias, those that are needed."""
    rule, layout, whole = given.rule, given.rule.layout, given
    given = _flattened(given)
    values = has_values(given.c, given.u, given.weight, given.smoothness, grad, grad_first)
    kept = Kept.split(rest, rule)
    stacked = rule.stacked and values
    if rule.low:
        kept = _iterate(given, True, stacked, kept.matrix)[2]
    elif is_stacked(rest[1:], rule) and not stacked:
        # A backward pass that is compiled or transformed, unlike its forward pass.
        images = kept.images[0].unbind() if kept.images else ()
        kept = Kept(
            kept.iterates[0].unbind(), images=images[1:] if rule.draws_gradients else images, matrix=kept.matrix
        )
    elif not is_stacked(rest[1:], rule):
        stacked = False
    state = _Iteration(given, kept.matrix, kept.weights)
    grad, grad_first = (None if one is None else layout.flat(one) for one in (grad, grad_first))
    grad = torch.zeros_like(grad_first) if grad is None else grad  # type: ignore[arg-type]
    pulled = _Pulled(state, kept, needs, stacked, in_place=values)
    pulled.run(grad, grad_first)
    dc, du, dweight, db = pulled.gradients()
    if dc is not None:
        dc = dc.reshape(layout.shape) if layout.kind != "rows" or not layout.dims else layout.back(dc)
    if du is not None and whole.u is not None:
        du = du.reshape(whole.u.shape).to(whole.u.dtype)
    if db is not None and whole.bias is not None:
        db = db.reshape(layout.shape).sum_to_size(whole.bias.shape).to(whole.bias.dtype)
    return [dc, du, dweight, db]


class _Pulled:
    """One backward pass.

    Args:
        state: The solve.
        kept: What its forward pass has left.
        needs: Which of ``c``, input, weight and bias need a gradient.
        stacked: Whether the iterations are in buffers.
        in_place: Whether memory may be used again.
    """

    def __init__(self, state: _Iteration, kept: Kept, needs: Sequence[bool], stacked: bool, in_place: bool):
        self.state, self.kept, self.needs, self.stacked, self.in_place = state, kept, needs, stacked, in_place
        given, rule = state.given, state.rule
        prior, step = rule.prior, state.numbers.steps[0]
        self.iterates: list[Tensor] = list(kept.iterates[0].unbind() if stacked else kept.iterates)
        self.slopes = list(kept.slopes)
        if given.c is not None and len(self.iterates) < rule.iterations - 1:
            x = prior.prox(given.c, step)
            self.iterates.insert(0, x if given.outputs is None else given.outputs[0] * x)
            if not prior.slope_from_value:
                self.slopes.insert(0, prior.derivative(given.c, step) if prior.separable else given.c)
        self.values = dict(enumerate(self.iterates, start=1))
        self.additive: Tensor | None = None
        self.owned = False
        self.input: Tensor | None = None
        self.pending: dict[int, Tensor] = {}

    def run(self, grad: Tensor, grad_first: Tensor | None) -> None:
        """Takes the gradients of ``v_T`` and ``v_1`` back through all iterations."""
        state, rule, outputs = self.state, self.state.rule, self.state.given.outputs
        made, recursion, again = state.made, rule.recursion, rule.iterations - 1
        slots: Sequence[Any] = (None,) * rule.iterations
        places = slots
        if self.stacked:
            self.grads = grad.new_empty((rule.iterations, *grad.shape))
            slots = self.grads.unbind()
            grad = slots[again].copy_(grad)
            if rule.path != "gram":
                start = 0 if rule.draws_gradients else 1
                self.back = grad.new_empty((rule.iterations - start, len(grad), state.given.weight.shape[1]))
                places = (*(None,) * start, *self.back.unbind())
        held = later = anchored = referred = None
        if outputs is not None:
            held, grad = (1 - outputs[again]) * grad, outputs[again] * grad
        for k in range(again, 0, -1):
            if anchored is not None and state.moves(k):
                grad, anchored = grad + anchored, None
            dx, h = made.pull(k, grad, slots[k - 1], places[k])
            if self.needs[2] and not self.stacked:
                made.collect(k, grad, self._point(k), self._image(k), h)
            self._add_input(k, h)
            if recursion.reference is None:
                self._add(grad, k)
            elif state.moves(k):
                self._add(grad, k)
                total = dx if referred is None else referred + dx
                dx, referred = None, None  # type: ignore[assignment]
                for place, share in state.picks(k):
                    self._pend(place, times(total, share))
            else:
                share = state.relative(k)
                anchored = times(grad, share) if anchored is None else anchored + times(grad, share)
                if k > recursion.reference:
                    unit = isinstance(share, float) and share == 1.0
                    part = -dx if unit else grad * (1 - share) - dx
                    referred = part if referred is None else referred + part
            if recursion.momentum is not None or recursion.inertia:
                dx = self._momentum(k, dx, grad)
            if later is not None:
                # What was not drawn in the iteration after this one is still this iterate.
                dx = dx + later
            dx = self._settled(k, dx)
            grad = self._slope(k, dx, slots[k - 1])
            if outputs is not None and held is not None:
                drawn = outputs[k - 1]
                later = (1 - drawn) * dx
                grad = drawn * (grad + held)
                held = (1 - drawn) * held
        if anchored is not None:
            grad = grad + anchored
        if grad_first is not None:
            grad = grad.add_(grad_first) if self.stacked else grad + grad_first
        if rule.draws_gradients:
            _, h = made.pull(0, grad, None, places[0])
            self._add_input(0, h)
            if self.needs[2] and not self.stacked:
                made.collect(0, grad, None, made.advance(0, None, None)[1], h)
        self._add(grad, 0)

    def _point(self, k: int) -> Tensor:
        """Returns what iteration ``k`` multiplied."""
        state, x = self.state, self.values[k]
        if state.rule.recursion.reference is not None:
            r = state.reference(k, self.values)
            return x if r is None else r if state.moves(k) else x - r
        momentum = self._weight(k)
        return x if momentum is None else plus(x, x - self.values[k - 1] if k > 1 else x, momentum)

    def _weight(self, k: int) -> Step | None:
        if self.state.momenta is not None:
            return self.state.momenta[k - 1] or None
        # The first iteration has no momentum.
        return self.kept.momenta[k - 2] if k > 1 else None

    def _image(self, k: int) -> Tensor | None:
        return self.kept.images[k - 1] if k - 1 < len(self.kept.images) else None

    def _momentum(self, k: int, dy: Tensor, grad: Tensor) -> Tensor:
        """Returns the gradient of ``x_k``, and leaves that of ``x_{k-1}``."""
        weight, inertia = self._weight(k), self.state.rule.recursion.inertia
        moved = None if weight is None else weight * dy
        if inertia:
            moved = inertia * grad if moved is None else moved + inertia * grad
        if moved is None:
            return dy
        self._pend(k - 1, -moved)
        return dy + moved

    def _pend(self, place: int, part: Tensor) -> None:
        if place > 0:
            self.pending[place] = self.pending[place] + part if place in self.pending else part

    def _settled(self, k: int, dx: Tensor | None) -> Tensor:
        waiting = self.pending.pop(k, None)
        if dx is None:
            return torch.zeros_like(self.values[k]) if waiting is None else waiting
        return dx if waiting is None else dx + waiting

    def _slope(self, k: int, dx: Tensor, slot: Tensor | None) -> Tensor:
        """Returns ``J_k dx``."""
        prior, step = self.state.rule.prior, self.state.numbers.steps[k - 1]
        if self.slopes:
            return self.slopes[k - 1] * dx if prior.separable else prior.vjp(self.slopes[k - 1], step, dx)
        if slot is not None:
            return written(prior.vjp_(self.values[k], step, dx), slot)
        alone = self.in_place and self.state.given.outputs is None and self.state.rule.recursion.reference is None
        return (prior.vjp_ if alone else prior.vjp)(self.values[k], step, dx)

    def _add(self, grad: Tensor, k: int) -> None:
        """Adds the share of ``c``, or of the bias."""
        if self.stacked or not (self.needs[0] or self.needs[3]):
            return
        numbers, sampled = self.state.numbers, self.state.rule.draws_gradients
        part = times(grad, numbers.steps[k] if sampled else numbers.factors[k])
        if self.additive is None:
            # Not ours to write to.
            self.additive = part
        elif self.owned:
            self.additive.add_(part)
        else:
            self.additive, self.owned = self.additive + part, True

    def _add_input(self, k: int, h: Tensor | None) -> None:
        if not self.needs[1] or self.stacked or h is None:
            return
        given = self.state.given
        if self.state.rule.path != "columns":
            # Also a factor of the weight's gradient: nothing is added to it in place.
            self.input = h if self.input is None else self.input + h
            return
        assert given.u is not None and given.inputs is not None
        total = torch.zeros_like(given.u, dtype=h.dtype) if self.input is None else self.input
        self.input = total.index_add(self.state.rule.operator.feature_dim, given.inputs[k], h)

    def gradients(self) -> list[Tensor | None]:
        """Returns those of ``c``, input, weight and bias."""
        state, made, needs = self.state, self.state.made, self.needs
        if self.stacked:
            sampled = state.rule.draws_gradients
            if sampled and needs[3]:
                steps = self.grads.new_tensor(state.numbers.steps)
                self.additive = (steps @ self.grads.flatten(1)).reshape(self.grads.shape[1:])
            elif needs[0]:
                self.additive = self.grads.sum(0)
            if needs[1]:
                self.input = self.back.sum(0)
            if needs[2]:
                rows = [one.reshape(-1, one.shape[-1]) for one in (*self.kept.iterates, *self.kept.images)]
                image = rows[1] if len(rows) > 1 else None
                h = None if image is None else (self.back[1:] if sampled else self.back).flatten(0, 1)
                grads = (self.grads if sampled else self.grads[1:]).reshape(-1, self.grads.shape[-1])
                made.collect(1, grads, rows[0], image, h)
        weight = made.weight_gradient() if needs[2] else None
        return [
            self.additive if needs[0] else None,
            self.input if needs[1] else None,
            weight,
            self.additive if needs[3] else None,
        ]
