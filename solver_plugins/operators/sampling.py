"""Random sets of input features with an exact count, uniform or by importance, and their expected smoothness.

Nothing here reads a value from a device, so sampling does not stall a GPU or break a graph.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from solver_plugins.errors import OptionError
from solver_plugins.operators.precision import is_eager

_UNIT = 40
"""Systematic sampling counts in steps of ``2^-40``, in whole numbers, so the count is exact."""


def uniform(
    shape: Sequence[int], device: torch.device | str | None, dtype: torch.dtype, generator: torch.Generator | None
) -> Tensor:
    """Draws numbers from [0, 1), with the global random state unless a generator is given."""
    if generator is None:
        # The overload with a generator, even None, cannot be compiled for a varying batch size.
        return torch.rand(shape, device=device, dtype=dtype)
    return torch.rand(shape, device=device, dtype=dtype, generator=generator)


def tau_of(p: float, n: int) -> int:
    """Returns the number of features, out of ``n``, that a dropout rate ``p`` keeps: ``max(1, round((1 - p) n))``.

    Raises:
        OptionError: If ``p`` is not in ``[0, 1]`` or ``n`` is not positive.
    """
    if not 0 <= p <= 1 or n < 1:
        raise OptionError(f"Expected a dropout rate in [0, 1] and at least one feature; found p={p}, n={n}.")
    return max(1, round((1 - p) * n))


def tau_nice_mask(
    shape_of_batch: Sequence[int],
    n: int,
    tau: int,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draws tau-nice sets (Definition 3.1 of the paper): every subset of ``tau`` of ``n`` features is equally likely.

    It returns a mask of zeros and ones of shape ``(*shape_of_batch, n)``, one set for each element of the batch. Random
    numbers come from the global state unless a generator is given.
    """
    masks = tau_nice_masks(1, shape_of_batch, n, tau, device=device, generator=generator)
    return masks[0].to(dtype or torch.get_default_dtype())


def tau_nice_masks(
    count: int,
    shape_of_batch: Sequence[int],
    n: int,
    tau: int,
    *,
    device: torch.device | str | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draws the masks of ``count`` calls of :func:`tau_nice_mask`; on the CPU the numbers are the same.

    Returns:
        Masks of zeros and ones in one byte each, shape ``(count, *shape_of_batch, n)``.
    """
    _check_count(n, tau)
    shape = (count, *shape_of_batch, n)
    if tau == n:
        return torch.ones(shape, device=device, dtype=torch.uint8)
    masks = _numpy_masks(count, math.prod(shape_of_batch), n, tau, device, generator)
    if masks is None:
        chosen = uniform(shape, device, torch.float32, generator).topk(tau, dim=-1, sorted=False).indices
        return torch.zeros(shape, device=device, dtype=torch.uint8).scatter(-1, chosen, 1)
    # As bytes, because torch multiplies by them twice as fast as by booleans.
    return torch.from_numpy(masks).view(torch.uint8).reshape(shape)


def tau_nice_indices(
    count: int, n: int, tau: int, *, device: torch.device | str | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """Draws ``count`` tau-nice sets as indices, shape ``(count, tau)``: those of :func:`tau_nice_mask`."""
    _check_count(n, tau)
    masks = _numpy_masks(count, 1, n, tau, device, generator)
    if masks is None:
        return uniform((count, n), device, torch.float32, generator).topk(tau, dim=-1, sorted=False).indices
    return torch.from_numpy(masks.nonzero()[2].reshape(count, tau))


_Masks = np.ndarray[Any, np.dtype[np.bool_]]


def _numpy_masks(
    count: int, rows: int, n: int, tau: int, device: torch.device | str | None, generator: torch.Generator | None
) -> _Masks | None:
    """Draws ``count`` times ``rows`` masks with numpy where values may be read, otherwise returns None.

    From a seed numpy draws keys three times as fast as torch, and finds the largest eight times as fast as topk.
    """
    if not is_eager(torch.device(torch.get_default_device() if device is None else device)):
        return None
    seeds = torch.randint(2**63 - 1, (count,), device="cpu", generator=generator)
    # A tensor subclass has no values, for example one that a compiler traces with.
    if type(seeds) is not Tensor:
        return None
    masks: _Masks = np.empty((count, rows, n), np.bool_)
    for seed, mask in zip(seeds.tolist(), masks, strict=True):
        _fill_with_sets(mask, tau, np.random.SFC64(seed))
    return masks


def _fill_with_sets(mask: _Masks, tau: int, source: np.random.SFC64) -> None:
    """Writes a mask of the ``tau`` largest random keys into every row."""
    rows, n = mask.shape
    keys = source.random_raw(-(-rows * n // 2)).view(np.int32)[: rows * n].reshape(rows, n)
    least = np.partition(keys, n - tau, axis=-1)[:, n - tau : n - tau + 1]
    np.greater_equal(keys, least, out=mask)
    if np.count_nonzero(mask) > rows * tau:
        # Rows with equal keys are drawn again, so all sets stay equally likely.
        again = mask.sum(-1) > tau
        drawn = np.empty((int(again.sum()), n), np.bool_)
        _fill_with_sets(drawn, tau, source)
        mask[again] = drawn


def inclusion_probabilities(scores: Tensor, tau: int) -> Tensor:
    """Returns ``pi_i = min(1, c s_i)`` with ``sum_i pi_i = tau`` for scores ``s >= 0`` along the last dimension.

    Sorting gives the number ``m`` of features with ``pi = 1``: the smallest one with ``(tau - m) s_(m+1) <= sum_{i > m}
    s_(i)``. If fewer than ``tau`` scores are positive, the features with score zero share the rest equally.
    """
    n = scores.shape[-1]
    _check_count(n, tau)
    work = _work_dtype(scores)
    ordered, order = scores.to(work).clamp_min(0).sort(dim=-1, descending=True)
    largest = ordered[..., :1]
    ordered = ordered / torch.where(largest > 0, largest, torch.ones_like(largest))
    # Summed from the small end, because a difference from the total would cancel.
    tails = ordered.flip(-1).cumsum(-1).flip(-1)
    position = torch.arange(n, device=scores.device)
    left = (tau - position).to(work)
    fits = (left * ordered <= tails) | (position >= tau - 1)
    capped = fits.to(torch.int8).argmax(-1, keepdim=True)
    tail, rest = tails.gather(-1, capped), (tau - capped).to(work)
    share = torch.where(
        tail > 0, ordered * rest / torch.where(tail > 0, tail, torch.ones_like(tail)), rest / (n - capped)
    )
    sorted_probabilities = torch.where(position < capped, torch.ones_like(share), share).clamp_max(1)
    probabilities = torch.zeros_like(sorted_probabilities).scatter(-1, order, sorted_probabilities)
    return probabilities.to(torch.promote_types(scores.dtype, torch.float32))


def importance_mask(probabilities: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    """Draws sets with an exact count that contain feature ``i`` with probability ``pi_i``, without replacement.

    Systematic sampling in a random order: the probabilities are laid end to end on ``[0, tau]``, and the features under
    ``u, u + 1, ...`` are chosen, with ``u`` uniform. Positions are whole multiples of ``2^-40`` and no feature is
    longer than one unit, so each is chosen at most once and rounding cannot change the count.

    The probabilities, ``(..., n)``, are those of :func:`inclusion_probabilities`: in ``[0, 1]`` with a whole sum. The
    result is a mask of zeros and ones, which ``importance_weights`` makes unbiased.
    """
    work = _work_dtype(probabilities)
    n, unit = probabilities.shape[-1], 1 << (_UNIT if work == torch.float64 else 20)
    device = probabilities.device
    order = uniform(probabilities.shape, device, torch.float32, generator).argsort(-1)
    ends = probabilities.to(work).gather(-1, order).cumsum(-1)
    tau = ends[..., -1:].round()
    total = (tau * unit).to(torch.int64)
    ends = (ends * (tau / ends[..., -1:].clamp_min(torch.finfo(work).tiny)) * unit).round().to(torch.int64)
    # Rounding may have made a feature longer than a unit: cut it (cummin), and make sure that the end is reached
    # (maximum).
    whole = torch.arange(1, n + 1, device=device) * unit
    ends = (ends - whole).clamp_max(0).cummin(-1).values + whole
    ends = torch.maximum(ends, total - (n * unit - whole))
    shift = uniform((*probabilities.shape[:-1], 1), device, work, generator) * unit
    shift = shift.to(torch.int64).clamp_max(unit - 1)
    counts = (ends - shift + (unit - 1)) // unit
    chosen = torch.diff(counts, dim=-1, prepend=torch.zeros_like(counts[..., :1]))
    return torch.zeros_like(probabilities).scatter(-1, order, chosen.to(probabilities.dtype))


def importance_weights(mask: Tensor, probabilities: Tensor) -> Tensor:
    """Returns ``mask / pi``, weights with expectation one; zero for a feature that is never chosen."""
    possible = probabilities > 0
    return torch.where(possible, mask / torch.where(possible, probabilities, torch.ones_like(probabilities)), 0.0)


def expected_smoothness(L: Tensor, column_norms_sq: Tensor, n: int, tau: int) -> Tensor:
    """Returns the expected-smoothness constant of tau-nice sampling (Gower et al. 2018).

    ``L_tau = n(tau-1) / (tau(n-1)) L + (n-tau) / (tau(n-1)) max_i L_i`` with ``L_i = n |a_i|^2``. With ``H = A A^T``
    and ``H_S = (n/tau) A_S A_S^T``, ``E |H_S x|^2 <= L_tau <x, H x>``. ``L`` may be a bound on ``lambda_max(A A^T)``.
    """
    _check_count(n, tau)
    if tau == n:
        return L
    largest = n * column_norms_sq.amax(0)
    return (n * (tau - 1) * L + (n - tau) * largest) / (tau * (n - 1))


def _check_count(n: int, tau: int) -> None:
    if not 1 <= tau <= n or not math.isfinite(n):
        raise OptionError(f"Expected 1 <= tau <= n; found tau={tau}, n={n}.")


def _work_dtype(x: Tensor) -> torch.dtype:
    # MPS has no float64.
    return torch.float32 if x.device.type == "mps" else torch.float64
