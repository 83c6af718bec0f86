"""The same passes as in :mod:`solver_plugins.solve.sampled`, with all iterations in one buffer each.

For masks and matrices, on the CPU, as :mod:`solver_plugins.solve.stacked` is for full gradients: every product
writes where its result is kept, and factors ride on products. The buffer of gradients holds ``t_k q G_{k+1}``, so that
it is a factor of the weight's gradient as it is, and its sum is the bias's.
"""

import torch
from torch import Tensor

from solver_plugins.solve.sampled_rule import Given, Rule
from solver_plugins.solve.stacked import at_hand, buffer_fits, product, rows_of, written

SMALLEST_STEP = 1e-12
"""Gradients are kept as multiples of their steps, which must not vanish."""


def may_stack(rule: Rule, rows: int, features: int) -> bool:
    """Whether a solve of this size with a matrix gains by buffers.

    Args:
        rule: The solve.
        rows: How many samples there are.
        features: ``n1`` or ``n2``, whichever is larger.
    """
    if rule.columns or rule.iterations == 1 or not rule.prior.slope_from_value:
        return False
    return buffer_fits(rows, features, rule.iterations)


def stacks(given: Given, grad: Tensor | None = None) -> bool:
    """Whether a solve takes the passes of this file: it may, and its values are at hand."""
    if not given.rule.stacked or not at_hand(given.u, given.weight, given.smoothness, grad):
        return False
    return all(step > SMALLEST_STEP for step in _numbers(given)[1])


def iterate(given: Given, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns ``v_T``, ``v_1``, and the buffers of ``x_k`` and ``r_k`` for :func:`backward`.

    Args:
        given: The solve; its input has one row for each sample.
        keep: Whether there is going to be a backward pass; else memory is used again.
    """
    u, weight, bias, rule = given.u, given.weight, given.bias, given.rule
    prior, transposed = rule.prior, weight.t()
    scale, numbers = _numbers(given)
    masks = given.samples.unbind()
    again = rule.iterations - 1
    # v_T has no place in a buffer: an activation may overwrite it.
    v = u.new_empty((len(u), weight.shape[0]))
    iterates = u.new_empty((again if keep else 0, *v.shape))
    residuals = u.new_empty((rule.iterations if keep else 1, *u.shape))
    targets = (*iterates.unbind(), v) if keep else (v,) * rule.iterations
    slots = residuals.unbind() if keep else residuals.unbind() * rule.iterations
    torch.mul(u, masks[0], out=slots[0]).neg_()
    first = _started(bias, slots[0], transposed, numbers[0], rule)
    x = written(prior.prox_(targets[0].copy_(first), numbers[0]), targets[0])
    for k in range(1, rule.iterations):
        step, target = numbers[k], targets[k]
        r = torch.addmm(u, x, weight, beta=-1, alpha=scale, out=slots[k]).mul_(masks[k])
        share = 1 - step * rule.lam * scale
        if bias is None:
            torch.addmm(x, r, transposed, beta=share, alpha=-step * rule.share, out=target)
        else:
            torch.add(bias * step, x, alpha=share, out=target)
            torch.addmm(target, r, transposed, alpha=-step * rule.share, out=target)
        x = v if k == again else written(prior.prox_(target, step), target)
    return x, first, iterates, residuals


def backward(
    grad: Tensor | None,
    grad_first: Tensor | None,
    given: Given,
    iterates: Tensor,
    residuals: Tensor,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Returns the gradients of the input, of the weight, and of a bias of each row, those that are needed.

    Args:
        grad: That of ``v_T``.
        grad_first: That of ``v_1``.
        given: The solve.
        iterates: From :func:`iterate`, as are the next.
        residuals: ``r_k``.
        needs: Which of the three are.
    """
    weight, rule = given.weight, given.rule
    prior, transposed = rule.prior, weight.t()
    scale, numbers = _numbers(given)
    masks, again = given.samples.unbind(), rule.iterations - 1
    moved = iterates.new_empty((rule.iterations, *iterates.shape[1:]))
    pulled = torch.empty_like(residuals)
    slots, values = moved.unbind(), iterates.unbind()
    if grad is None:
        slots[again].zero_()
    else:
        torch.mul(grad, numbers[again] * rule.share, out=slots[again])
    for k in range(again, -1, -1):
        if k == 0 and grad_first is not None:
            slots[0].add_(grad_first, alpha=numbers[0] * rule.share)
        h = torch.mm(slots[k], weight, out=pulled[k]).mul_(masks[k])
        if k == 0:
            break
        before, step = numbers[k - 1], numbers[k]
        share = (1 - step * rule.lam * scale) * before / step
        torch.addmm(slots[k], h, transposed, beta=share, alpha=-scale * before * rule.share, out=slots[k - 1])
        written(prior.vjp_(values[k - 1], before, slots[k - 1]), slots[k - 1])
    total = None
    if needs[1]:
        total = product(rows_of(moved).t(), rows_of(residuals), -1.0)
        torch.addmm(total, rows_of(iterates).t(), rows_of(pulled[1:]), alpha=-scale, out=total)
    return pulled.sum(0) if needs[0] else None, total, moved.sum(0).div_(rule.share) if needs[2] else None


def _started(bias: Tensor | None, r: Tensor, transposed: Tensor, step: float, rule: Rule) -> Tensor:
    """Returns ``v_1 = t (b - q A r)``."""
    if bias is None:
        return product(r, transposed, -step * rule.share)
    return torch.addmm(bias, r, transposed, beta=step, alpha=-step * rule.share)


def _numbers(given: Given) -> tuple[float, tuple[float, ...]]:
    """Returns ``s`` and the ``t_k``."""
    scale = 1 / float(given.smoothness) if given.rule.unit else 1.0
    return scale, given.rule.steps if given.steps is None else tuple(given.steps.tolist())
