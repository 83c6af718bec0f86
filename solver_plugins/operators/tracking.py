"""Follows the Lipschitz constant between certificates, by a few warm power steps where the weights have moved.

The iteration runs on the symbol of the kernel at a few fixed frequencies, so its state is small and does not depend on
the input size. Its quotients are *lower* bounds on the supremum over these frequencies, which is at most
``1 + GRID_TOLERANCE`` times below the supremum over all (:mod:`~solver_plugins.operators.symbol`). Cosine and sine
parts are separate, because compilers do not support complex dtypes well.

Whether weights have moved is seen from ``A r`` for a fixed vector ``r``, number by number: another constant of the
weights (a norm, a quotient) may stay the same while ``L`` grows.
"""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from solver_plugins.operators.geometry import Geometry
from solver_plugins.operators.precision import autocast_off, is_eager, scaled_kernel
from solver_plugins.operators.symbol import frequencies, grid_for, polyphase, tap_positions

GRID_TOLERANCE = 0.8
"""With converged power steps and any kernel, a followed constant is above ``1 / 1.8`` of the truth."""
GENERIC_SHARE = 0.02
"""How much of a generic direction is mixed into the vectors; costs 0.04% of the estimate."""
STILL_GROWING = 1.05
"""By this gain of the last of three steps, another three are taken where that can be seen."""
MOST_ROUNDS = 5

Number = float | Tensor


def start_vectors(kernel: Tensor, geometry: Geometry) -> Tensor:
    """Returns start vectors in generic directions, shape ``(F, groups, n2/groups, 2)``, in float32 at least.

    There is one vector per frequency and group; the last dimension holds the real and imaginary part. They are the same
    on every device and in every process, and the global random state does not change.
    """
    grid = _grid(kernel, geometry)
    count = len(frequencies(grid, torch.device("cpu"), torch.float32))
    rows = kernel.shape[0] // geometry.groups
    dtype = torch.promote_types(kernel.dtype, torch.float32)
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(count, geometry.groups, rows, 2, generator=generator, dtype=torch.float32)
    if count == 1:
        # The top vector of a real matrix is real.
        vectors = vectors * vectors.new_tensor([1.0, 0.0])
    return (vectors / torch.linalg.vector_norm(vectors, dim=(2, 3), keepdim=True)).to(device=kernel.device, dtype=dtype)


@torch.no_grad()
def image_of(kernel: Tensor) -> Tensor:
    """Returns ``A r`` for a fixed ``r``, one number per output feature, in float32 at least."""
    with autocast_off(kernel.device):
        rows = scaled_kernel(kernel, None).flatten(1)
        eager = is_eager(rows.device) and type(rows) is Tensor
        return rows @ (_kept_probe if eager else _probe)(rows.shape[1], rows.device, rows.dtype)


def _probe(count: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Returns ``r``: the same numbers in every dtype, on every device, compiled or not."""
    index = torch.arange(count, device=device)
    # Whole numbers are exact everywhere, and so are those of 16 bits over a power of two.
    return ((index * index * 7919 + index * 104729 + 12345) % 65521).to(dtype) / 32768 - 1


@functools.lru_cache(maxsize=256)
def _kept_probe(count: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    # Not an inference tensor, which could not be used outside that mode.
    with torch.inference_mode(False):
        return _probe(count, device, dtype)


@torch.no_grad()
def power_steps(
    kernel: Tensor, geometry: Geometry, vectors: Tensor, count: int, diagonal: Tensor | None = None, share: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """Takes ``count`` power steps ``v <- P P^H v / |P P^H v|`` at every frequency.

    Padding does not matter. With a ``diagonal``, the steps are those of ``diag(d) A``; with ``share``, a little of a
    generic direction is mixed into each new vector, so that no direction is ever lost.

    Returns:
        For each step the largest ``|P P^H v| / |v|`` as a 0-d tensor, a lower bound on the supremum that never falls
        from step to step (without a share), and the new vectors. Weights of zero give zero and the same vectors.
    """
    quotients, results = [], []
    with autocast_off(kernel.device):
        symbol = _Symbol.of(scaled_kernel(kernel, diagonal, vectors.dtype), geometry)
        v = vectors.to(symbol.cos.dtype)
        generic = GENERIC_SHARE * _generic(v, real=symbol.sin is None) if share else None
        for _ in range(count):
            quotient, v = symbol.step(v)
            if generic is not None:
                v = v + generic
                v = v / torch.linalg.vector_norm(v, dim=(2, 3), keepdim=True)
            quotients.append(quotient)
            results.append(v)
    return quotients, results


@torch.no_grad()
def follow(
    kernel: Tensor,
    geometry: Geometry,
    vectors: Tensor,
    diagonal: Tensor | None = None,
    gram: Tensor | None = None,
    patient: bool = False,
    rounds: int | None = None,
) -> tuple[Number, Tensor]:
    """Returns an estimate of ``lambda_max(A A^T)``, a number if reading one costs nothing, and the next vectors.

    One step is not enough: where Adam turns the top singular direction, or a layer starts from zeros, it is too small
    by up to 10x. What three steps still gain is extrapolated, and the largest row is a floor. Where values can be read,
    steps are taken as long as they gain.

    Args:
        kernel: ``[n2, n1/groups, *k]``.
        geometry: Stride, dilation and groups matter; padding does not.
        vectors: Of length one, from :func:`start_vectors` or an earlier call.
        diagonal: Follows ``diag(d) A`` instead.
        gram: ``A A^T`` if it is known, only for a matrix without a diagonal.
        patient: Whether these weights are far from those that the vectors belong to.
        rounds: How often three steps are taken, whether values can be read or not; None takes as many as gain.
    """
    with autocast_off(kernel.device):
        scaled = scaled_kernel(kernel, diagonal, vectors.dtype)
        at_hand = is_eager(kernel.device) and type(scaled) is Tensor
        tiny = torch.finfo(vectors.dtype).tiny
        for round in range(rounds or (MOST_ROUNDS if at_hand else 1)):
            steps = warm_steps(scaled, geometry, vectors, at_hand, gram)
            second, third, vectors = steps.second, steps.third, steps.vectors
            gain = _within(third / _within(second, tiny), 1.0, 2.0)
            if rounds is None and at_hand and not (gain > STILL_GROWING or (patient and round < MOST_ROUNDS - 1)):
                break
        return _within(_within(third, second) * gain**2, steps.largest), vectors


def rescaled_bound(L: Tensor, diagonal: Tensor, reference: Tensor) -> Tensor:
    """Returns ``L max_i (d_i / dbar_i)^2``: a bound for ``diag(d) A``, given one for ``diag(dbar) A``.

    ``diag(d) A = diag(d / dbar) diag(dbar) A``. A row with ``dbar_i = 0`` says nothing about ``A``, so the bound is
    infinite unless ``d_i = 0`` too. No value is read, so an accelerator is not stalled.
    """
    dtype = torch.promote_types(L.dtype, torch.float32)
    diagonal, reference = diagonal.to(dtype), reference.to(dtype)
    safe = torch.where(reference == 0, torch.ones_like(reference), reference)
    unknown = torch.where(diagonal == 0, torch.zeros_like(diagonal), torch.full_like(diagonal, math.inf))
    ratio = torch.where(reference == 0, unknown, (diagonal / safe).square())
    # With a dimension: exporters to ONNX know no other maximum.
    return L * ratio.amax(0)


def _within(value: Number, low: Number, high: float | None = None) -> Number:
    """Returns a value, or the nearest one in a range."""
    if isinstance(value, Tensor):
        raised = torch.maximum(value, low) if isinstance(low, Tensor) else value.clamp_min(low)
        return raised if high is None else raised.clamp_max(high)
    return max(value, low) if high is None else min(max(value, low), high)


class WarmSteps(NamedTuple):
    """The result of three power steps, as numbers or 0-d tensors.

    Attributes:
        second: The quotient of the second step.
        third: That of the third, from a vector with a generic direction mixed in.
        largest: The largest diagonal entry of ``A A^T``, a lower bound that does not depend on the vectors.
        vectors: The start vectors of the third step. For a matrix only the real part: the imaginary part is zero.
    """

    second: Number
    third: Number
    largest: Number
    vectors: Tensor


def warm_steps(
    kernel: Tensor, geometry: Geometry, vectors: Tensor, at_hand: bool, gram: Tensor | None = None
) -> WarmSteps:
    """Takes three power steps; arguments as in :func:`follow`. With ``at_hand`` the results are numbers."""
    if math.prod(kernel.shape[2:]) == 1 and geometry.groups == 1:
        return _matrix_steps(kernel.flatten(1), vectors, at_hand, gram)
    quotients, results = power_steps(kernel, geometry, vectors, 3, share=True)
    largest = torch.linalg.vector_norm(kernel.flatten(1), dim=1).amax().square()
    found = (quotients[1], quotients[2], largest)
    second, third, largest = map(float, found) if at_hand else found
    return WarmSteps(second, third, largest, results[1])


def _matrix_steps(matrix: Tensor, vectors: Tensor, at_hand: bool, gram: Tensor | None) -> WarmSteps:
    """Takes the steps in few operations: for small layers, calls take longer than products."""
    length = _length if at_hand else torch.linalg.vector_norm
    tiny, v = torch.finfo(vectors.dtype).tiny, vectors[0, 0, :, 0]
    largest: Number
    if at_hand and gram is not None:
        largest = float(gram.diagonal().amax())
    else:
        # Not from the diagonal of A A^T, because Inductor cannot take the diagonal of a product.
        row = torch.linalg.vector_norm(matrix, dim=1).amax()
        largest = float(row) ** 2 if at_hand else row.square()
    # Steps with A A^T over its largest entry neither overflow nor vanish, so no vector is scaled between them.
    inverse = 1 / _within(largest, tiny)

    def step(x: Tensor) -> Tensor:
        return (gram @ x).mul_(inverse) if gram is not None else matrix @ (x @ matrix).mul_(inverse)

    one = step(v)
    two = step(one)
    first, second = length(one), length(two)
    mixed = two * (1 / _within(second, tiny)) + (_kept_share(len(v), v.dtype) if at_hand else _generic_share(v))
    mixed = mixed * (1 / length(mixed))
    third = length(step(mixed))
    return WarmSteps(second / _within(first, tiny) * largest, third * largest, largest, mixed[None, None, :, None])


def _length(vector: Tensor) -> float:
    """Returns the norm of a vector on the CPU; a call of numpy takes a tenth of the time."""
    values = vector.numpy()
    return math.sqrt(values.dot(values))


@dataclass(frozen=True)
class _Symbol:
    """The polyphase symbol ``P = C - i S``, ``[F, groups, rows, columns]``, at the grid's frequencies, as real numbers.

    ``S`` is None if the kernel has a single tap: the symbol is then the matrix itself, and vectors are real.
    """

    cos: Tensor
    sin: Tensor | None

    @classmethod
    def of(cls, weight: Tensor, geometry: Geometry) -> "_Symbol":
        if geometry.dims == 0:
            return cls(weight[None, None], None)
        blocks = polyphase(weight, geometry.reduced_stride(), geometry.groups)
        if blocks[0, 0, 0].numel() == 1:
            return cls(blocks.reshape(1, *blocks.shape[:3]), None)
        waves = _kept_waves if is_eager(weight.device) else _waves
        cos, sin = waves(tuple(blocks.shape[3:]), weight.device, weight.dtype)
        # One product gives all frequencies from all taps; each step is then a product of matrix and vector.
        taps = blocks.flatten(3).flatten(0, 2).T
        shape = (len(cos), *blocks.shape[:3])
        return cls((cos @ taps).reshape(shape), (sin @ taps).reshape(shape))

    def step(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the largest quotient and the new vectors."""
        back = self._times(v, adjoint=True)
        down = torch.linalg.vector_norm(back, dim=(2, 3), keepdim=True)
        # P^H v is scaled to length one, so that weights far from one neither overflow nor vanish.
        new = self._times(back / torch.where(down > 0, down, 1.0), adjoint=False)
        up = torch.linalg.vector_norm(new, dim=(2, 3), keepdim=True)
        length = torch.linalg.vector_norm(v, dim=(2, 3), keepdim=True)
        new = torch.where(up > 0, new / torch.where(up > 0, up, 1.0), v)
        quotient = down * up / torch.where(length > 0, length, 1.0)
        return quotient.amax(), new

    def _times(self, v: Tensor, adjoint: bool) -> Tensor:
        """Returns ``P v`` or ``P^H v``; the last dimension holds the real and imaginary part."""
        # As rows, because a product with two columns is up to ten times slower than one with two rows.
        rows = v.mT.contiguous()
        straight = _times(rows, self.cos if adjoint else self.cos.mT)
        if self.sin is None:
            return straight.mT
        # -i S (a + ib) = S b - i S a; the adjoint has the other sign.
        real, imaginary = _times(rows.flip(-2), self.sin if adjoint else self.sin.mT).unbind(-2)
        turned = [-real, imaginary] if adjoint else [real, -imaginary]
        return (straight + torch.stack(turned, -2)).mT


def _waves(lengths: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns cosine and sine of every frequency of the grid at every tap."""
    points = frequencies(grid_for(lengths, GRID_TOLERANCE)[0], device, dtype)
    angles = points @ tap_positions(lengths, device).to(dtype).T
    return angles.cos(), angles.sin()


@functools.lru_cache(maxsize=256)
def _kept_waves(lengths: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):
        return _waves(lengths, device, dtype)


def _times(rows: Tensor, matrices: Tensor) -> Tensor:
    if min(matrices.shape[-2:]) > 1:
        return rows @ matrices
    # Thousands of products with a vector (a depthwise kernel) take longer than their multiplications.
    return (rows.unsqueeze(-1) * matrices.unsqueeze(-3)).sum(-2)


def _generic(vectors: Tensor, real: bool) -> Tensor:
    """Returns a unit vector in a fixed generic direction."""
    index = torch.arange(vectors[0, 0].numel(), device=vectors.device, dtype=vectors.dtype)
    generic = torch.cos(1.7 * index + 0.37 * (index % 97).square()).reshape(vectors.shape[2:])
    if real:
        generic = torch.stack([generic[:, 0], torch.zeros_like(generic[:, 0])], -1)
    return generic / torch.linalg.vector_norm(generic)


def _generic_share(v: Tensor) -> Tensor:
    """Returns a share of a generic direction for a real vector."""
    return GENERIC_SHARE * _generic(torch.stack([v, torch.zeros_like(v)], -1)[None, None], real=True)[:, 0]


@functools.lru_cache(maxsize=256)
def _kept_share(count: int, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):
        return _generic_share(torch.zeros(count, dtype=dtype, device="cpu"))


def _grid(kernel: Tensor, geometry: Geometry) -> tuple[int, ...]:
    """Returns the number of frequencies per dimension, which grows with the kernel."""
    steps = geometry.reduced_stride()
    lengths = [-(-taps // step) for taps, step in zip(kernel.shape[2:], steps, strict=True)]
    return grid_for(lengths, GRID_TOLERANCE)[0]
