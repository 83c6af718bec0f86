"""The squared k-support norm of a vector (Argyriou, Foygel and Srebro, 2012), its dual and its proximal map.

It is the tightest convex relaxation of sparsity with an l2 penalty:

    |x|_k^2 = min { sum_i x_i^2/t_i : 0 <= t_i <= 1, sum_i t_i <= k }

Applied to singular values, it is the convex envelope of the regulariser that DropBlock with blocks of ``k`` units
induces (Theorem 2.3): the squared nuclear norm for ``k = 1``, the squared Frobenius norm for ``k >= rank``.
"""

import torch
from torch import Tensor

from solver_plugins.errors import OptionError, ShapeError
from solver_plugins.prox.prior import Step, step_like, widened


def k_support_norm_sq(x: Tensor, k: int) -> Tensor:
    """Returns ``sum_{i < rho} a_i^2 + (sum_{i >= rho} a_i)^2 / (k - rho + 1)``, with the sorted ``a = |x|`` (eq. 11).

    ``rho`` is the largest number in 1..k with ``a_{rho-1} >= sum_{i >= rho} a_i / (k - rho + 1)`` (``a_0`` infinite).
    The paper takes the ``rho`` that maximises the value, which is always ``k``. ``x`` has the shape ``(..., n)``; for
    ``k >= n`` the value is the squared l2 norm.
    """
    k = _check(x, k)
    a = widened(x).abs().sort(dim=-1, descending=True).values
    tail = _tail_sums(a)[..., :k]
    shares = tail / torch.arange(k, 0, -1, device=a.device, dtype=a.dtype)
    before = torch.cat([torch.full_like(a[..., :1], torch.inf), a[..., : k - 1]], dim=-1)
    # If it holds for one rho, it holds for all smaller ones; rounding decides ties, so take the last.
    place = torch.arange(k, device=a.device)
    rho = torch.where(before >= shares, place, 0).amax(-1, keepdim=True)
    squares = torch.where(torch.arange(a.shape[-1], device=a.device) < rho, a.square(), 0).sum(-1)
    value = squares + (tail * shares).gather(-1, rho).squeeze(-1)
    return value.to(x.dtype)


def prox_k_support_norm_sq(a: Tensor, k: int, step: Step = 1.0) -> Tensor:
    """Returns ``argmin_x |x|_k^2 + |x - a|^2 / (2 step)`` in O(n log n), differentiable in ``a`` of shape ``(..., n)``.

    With ``beta = 2 step``, ``x_i = a_i t_i/(t_i + beta)`` and ``t_i = clip(alpha |a_i| - beta, 0, 1)``, where ``alpha``
    makes ``sum_i t_i = k``. The largest entries are divided by ``1 + beta``, the next ones lowered by one number.
    """
    k = _check(a, k)
    beta = 2 * step_like(step, widened(a))
    return shrink(a, k, beta)[0]


def shrink(a: Tensor, k: int, beta: Step) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ``argmin_x |x - a|^2 + beta |x|_k^2`` with ``rho`` and ``lambda`` of Theorem 2.7.

    ``rho - 1`` entries are scaled and ``lambda - rho + 1`` lowered; the others become zero.
    """
    wide = widened(a)
    m, order = wide.abs().sort(dim=-1, descending=True)
    full, active = _segment(m.detach(), k, beta)
    place = torch.arange(m.shape[-1], device=m.device)
    lowered = (place >= full[..., None]) & (place < (full + active)[..., None])
    total = torch.where(lowered, m, 0).sum(-1)
    # beta/alpha; not used if nothing is lowered.
    count = active.to(m.dtype)
    threshold = beta * total / torch.where(active > 0, k - full + beta * count, 1)
    x = torch.where(place < full[..., None], m / (1 + beta), 0)
    x = torch.where(lowered, (m - threshold[..., None]).clamp(min=0), x)
    x = torch.zeros_like(x).scatter(-1, order, x) * wide.sign()
    return x.to(a.dtype), (full + 1).clamp(max=k), full + active


def _segment(m: Tensor, k: int, beta: Step) -> tuple[Tensor, Tensor]:
    """Returns how many ``t_i`` are one, and how many lie between zero and one; ``m`` is sorted, largest first.

    ``s(alpha) = sum_i clip(alpha m_i - beta, 0, 1)`` is piecewise linear with the kinks ``beta/m_i`` and
    ``(1 + beta)/m_i``: find the two kinks between which it reaches ``k``.
    """
    n = m.shape[-1]
    tails = torch.cat([_tail_sums(m), torch.zeros_like(m[..., :1])], dim=-1)
    kinks = torch.cat([beta / m, (1 + beta) / m], dim=-1).sort(dim=-1).values

    def counts(alpha: Tensor) -> tuple[Tensor, Tensor]:
        ascending = m.flip(-1).contiguous()
        full = n - torch.searchsorted(ascending, ((1 + beta) / alpha).contiguous())
        begun = n - torch.searchsorted(ascending, (beta / alpha).contiguous(), right=True)
        return full, begun

    full, begun = counts(kinks)
    begun = torch.maximum(begun, full)
    # From tail sums, because differences of head sums cancel if large entries come before small ones.
    between = tails.gather(-1, full) - tails.gather(-1, begun)
    reached = full + kinks * between - beta * (begun - full).to(m.dtype)
    reached = torch.where(kinks.isfinite(), reached, torch.inf)
    positive = (m > 0).sum(-1)
    # Between this kink and the next, s reaches k.
    index = (reached <= k).sum(-1, keepdim=True) - 1
    last = kinks.shape[-1] - 1
    lower = kinks.gather(-1, index.clamp(min=0))
    upper = kinks.gather(-1, (index + 1).clamp(max=last))
    full, begun = counts((lower + upper) / 2)
    full, begun = full.squeeze(-1), begun.squeeze(-1)
    # With k or fewer positive entries every t_i is one.
    few = positive <= k
    full = torch.where(few, positive, full)
    return full, torch.where(few, 0, begun - full)


def _tail_sums(a: Tensor) -> Tensor:
    """Returns ``sum_{j >= i} a_j``."""
    return a.flip(-1).cumsum(-1).flip(-1)


def _check(x: Tensor, k: int) -> int:
    if x.ndim < 1 or x.shape[-1] == 0:
        raise ShapeError(f"Expected vectors (..., n) with at least one entry; found the shape {tuple(x.shape)}.")
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise OptionError(f"Expected k to be a positive whole number; found {k!r}.")
    return min(k, x.shape[-1])
