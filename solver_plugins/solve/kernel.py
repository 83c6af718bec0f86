"""Runs any declared recursion, with a backward pass that is written by hand.

    d_k = sum_j p_kj x_j,      v_{k+1} = M_k d_k + f_k c + sum_j q_kj x_j + e_k v_o,      x_k = prox(v_k)

    G_T = dv_T,     dx_j = sum_k p_kj M_k G_{k+1} + q_kj G_{k+1},     G_k = J_k dx_k,     dc = sum_k f_k G_{k+1} + G_1

``J_k`` is the derivative of the proximal map, ``v_o`` the step from a reference point; ``dA`` is that of products.py.
A gate ``a`` makes ``v_1 + a (v_{k+1} - v_1)`` of every ``v_{k+1}`` but those that a reference point is asked for; back
it is ``a G_{k+1}`` that goes on, ``(1 - a) G_{k+1}`` goes to ``v_1``, and ``<G_{k+1}, v_{k+1} - v_1>`` to ``a``.
The iterates are kept, ``J_k`` only where the iterate does not tell it (ReLU: its sign does), and ``z_k`` as the rule
says: one by one, or where layers are small, which take longer to call than to multiply, in one buffer for all
iterations, where every product writes its result. Where derivatives of higher order are asked for, the backward pass
is that of the iterations themselves, so that those are right, too.
"""

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from solver_plugins.operators import autocast_off
from solver_plugins.prox import Step
from solver_plugins.solve.layout import Parts, chosen, combined
from solver_plugins.solve.products import make_products
from solver_plugins.solve.recursion import Given, Kept
from solver_plugins.solve.steps import Numbers, has_values, is_one, times


def solve_recursion(given: Given) -> tuple[Tensor, Tensor | None]:
    """Returns ``v_T``, and ``v_1`` where that is not ``c``; gradients reach all but constants."""
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in given[:5]):
        return _Solve.apply(*given)[:2]
    # The same operations as with gradients, so that the result is the same to the bit.
    with torch.no_grad():
        return _advanced(given, keep=False)[:2]


class Terms(NamedTuple):
    """What an iteration multiplies and adds.

    Attributes:
        point: ``p_kj``.
        base: ``q_kj``.
        anchor: ``e_k``; None for zero.
        additive: ``f_k``, or ``t_k`` of the bias of a sampled gradient; None for zero.
    """

    point: Parts
    base: Parts
    anchor: Step | None
    additive: Step | None


class _Iterations:
    """What both passes know of a solve."""

    def __init__(self, given: Given, matrix: Tensor | None = None, weights: Sequence[Tensor] = ()):
        self.given, self.rule, self.recursion = given, given.rule, given.rule.recursion
        rule = given.rule
        lam = rule.lam if given.lam is None else given.lam
        self.numbers = Numbers(given.smoothness, rule.recursion.factor, rule.iterations, unit=rule.unit, lam=lam)
        self.made = make_products(given, self.numbers, matrix, weights)
        self.momenta = rule.recursion.momenta(rule.iterations)
        self.draws_gradients = rule.draws_gradients
        self.source = given.bias if given.c is None else given.c

    def terms(self, k: int, momentum: Step | None) -> Terms:
        """Returns the terms of iteration ``k``, given ``b_k``."""
        recursion, numbers = self.recursion, self.numbers
        additive = numbers.steps[k] if self.draws_gradients else numbers.factors[k]
        if recursion.reference is not None:
            start = k // recursion.reference * recursion.reference
            point: Parts = self._reference(start)
            if k == start:
                return Terms(point, [], None, additive)
            share = numbers.factors[k] / numbers.factors[start]
            base: Parts = [] if is_one(share) else [(j, one * (1 - share)) for j, one in point]
            return Terms([(k, 1.0), *((j, -one) for j, one in point)], base, share, None)
        inertia = recursion.inertia
        point = [(k, 1.0)]
        if momentum is not None and k > 1:
            point = [(k, 1 + momentum), (k - 1, -momentum)]
        added: Parts = []
        if inertia:
            added = [(k, inertia), (k - 1, -inertia)] if k > 1 else [(k, inertia)]
        return Terms(point, added, None, additive)

    def _reference(self, start: int) -> Parts:
        """Returns what the reference point of a loop is made of; nothing is zero."""
        if start == 0:
            return []
        picks, inner = self.given.picks, self.recursion.reference
        assert inner is not None
        if picks is None:
            return [(start, 1.0)]
        return list(zip(range(start - inner + 1, start + 1), picks[start // inner - 1].unbind(), strict=True))

    def additive(self, share: Step | None) -> Tensor | None:
        """Returns ``f_k c``, or ``t_k b``."""
        return None if self.source is None or share is None else times(self.source, share)

    def buffers(self, like: Tensor, count: int) -> tuple[Tensor, Tensor | None, list[Any], list[Any]]:
        """Returns a buffer of outputs and one of inputs (None where there are none), and their slots by iteration."""
        outputs, start = like.new_empty((count, *like.shape)), 0 if self.rule.draws_gradients else 1
        if self.rule.path == "gram":
            return outputs, None, list(outputs.unbind()), [None] * self.rule.iterations
        inputs = like.new_empty((self.rule.iterations - start, len(like), self.given.weight.shape[1]))
        return outputs, inputs, list(outputs.unbind()), [*[None] * start, *inputs.unbind()]


def _iterate(given: Given, keep: bool, stacked: bool = False, **made: Any) -> tuple[Tensor, Tensor, Kept]:
    """Returns ``v_T``, ``v_1`` and what the backward pass needs; differentiable, as it is written, to any order."""
    state = _Iterations(given, **made)
    rule, recursion, prior, numbers = state.rule, state.recursion, state.rule.prior, state.numbers
    again, outputs = rule.iterations - 1, given.outputs
    slots: list[Any] = [None] * rule.iterations
    places = slots
    first, z = (given.c, None) if given.c is not None else state.made.advance(0, None, state.additive(numbers.steps[0]))
    if stacked:
        buffer, whole, slots, places = state.buffers(first, again)
        slots.append(None)
        if z is not None:
            places[0].copy_(z)
    kept, v, anchor = Kept(weights=state.made.weights), first, first
    gate = None if given.gate is None else rule.layout.per_feature(given.gate)
    moved = first.new_empty((again, *first.shape)) if stacked and gate is not None else None
    values: dict[int, Tensor] = {}
    x: Tensor | None = None
    ahead = memory = out = None
    for k in range(1, rule.iterations):
        step, before = numbers.steps[k - 1], x
        if stacked:
            v = v if v is slots[k - 1] else slots[k - 1].copy_(v)
        # Where nothing else has seen v, and only its value is kept, memory is used again.
        fresh = v is not first and v is not anchor and outputs is None and prior.slope_from_value
        x = (prior.prox_ if fresh and not torch.is_grad_enabled() else prior.prox)(v, step)
        x = slots[k - 1].copy_(x) if stacked and x is not v else x
        if outputs is not None:
            out = chosen(outputs[k - 1], v, out, prior.zero_argument)
            x = chosen(outputs[k - 1], x, before, 0.0)
        values[k] = x
        if keep and not stacked and (k > 1 or given.c is None):
            # The identity returns what it was given, and v_1 is an output of its own.
            kept.iterates.append(x.clone() if x is first else x)
            if not prior.slope_from_value:
                kept.slopes.append(prior.derivative(v, step) if prior.separable else v)
        momentum: Any = None if state.momenta is None else state.momenta[k - 1] or None
        if state.momenta is None and recursion.momentum is not None:
            momentum, memory = recursion.momentum.weight(x, before, ahead, memory, rule.layout.inner)
            if keep and momentum is not None:
                kept.momenta.append(momentum)
        terms = state.terms(k, momentum)
        ahead = combined(terms.point, values)
        base = state.additive(terms.additive) if terms.anchor is None else times(anchor, terms.anchor)
        to = slots[k] if moved is None else moved[k - 1]
        v, z = state.made.advance(k, ahead, combined(terms.base, values, base), (to, places[k]))
        if recursion.reference is not None and k % recursion.reference == 0:
            anchor = v
        if gate is not None:
            there, v = v, torch.lerp(first, v, gate)
            if moved is not None:
                torch.sub(there, first, out=to)
            elif keep:
                kept.moved.append(there - first)
        if keep and not stacked and z is not None and len(kept.images) < rule.images:
            kept.images.append(z)
    if outputs is not None:
        v = chosen(outputs[again], v, out, prior.zero_argument)
    if stacked:
        kept = Kept([buffer], images=[] if whole is None else [whole], moved=[] if moved is None else [moved])
        kept.stacked = True
    kept.matrix = state.made.matrix
    return v, first, kept


def _advanced(given: Given, keep: bool) -> tuple[Any, ...]:
    """Returns ``v_T``, ``v_1`` of a sampled gradient, and what else the backward pass needs."""
    layout = given.rule.layout
    with autocast_off(given.weight.device):
        stacked = keep and given.rule.stacked and has_values(*given[:6])
        v, first, kept = _iterate(given.flattened(), keep, stacked)
        started = None if given.c is not None else layout.back(first if first is not v else v.clone())
        return (layout.back(v), started, *(kept.tensors() if keep else (kept.matrix,)))


class _Solve(torch.autograd.Function):
    """``v_T``, and ``v_1`` of a sampled gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*given: Any) -> tuple[Tensor | None, ...]:
        return _advanced(Given(*given), keep=not given[-1].low)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        *tensors, ctx.rule = inputs
        ctx.mark_non_differentiable(*(one for one in output[2:] if one is not None))
        # The last one, v_T, is not kept: an activation behind the block may overwrite it.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output[2:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # Looked at once: a checkpointed segment would be computed again for a second look.
        saved, count = ctx.saved_tensors, len(Given._fields) - 1
        given, rest = Given._make((*saved[:count], ctx.rule)), saved[count:]
        needs = ctx.needs_input_grad[:5]
        found: list[Tensor | None] = [None] * 5
        if grads[0] is not None or grads[1] is not None:
            recorded = torch.is_grad_enabled() and not torch.compiler.is_compiling()
            with autocast_off(given.weight.device):
                found = (_recorded if recorded else _backward)(grads[:2], given, rest, needs)
        return (*found, *(None,) * (count - 4))


# torch looks the arguments up in every call, which takes as long as a few small products.
_Solve.forward.__signature__ = inspect.signature(_Solve.forward)  # type: ignore[attr-defined]


def _recorded(
    grads: Sequence[Tensor | None], given: Given, rest: Sequence[Any], needs: Sequence[bool]
) -> list[Tensor | None]:
    """Returns the gradients as functions of all they depend on, for a derivative of them."""
    # As views: one may have been computed from another, and what reaches it through that is not asked for here.
    views = [None if one is None else one.view_as(one) for one in given[:5]]
    live = [one for one, needed in zip(views, needs, strict=True) if needed and one is not None]
    weights = () if given.rule.samples.chooser is None else Kept.split(rest, given.rule).weights
    given = Given._make((*views, *given[5:]))._replace(gram=None if needs[2] else given.gram)
    out = _iterate(given.flattened(), keep=False, weights=weights)[:2]
    pairs = [(given.rule.layout.back(one), above) for one, above in zip(out, grads, strict=True) if above is not None]
    outs, above = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(outs, live, above, create_graph=True, allow_unused=True))
    return [next(found) if needed else None for needed in needs]


def _backward(
    grads: Sequence[Tensor | None], whole: Given, rest: Sequence[Any], needs: Sequence[bool]
) -> list[Tensor | None]:
    """Returns the gradients of ``c``, the input, the weight, the bias and the gate, those that are needed."""
    rule, layout, given = whole.rule, whole.rule.layout, whole.flattened()
    values, kept = has_values(*whole[:6], *grads), Kept.split(rest, rule)
    if rule.low:
        kept = _iterate(given, True, rule.stacked and values, matrix=kept.matrix)[2]
    elif kept.stacked and not values:
        # A backward pass that is compiled or transformed, unlike its forward pass.
        kept = kept.unstacked(rule)
    state = _Iterations(given, kept.matrix, kept.weights)
    last, first = (None if one is None else layout.flat(one) for one in grads)
    found = _Pulled(state, kept, needs, values)
    found.run(torch.zeros_like(first) if last is None else last, first)  # type: ignore[arg-type]
    additive, du, dweight = found.gradients()
    if additive is not None:
        additive = layout.back(additive) if layout.kind == "rows" and layout.dims else additive.reshape(layout.shape)
    du = None if du is None or whole.u is None else du.reshape(whole.u.shape).to(whole.u.dtype)
    if whole.bias is not None and additive is not None:
        additive = additive.sum_to_size(whole.bias.shape).to(whole.bias.dtype)
    return [additive if needs[0] else None, du, dweight, additive if needs[3] else None, found.gate]


class _Pulled:
    """One backward pass; ``in_place`` says whether memory may be used again."""

    def __init__(self, state: _Iterations, kept: Kept, needs: Sequence[bool], in_place: bool):
        self.state, self.kept, self.needs, self.stacked = state, kept, needs, kept.stacked
        given, prior, step = state.given, state.rule.prior, state.numbers.steps[0]
        iterates: list[Tensor] = list(kept.iterates[0].unbind() if kept.stacked else kept.iterates)
        self.slopes = list(kept.slopes)
        if given.c is not None and not kept.stacked:
            x = prior.prox(given.c, step)
            iterates.insert(0, x if given.outputs is None else given.outputs[0] * x)
            if not prior.slope_from_value:
                self.slopes.insert(0, prior.derivative(given.c, step) if prior.separable else given.c)
        self.values = dict(enumerate(iterates, start=1))
        alone = given.outputs is None and state.recursion.reference is None and not state.recursion.inertia
        self.in_place = in_place and alone
        self.pending: dict[int, Tensor] = {}
        self.additive: Tensor | None = None
        self.input: Tensor | None = None
        self.owned = False
        self.first: Tensor | None = None
        self.gate: Tensor | None = None
        self.opened = None if given.gate is None else state.rule.layout.per_feature(given.gate)
        self.moved = list(kept.moved[0].unbind() if kept.stacked and kept.moved else kept.moved)

    def run(self, grad: Tensor, grad_first: Tensor | None) -> None:
        """Takes the gradients of ``v_T`` and ``v_1`` back through all iterations."""
        state, rule = self.state, self.state.rule
        outputs, inner = state.given.outputs, rule.recursion.reference
        again, made = rule.iterations - 1, state.made
        slots: list[Any] = [None] * rule.iterations
        places = slots
        if self.stacked:
            self.grads, self.pulled, slots, places = state.buffers(grad, rule.iterations)
            grad = slots[again].copy_(grad)
        held = anchored = None
        if outputs is not None:
            drawn = outputs[again] * grad
            held, grad = grad - drawn, drawn
        for k in range(again, 0, -1):
            if self.opened is not None:
                grad = self._gated(k, grad, self.opened)
            if inner is not None and k % inner == 0 and anchored is not None:
                grad, anchored = grad + anchored, None
            terms = state.terms(k, self._momentum(k))
            dd, h = made.pull(k, grad, (slots[k - 1], places[k]))
            if self.needs[2] and not self.stacked:
                image = self.kept.images[k - 1] if k <= len(self.kept.images) else None
                made.collect(k, grad, combined(terms.point, self.values), image, h)
            if not self.stacked:
                self._add(k, grad, terms.additive, h)
            for source, parts in ((dd, terms.point), (grad, terms.base)):
                for place, share in parts:
                    self._pend(place, times(source, share))
            if terms.anchor is not None:
                part = times(grad, terms.anchor)
                anchored = part if anchored is None else anchored + part
            dx = self.pending.pop(k)
            grad = self._slope(k, dx, slots[k - 1])
            if outputs is not None and held is not None:
                # What was not drawn is still the iterate before.
                if k > 1:
                    self._pend(k - 1, dx - outputs[k - 1] * dx)
                drawn = outputs[k - 1] * held
                grad, held = outputs[k - 1] * grad + drawn, held - drawn
        for part in (anchored, self.first, grad_first):
            if part is not None:
                grad = grad.add_(part) if self.stacked else grad + part
        h = None
        if rule.draws_gradients:
            h = made.pull(0, grad, (None, places[0]))[1]
            if self.needs[2] and not self.stacked:
                made.collect(0, grad, None, None, h)
        if not self.stacked:
            self._add(0, grad, state.numbers.steps[0] if rule.draws_gradients else 1.0, h)

    def _gated(self, k: int, grad: Tensor, opened: Tensor) -> Tensor:
        """Returns ``a G`` and takes note of the shares of the gate and of ``v_1``."""
        gate = self.state.given.gate
        if self.needs[4] and gate is not None:
            part = self.state.rule.layout.feature_sums(grad * self.moved[k - 1], gate)
            self.gate = part if self.gate is None else self.gate + part
        passed = grad * opened
        self.first = grad - passed if self.first is None else self.first + (grad - passed)
        return grad.copy_(passed) if self.stacked else passed

    def _momentum(self, k: int) -> Step | None:
        if self.state.momenta is not None:
            return self.state.momenta[k - 1] or None
        # The first iteration has no momentum.
        return self.kept.momenta[k - 2] if k > 1 else None

    def _pend(self, place: int, part: Tensor) -> None:
        self.pending[place] = self.pending[place] + part if place in self.pending else part

    def _slope(self, k: int, dx: Tensor, slot: Tensor | None) -> Tensor:
        """Returns ``J_k dx``."""
        prior, step = self.state.rule.prior, self.state.numbers.steps[k - 1]
        if self.slopes:
            return self.slopes[k - 1] * dx if prior.separable else prior.vjp(self.slopes[k - 1], step, dx)
        found = (prior.vjp_ if self.in_place else prior.vjp)(self.values[k], step, dx)
        return found if slot is None or found is slot else slot.copy_(found)

    def _add(self, k: int, grad: Tensor, share: Step | None, h: Tensor | None) -> None:
        """Adds the share of ``c``, or of the bias, and that of the input."""
        if share is not None and (self.needs[0] or self.needs[3]):
            part = times(grad, share)
            # In place from the second one on: the first is not ours to write to.
            if self.additive is None:
                self.additive = part
            else:
                self.additive = self.additive.add_(part) if self.owned else self.additive + part
                self.owned = True
        if self.needs[1] and h is not None:
            given, dim = self.state.given, self.state.rule.operator.feature_dim
            if self.state.rule.path == "columns" and given.inputs is not None and given.u is not None:
                total = torch.zeros_like(given.u, dtype=h.dtype) if self.input is None else self.input
                self.input = total.index_add(dim, given.inputs[k], h)
            else:
                self.input = h if self.input is None else self.input + h

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Returns those of what is added, of the input and of the weight."""
        made, sampled = self.state.made, self.state.rule.draws_gradients
        if self.stacked:
            start = 0 if sampled else 1
            if sampled and self.needs[3]:
                steps = self.grads.new_tensor(self.state.numbers.steps)
                self.additive = (steps @ self.grads.flatten(1)).reshape(self.grads.shape[1:])
            elif self.needs[0]:
                self.additive = self.grads.sum(0)
            if self.needs[1] and self.pulled is not None:
                self.input = self.pulled.sum(0)
            if self.needs[2]:
                h = None if self.pulled is None else self.pulled[1 - start :].flatten(0, 1)
                image = self.kept.images[0].flatten(0, 1) if self.kept.images else None
                made.collect(1, self.grads[start:].flatten(0, 1), self.kept.iterates[0].flatten(0, 1), image, h)
        return self.additive, self.input, made.weight_gradient() if self.needs[2] else None
