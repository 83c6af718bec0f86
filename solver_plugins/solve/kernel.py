"""Runs any declared recursion, with a backward pass that is written by hand.

    d_k = x_k + b_k (x_k - x_{k-1}),    v_{k+1} = M_k d_k + m (x_k - x_{k-1}) + f_k c,    x_k = prox(v_k)

    G_T = dv_T,     D_k = M_k G_{k+1},     dx_k = (1 + b_k) D_k + m G_{k+1} - b_{k+1} D_{k+1} - m G_{k+2},
    G_k = J_k dx_k,     dc = G_1 + sum_k f_k G_{k+1}

``J_k`` is the derivative of the proximal map; ``dA`` is that of products.py. With a reference point ``r``, a mean of
iterates, ``d_k = x_k - r``, and ``v_o``, the step from ``r``, is added. A gate ``a`` makes ``v_1 + a (v_{k+1} - v_1)``
of every ``v_{k+1}`` (but of ``v_o``); back it is ``a G_{k+1}`` that goes on, ``(1 - a) G_{k+1}`` goes to ``v_1``, and
``<G_{k+1}, v_{k+1} - v_1>`` to ``a``. Outputs that are not drawn keep their last ``v``.

The iterates are kept, ``J_k`` only where the iterate does not tell it (ReLU: its sign does), and ``z_k`` as the rule
says: one by one, or where layers are small, which take longer to call than to multiply, in one buffer for all
iterations, where every product writes its result. Where derivatives of higher order are asked for, the backward pass
is that of the iterations themselves, so that those are right, too.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from solver_plugins.operators import autocast_off
from solver_plugins.prox import Step
from solver_plugins.solve.products import make_products
from solver_plugins.solve.recursion import Given
from solver_plugins.solve.steps import Numbers, has_values, is_one, times

Kept = dict[str, list[Tensor]]
"""What a solve leaves for its backward pass, one tensor for each iteration, or one buffer for all of them.

"x": ``x_k``; one by one and where ``c`` is given, without the first, ``prox(c)``. "slope": ``J_k`` where the iterate
does not tell it; for a prior that is not separable, ``v_k``. "z": ``z_k`` of the first iterations. "momentum": ``b_k``,
where they are tensors. "moved": ``v_{k+1} - v_1`` before a gate acts on it. "weights": What a chooser has drawn.
"matrix": What the products made of ``A A^T``, once for both passes.
"""
LIVE = 5
"""This many of the tensors that are given may need gradients."""


def solve_recursion(given: Given) -> tuple[Tensor, Tensor | None]:
    """Returns ``v_T``, and ``v_1`` where that is not ``c``; gradients reach all but constants."""
    live: tuple[Any, ...] = given[:LIVE]
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in live):
        found: tuple[Tensor, Tensor | None] = _Solve.apply(*given)
        return found
    # The same operations as with gradients, so that the result is the same to the bit.
    with torch.no_grad(), autocast_off(given.weight.device):
        return _iterate(given)[:2]


class _Iterations:
    """What both passes know of a solve."""

    def __init__(self, given: Given, matrix: Tensor | None = None, weights: Sequence[Tensor] = ()):
        rule = given.rule
        lam = rule.lam if given.lam is None else given.lam
        self.given, self.inner = given, rule.recursion.reference
        self.numbers = Numbers(given.smoothness, rule.recursion.factor, rule.iterations, unit=rule.unit, lam=lam)
        self.made = make_products(given, self.numbers, matrix, weights)
        self.momenta = rule.recursion.momenta(rule.iterations)
        # The shares of c (or of the bias of a sampled gradient) in every iteration, and those of v_o.
        factors, inner = self.numbers.factors, self.inner
        self.additive: list[Step | None] = [*(self.numbers.steps if rule.sampled else factors)]
        self.held: list[Step] = []
        if inner is not None:
            self.additive = [None if k % inner else one for k, one in enumerate(factors)]
            self.held = [one / factors[k // inner * inner] for k, one in enumerate(factors)]

    def picked(self, k: int) -> list[tuple[int, Step]]:
        """Returns which iterates, with which shares, the reference point of an iteration is made of; none is zero."""
        picks, inner = self.given.picks, self.inner
        if inner is None or k < inner:
            return []
        start = k // inner * inner
        if picks is None:
            return [(start, 1.0)]
        return list(zip(range(start - inner + 1, start + 1), picks[k // inner - 1].unbind(), strict=True))

    def reference(self, k: int, values: dict[int, Tensor]) -> Tensor | None:
        """Returns the reference point of an iteration."""
        found = None
        for place, share in self.picked(k):
            part = times(values[place], share)
            found = part if found is None else found + part
        return found

    def point(self, k: int, x: Tensor, before: Tensor | None, momentum: Step | None, r: Tensor | None) -> Tensor | None:
        """Returns ``d_k``."""
        if self.inner is None:
            return x if momentum is None or before is None else x + momentum * (x - before)
        return r if k % self.inner == 0 else x if r is None else x - r


def new_buffers(given: Given, like: Tensor, count: int) -> tuple[Tensor, Tensor | None, list[Any], list[Any]]:
    """Returns a buffer of outputs and one of inputs (None where there are none), and their slots by iteration."""
    rule, start = given.rule, 0 if given.rule.sampled else 1
    outputs = like.new_empty((count, *like.shape))
    if rule.path == "gram":
        return outputs, None, [*outputs.unbind(), None], [None] * rule.iterations
    inputs = like.new_empty((rule.iterations - start, len(like), given.weight.shape[1]))
    return outputs, inputs, [*outputs.unbind(), None], [*[None] * start, *inputs.unbind()]


def _iterate(
    given: Given,
    keep: bool = False,
    stacked: bool = False,
    matrix: Tensor | None = None,
    weights: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor | None, Kept]:
    """Returns ``v_T``, ``v_1`` and what the backward pass needs; differentiable, as it is written, to any order."""
    run, rule = _Iterations(given, matrix, weights), given.rule
    recursion, prior, steps, made, inner = rule.recursion, rule.prior, run.numbers.steps, run.made, run.inner
    outputs, gate, source = given.outputs, given.gate, given.bias if given.c is None else given.c
    kept: Kept = {name: [] for name in ("x", "slope", "z", "momentum", "moved")}
    first, z = given.c, None
    if first is None:
        first, z = made.advance(0, None, None if source is None else times(source, steps[0]))
    out = anchor = v = first if outputs is None else _drawn(outputs[0], first, None, prior.zero_argument)
    slots: list[Any] = [None] * rule.iterations
    places, whole = slots, None
    if stacked:
        buffer, whole, slots, places = new_buffers(given, first, rule.iterations - 1)
        kept["x"].append(buffer)
        v = slots[0].copy_(v)
        if z is not None:
            places[0].copy_(z)
    # Where only the value of v is kept, memory is used again.
    reuses = outputs is None and prior.slope_from_value and not torch.is_grad_enabled()
    values: dict[int, Tensor] = {}
    x: Tensor | None = None
    before = r = ahead = x
    memory: Any = None
    for k in range(1, rule.iterations):
        before, fresh = x, reuses and v is not first and v is not anchor
        x = (prior.prox_ if fresh else prior.prox)(v, steps[k - 1])
        x = slots[k - 1].copy_(x) if stacked and x is not v else x
        if keep and not stacked and (k > 1 or given.c is None):
            # The identity returns what it was given, and v_1 is an output of its own.
            kept["x"].append(x.clone() if x is first else x)
            if not prior.slope_from_value:
                kept["slope"].append(prior.derivative(v, steps[k - 1]) if prior.separable else v)
        share = run.additive[k]
        base = None if source is None or share is None else times(source, share)
        momentum: Any = None
        if inner is not None:
            values[k] = x
            if k % inner == 0:
                r, values = run.reference(k, values), {}
            else:
                held = run.held[k]
                base = times(anchor, held) if r is None or is_one(held) else times(anchor, held) + r * (1 - held)
        elif run.momenta is None:
            assert recursion.momentum is not None
            momentum, memory = recursion.momentum.weight(x, before, ahead, memory, rule.inner)
            if keep and momentum is not None:
                kept["momentum"].append(momentum)
        else:
            momentum = run.momenta[k - 1] or None
        if recursion.inertia:
            moved = (x if before is None else x - before) * recursion.inertia
            base = moved if base is None else base + moved
        ahead = run.point(k, x, before, momentum, r)
        v, z = made.advance(k, ahead, base, slots[k] if gate is None else None, places[k])
        if inner is not None and k % inner == 0:
            anchor = v
        if gate is not None:
            there, v = v, torch.lerp(first, v, gate)
            v = slots[k].copy_(v) if slots[k] is not None else v
            if keep:
                kept["moved"].append(there - first)
        if outputs is not None:
            out = v = _drawn(outputs[k], v, out, None)
        if keep and not stacked and z is not None and len(kept["z"]) < rule.images:
            kept["z"].append(z)
    if whole is not None:
        kept["z"].append(whole)
    kept["weights"], kept["matrix"] = made.weights, [] if made.matrix is None else [made.matrix]
    return v, None if given.c is not None else first, kept


def _drawn(mask: Tensor, v: Tensor, out: Tensor | None, otherwise: float | None) -> Tensor:
    """Returns ``v`` where it was drawn, elsewhere what was there before, or a number."""
    if out is not None:
        return torch.lerp(out, v, mask)
    return mask * v + (1 - mask) * otherwise if otherwise else mask * v


class _Solve(torch.autograd.Function):
    """``v_T``, and ``v_1`` of a sampled gradient."""

    @staticmethod
    def forward(ctx: Any, *tensors: Any) -> tuple[Tensor, Tensor | None]:
        given = Given(*tensors)
        rule, stacked = given.rule, given.rule.stacked and not given.rule.low and has_values(*tensors[:-1])
        with autocast_off(given.weight.device):
            v, first, kept = _iterate(given, not rule.low, stacked)
        # The last one, v_T, is not kept: an activation behind the block may overwrite it.
        ctx.rule, ctx.stacked, ctx.counts = rule, stacked, {name: len(parts) for name, parts in kept.items()}
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*given[:-1], *(one for parts in kept.values() for one in parts))
        return v, first

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # Looked at once: a checkpointed segment would be computed again for a second look.
        saved = ctx.saved_tensors
        count, needs = len(Given._fields) - 1, ctx.needs_input_grad[:LIVE]
        given, rest = Given._make((*saved[:count], ctx.rule)), iter(saved[count:])
        kept = {name: list(islice(rest, parts)) for name, parts in ctx.counts.items()}
        found: list[Tensor | None] = [None] * LIVE
        if grads[0] is not None or grads[1] is not None:
            with autocast_off(given.weight.device):
                if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                    found = _recorded(given, kept["weights"], needs, grads)
                else:
                    found = _backward(given, kept, ctx.stacked, needs, grads)
        return (*found, *(None,) * (len(Given._fields) - LIVE))


def _recorded(
    given: Given, weights: Sequence[Tensor], needs: Sequence[bool], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Returns the gradients as functions of all they depend on, for a derivative of them."""
    # As views: one may have been computed from another, and what reaches it through that is not asked for here.
    tensors: tuple[Any, ...] = given[:LIVE]
    views = [None if one is None else one.view_as(one) for one in tensors]
    live = [one for one, needed in zip(views, needs, strict=True) if needed and one is not None]
    given = Given._make((*views, *given[LIVE:]))._replace(gram=None if needs[2] else given.gram)
    outs = _iterate(given, weights=weights)[:2]
    pairs = [(one, above) for one, above in zip(outs, grads, strict=True) if one is not None and above is not None]
    ends, above = zip(*pairs, strict=True)
    found: Iterator[Any] = iter(torch.autograd.grad(ends, live, above, create_graph=True, allow_unused=True))
    return [next(found) if needed else None for needed in needs]


class _Total:
    """A sum that writes to memory of its own alone."""

    def __init__(self) -> None:
        self.value: Any = None
        self.owned = False

    def add(self, part: Tensor, share: Step = 1.0) -> None:
        if self.value is None:
            self.value, self.owned = times(part, share), False
        elif isinstance(share, Tensor) or not self.owned:
            self.value, self.owned = self.value + times(part, share), True
        else:
            self.value.add_(part, alpha=share)

    def taken(self, like: Tensor) -> Tensor:
        """Returns ``like`` with this sum added, which then is zero again."""
        value, self.value = self.value, None
        return like if value is None else like + value


def _backward(
    given: Given, kept: Kept, stacked: bool, needs: Sequence[bool], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Returns the gradients of ``c``, the input, the weight, the bias and the gate, those that are needed."""
    rule, prior, at_hand = given.rule, given.rule.prior, has_values(*given[:-1], *grads)
    if rule.low:
        stacked, matrix = rule.stacked and at_hand, next(iter(kept["matrix"]), None)
        kept = _iterate(given, True, stacked, matrix)[2]
    run = _Iterations(given, next(iter(kept["matrix"]), None), kept["weights"])
    made, inner, inertia, steps, outputs = run.made, run.inner, rule.recursion.inertia, run.numbers.steps, given.outputs
    additive, du, first, anchored, dr, gate = (_Total() for _ in range(6))
    slots: list[Any] = [None] * (rule.iterations + 1)
    places, start = slots, 0 if rule.sampled else 1
    xs, images, slopes = kept["x"], kept["z"], kept["slope"]
    grad = grads[0]
    if grad is None:
        assert grads[1] is not None
        grad = torch.zeros_like(grads[1])
    if stacked:
        xs = list(xs[0].unbind())
        if at_hand:
            gs, hs, slots, places = new_buffers(given, grad, rule.iterations)
            grad = slots[rule.iterations - 1].copy_(grad)
        else:
            # A backward pass that is transformed, unlike its forward pass.
            images = [one for buffer in images for one in buffer.unbind()[1 - start :]]
    elif given.c is not None:
        x = prior.prox(given.c if outputs is None else _drawn(outputs[0], given.c, None, prior.zero_argument), steps[0])
        xs.insert(0, x)
        if not prior.slope_from_value:
            v = given.c if outputs is None else _drawn(outputs[0], given.c, None, prior.zero_argument)
            slopes.insert(0, prior.derivative(v, steps[0]) if prior.separable else v)
    whole, values = stacked and at_hand, dict(enumerate(xs, start=1))
    pending: defaultdict[int, _Total] = defaultdict(_Total)
    r, held = run.reference(rule.iterations - 1, values), None
    for k in range(rule.iterations - 1, 0, -1):
        if outputs is not None:
            drawn = outputs[k] * grad
            held, grad = grad - drawn, drawn
        if given.gate is not None:
            if needs[4]:
                gate.add((grad * kept["moved"][k - 1]).sum_to_size(given.gate.shape))
            opened = grad * given.gate
            first.add(grad - opened)
            grad = slots[k].copy_(opened) if whole else opened
        momentum = None if k == 1 else kept["momentum"][k - 2] if run.momenta is None else run.momenta[k - 1] or None
        if inner is not None and k % inner == 0:
            grad = anchored.taken(grad)
        share = run.additive[k]
        dd, h = made.pull(k, grad, slots[k - 1], places[k])
        if not whole:
            if needs[2]:
                z = images[k - 1] if k <= len(images) else None
                made.collect(k, grad, run.point(k, values[k], values.get(k - 1), momentum, r), z, h)
            if share is not None:
                additive.add(grad, share)
            if needs[1] and h is not None:
                du.add(made.spread(k, h))
        dx: Any = dd
        if inner is not None:
            if k % inner == 0:
                # The share of the point that the iterations from here on refer to.
                dr.add(dd)
                for place, picked in run.picked(k):
                    pending[place].add(dr.value, picked)
                dr, r, dx = _Total(), run.reference(k - 1, values), None
            else:
                anchored.add(grad, run.held[k])
                if r is not None:
                    dr.add(dd, -1.0)
                if r is not None and not is_one(run.held[k]):
                    dr.add(grad, 1 - run.held[k])
        if momentum is not None:
            pending[k - 1].add(dd, -momentum)
            dx = dd * (1 + momentum)
        if inertia:
            dx = dx + inertia * grad
            if k > 1:
                pending[k - 1].add(grad, -inertia)
        if k in pending:
            part = pending.pop(k)
            dx = part.value if dx is None else part.taken(dx)
        if slopes:
            grad = slopes[k - 1] * dx if prior.separable else prior.vjp(slopes[k - 1], steps[k - 1], dx)
        else:
            grad = (prior.vjp_ if at_hand else prior.vjp)(values[k], steps[k - 1], dx)
        grad = slots[k - 1].copy_(grad) if whole and grad is not slots[k - 1] else grad
        grad = grad if held is None else grad + held
    grad = grad if outputs is None else outputs[0] * grad
    for one in (anchored.value, first.value, grads[1]):
        if one is not None:
            grad = grad.add_(one) if whole else grad + one
    if rule.sampled:
        h = made.pull(0, grad, None, places[0])[1]
        if not whole and h is not None:
            if needs[2]:
                made.collect(0, grad, None, None, h)
            if needs[1]:
                du.add(made.spread(0, h))
    if not whole:
        additive.add(grad, steps[0] if rule.sampled else 1.0)
    else:
        if rule.sampled:
            additive.add((gs.new_tensor(steps) @ gs.flatten(1)).reshape(gs.shape[1:]))
        elif needs[0]:
            additive.add(gs.sum(0))
        if needs[1] and hs is not None:
            du.add(hs.sum(0))
        if needs[2]:
            h = None if hs is None else hs[1 - start :].flatten(0, 1)
            z = images[0].flatten(0, 1) if images else None
            made.collect(1, gs[start:].flatten(0, 1), kept["x"][0].flatten(0, 1), z, h)
    total, bias = additive.value, given.bias
    assert total is not None
    return [
        total if needs[0] else None,
        du.value.to(given.u.dtype) if needs[1] and given.u is not None and du.value is not None else None,
        made.weight_gradient() if needs[2] else None,
        total.sum_to_size(bias.shape).to(bias.dtype) if needs[3] and bias is not None else None,
        gate.value,
    ]
