"""The same passes as in :mod:`solver_plugins.solve.unrolled`, with all iterations in one buffer each.

A small layer takes longer to call than to multiply. Here every product writes where its result is kept, proximal maps
and their derivatives overwrite it there, the gradient of ``c`` is one sum over the buffer of the ``G_k``, and that of
the weight a product of whole buffers, which need not be put together first. For matrices without momentum, on the CPU,
where nothing is recorded, compiled or transformed; the plain passes are for all others.
"""

import torch
from torch import Tensor, nn

from solver_plugins.operators import is_eager
from solver_plugins.prox.base import Step
from solver_plugins.solve.products import LARGE_BATCH, products
from solver_plugins.solve.rule import Rule

LARGEST = 2**21
"""So many numbers in a buffer: above, a large batch is better off with one product after the other."""


def may_stack(rule: Rule, rows: int, outputs: int) -> bool:
    """Whether a solve of this size with a matrix gains by buffers.

    Args:
        rule: The solve.
        rows: How many samples there are.
        outputs: ``n2``.
    """
    if rule.momentum or not (rule.prior.separable and rule.prior.slope_from_value):
        return False
    if rule.path == "two_step" and rule.images < rule.iterations - 1:
        return False
    return buffer_fits(rows, outputs, rule.iterations)


def buffer_fits(rows: int, features: int, iterations: int) -> bool:
    """Whether a buffer of this size is better than one tensor for each iteration."""
    return rows < LARGE_BATCH or rows * features * iterations <= LARGEST


def at_hand(c: Tensor, weight: Tensor, rate: Tensor, grad: Tensor | None = None) -> bool:
    """Whether there are plain values to compute with: nothing is recorded, compiled or transformed."""
    if torch.is_grad_enabled() or not is_eager(c.device):
        return False
    # Of several gradients at once (is_grads_batched) none shows, but for this.
    if grad is not None and (type(grad) is not Tensor or torch._C._functorch.is_legacy_batchedtensor(grad)):
        return False
    return type(c) is Tensor and type(rate) is Tensor and type(weight) in (Tensor, nn.Parameter)


def iterate(
    c: Tensor, weight: Tensor, rate: Tensor, gram: Tensor | None, rule: Rule, matrix: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Returns ``v_T``, the matrix of the products, and the buffers of iterates and of ``z_k``, for :func:`backward`.

    There is a matrix, or there are ``z_k``. The first iterate, ``prox(c)``, is not kept.

    Args:
        c: Where it starts, one row for each sample.
        weight: Of the map.
        rate: ``1/L``.
        gram: ``A A^T`` where it is known already.
        rule: The solve.
        matrix: That of a solve before.
    """
    made = products(rule.map, weight, rate, rule.path, gram, matrix)
    step: Step = 1.0 if rule.unit else rate
    again, prior = rule.iterations - 1, rule.prior
    iterates, x = c.new_empty((again - 1, *c.shape)), prior.prox(c, step)
    if made.matrix is not None:
        for slot in iterates.unbind():
            torch.addmm(c, x, made.matrix, out=slot)
            x = written(prior.prox_(slot, step), slot)
        return torch.addmm(c, x, made.matrix), made.matrix, iterates, None
    alpha, share, transposed = _numbers(rate, weight, rule)
    images, v = c.new_empty((again, len(c), weight.shape[1])), torch.empty_like(c)
    for image, target in zip(images.unbind(), (*iterates.unbind(), v), strict=True):
        torch.mm(x, weight, out=image)
        # One pass over memory for both terms, to which the product adds.
        torch.add(c, x, alpha=share, out=target)
        torch.addmm(target, image, transposed, alpha=alpha, out=target)
        x = target if target is v else written(prior.prox_(target, step), target)
    return v, None, iterates, images


def backward(
    grad: Tensor,
    c: Tensor,
    weight: Tensor,
    rate: Tensor,
    rule: Rule,
    matrix: Tensor | None,
    iterates: Tensor,
    images: Tensor | None,
    needs_weight: bool,
) -> tuple[Tensor, Tensor | None]:
    """Returns the gradients of ``c`` and of the weight.

    Args:
        grad: That of ``v_T``.
        c: Where the solve started.
        weight: Of the map.
        rate: ``1/L``.
        rule: The solve.
        matrix: From :func:`iterate`, as are the next two.
        iterates: ``x_k`` but the first.
        images: ``z_k``, without a matrix.
        needs_weight: Whether the weight gets one.
    """
    step: Step = 1.0 if rule.unit else rate
    again, prior = rule.iterations - 1, rule.prior
    alpha, share, transposed = _numbers(rate, weight, rule)
    # G_0 to G_T-1; and A^T of all but the first.
    grads = c.new_empty((again + 1, *c.shape))
    slots = grads.unbind()
    later = slots[again].copy_(grad)
    values = prior.prox(c, step), *iterates.unbind()
    pulled = c.new_empty((again, len(c), weight.shape[1])) if matrix is None else None
    for k in range(again - 1, -1, -1):
        if matrix is not None:
            torch.mm(later, matrix, out=slots[k])
        else:
            assert pulled is not None
            h = torch.mm(later, weight, out=pulled[k])
            torch.addmm(later, h, transposed, beta=share, alpha=alpha, out=slots[k])
        later = written(prior.vjp_(values[k], step, slots[k]), slots[k])
    dc = grads.sum(0)
    if not needs_weight:
        return dc, None
    if matrix is not None:
        sums = torch.mm(rows_of(grads[2:]).t(), rows_of(iterates))
        torch.addmm(sums, slots[1].t(), values[0], out=sums)
        return dc, product(sums + sums.t(), weight, alpha)
    assert images is not None and pulled is not None
    total = product(rows_of(grads[1:]).t(), rows_of(images), alpha)
    # Put together for once: a product of its own for the first iterate would pass over the weight's size again.
    return dc, torch.addmm(total, torch.cat(values).t(), rows_of(pulled), alpha=alpha, out=total)


def _numbers(rate: Tensor, weight: Tensor, rule: Rule) -> tuple[float, float, Tensor]:
    """Returns ``-r``, ``1 - r lam`` and ``A^T``."""
    number = float(rate)
    return -number, 1 - number * rule.map.lam, weight.t()


def written(result: Tensor, slot: Tensor) -> Tensor:
    """Returns the slot, with a result in it that may be there already."""
    return slot if result is slot else slot.copy_(result)


def rows_of(buffer: Tensor) -> Tensor:
    """Returns a buffer with the samples of all iterations below each other."""
    return buffer.reshape(-1, buffer.shape[-1])


def product(left: Tensor, right: Tensor, factor: float) -> Tensor:
    """Returns ``factor * left right`` without a pass over memory for the factor."""
    empty = left.new_empty((left.shape[0], right.shape[1]))
    return torch.addmm(empty, left, right, beta=0, alpha=factor)
