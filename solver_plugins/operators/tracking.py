"""Tracks the Lipschitz constant between certified refreshes, by a few warm power steps per training step.

The iteration runs on the symbol of the kernel at a few fixed frequencies, so its state is small and does not depend on
the input size. It gives a *lower* bound on the supremum: use its ratio to the estimate at the last certified refresh,
or multiply by a margin. Cosine and sine parts are separate, because compilers do not support complex dtypes well.
"""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from solver_plugins.operators.eager import is_eager
from solver_plugins.operators.geometry import Geometry
from solver_plugins.operators.precision import autocast_off, scaled_kernel
from solver_plugins.operators.symbol import frequencies, polyphase, tap_positions


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
def power_step(
    kernel: Tensor, geometry: Geometry, vectors: Tensor, diagonal: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Takes one power step ``v <- P P^H v / |P P^H v|`` at every frequency; see :func:`power_steps`."""
    quotients, steps = power_steps(kernel, geometry, vectors, 1, diagonal)
    return quotients[0], steps[0]


@torch.no_grad()
def power_quotient(kernel: Tensor, geometry: Geometry, vectors: Tensor, diagonal: Tensor | None = None) -> Tensor:
    """Returns the quotient of a :func:`power_step`; for a matrix in few operations, as every evaluation needs it."""
    scaled = scaled_kernel(kernel, diagonal, vectors.dtype)
    if not _is_matrix(kernel, geometry) or not is_eager(kernel.device) or type(scaled) is not Tensor:
        return power_step(kernel, geometry, vectors, diagonal)[0]
    with autocast_off(kernel.device):
        matrix, v = scaled.flatten(1), vectors[0, 0, :, 0].contiguous()
        tiny = torch.finfo(v.dtype).tiny
        back = v @ matrix
        down = _length(back)
        up = _length(matrix @ back.mul_(1 / max(down, tiny)))
        return vectors.new_tensor(down * up / max(_length(v), tiny))


def _is_matrix(kernel: Tensor, geometry: Geometry) -> bool:
    return math.prod(kernel.shape[2:]) == 1 and geometry.groups == 1


@torch.no_grad()
def power_steps(
    kernel: Tensor, geometry: Geometry, vectors: Tensor, count: int, diagonal: Tensor | None = None, share: float = 0.0
) -> tuple[list[Tensor], list[Tensor]]:
    """Takes ``count`` power steps ``v <- P P^H v / |P P^H v|`` at every frequency.

    Args:
        kernel: ``[n2, n1/groups, *k]``.
        geometry: Stride, dilation and groups matter; padding does not.
        vectors: From :func:`start_vectors` or an earlier step.
        count: The number of steps.
        diagonal: Tracks ``diag(d) A`` instead.
        share: The share of a generic direction that is mixed into each new vector, so that no direction is ever lost.

    Returns:
        For each step the largest ``|P P^H v| / |v|`` as a 0-d tensor, a lower bound on the supremum that never falls
        from step to step (without a share), and the new vectors. Weights of zero give zero and the same vectors.
    """
    quotients, results = [], []
    with autocast_off(kernel.device):
        symbol = _Symbol.of(scaled_kernel(kernel, diagonal, vectors.dtype), geometry)
        v = vectors.to(symbol.cos.dtype)
        generic = share * _generic(v, real=symbol.sin is None) if share else None
        if symbol.sin is None:
            return symbol.real_steps(v, count, generic)
        for _ in range(count):
            quotient, v = symbol.step(v)
            if generic is not None:
                v = v + generic
                v = v / torch.linalg.vector_norm(v, dim=(2, 3), keepdim=True)
            quotients.append(quotient)
            results.append(v)
    return quotients, results


Number = float | Tensor


class WarmSteps(NamedTuple):
    """The result of three power steps: 0-d tensors, or numbers if reading them costs nothing.

    Attributes:
        quotients: The quotients of the three steps.
        largest: The largest diagonal entry of ``A A^T``, a lower bound that does not depend on the vectors.
        vectors: The start vectors of the third step: a step from them gives its quotient again. For a matrix only the
            real part, because the imaginary part is zero.
    """

    quotients: tuple[Number, Number, Number]
    largest: Number
    vectors: Tensor


@torch.no_grad()
def warm_steps(
    kernel: Tensor,
    geometry: Geometry,
    vectors: Tensor,
    share: float,
    diagonal: Tensor | None = None,
    gram: Tensor | None = None,
) -> WarmSteps:
    """Takes three power steps, with a generic direction mixed in; arguments as in :func:`power_steps`.

    The vectors have length one. ``gram`` is ``A A^T`` if it is known, only for a matrix without a diagonal.
    """
    with autocast_off(kernel.device):
        scaled = scaled_kernel(kernel, diagonal, vectors.dtype)
        if _is_matrix(kernel, geometry):
            take = _matrix_steps_at_once if is_eager(kernel.device) and type(scaled) is Tensor else _matrix_steps
            return take(scaled.flatten(1), vectors, share, gram)
        quotients, results = power_steps(scaled, geometry, vectors, 3, share=share)
        largest = torch.linalg.vector_norm(scaled.flatten(1), dim=1).amax().square()
    return WarmSteps((quotients[0], quotients[1], quotients[2]), largest, results[1])


def _matrix_steps(matrix: Tensor, vectors: Tensor, share: float, gram: Tensor | None) -> WarmSteps:
    """Takes the steps in few operations, without reading a value."""
    tiny, v = torch.finfo(vectors.dtype).tiny, vectors[0, 0, :, 0]
    norm = torch.linalg.vector_norm
    # Not from the diagonal of A A^T, because Inductor cannot take the diagonal of a product.
    largest = norm(matrix, dim=1).amax().square()
    # Steps with A A^T over its largest entry neither overflow nor vanish, so no vector is scaled between them.
    inverse = largest.clamp_min(tiny).reciprocal()

    def step(x: Tensor) -> Tensor:
        if gram is not None:
            return (gram @ x).mul_(inverse)
        return matrix @ (x @ matrix).mul_(inverse)

    one = step(v)
    two = step(one)
    first, second = norm(one), norm(two)
    generic = _generic(torch.stack([v, torch.zeros_like(v)], -1)[None, None], real=True)[:, 0]
    mixed = two / second.clamp_min(tiny) + share * generic
    mixed = mixed / norm(mixed)
    third = norm(step(mixed))
    quotients = first * largest, second / first.clamp_min(tiny) * largest, third * largest
    return WarmSteps(quotients, largest, mixed[None, None, :, None])


def _matrix_steps_at_once(matrix: Tensor, vectors: Tensor, share: float, gram: Tensor | None) -> WarmSteps:
    """Does the same with numbers, in even fewer operations: for small layers, calls take longer than products."""
    tiny, v = torch.finfo(vectors.dtype).tiny, vectors[0, 0, :, 0]
    if gram is None:
        largest = float(torch.linalg.vector_norm(matrix, dim=1).amax()) ** 2
    else:
        largest = float(gram.diagonal().amax())
    inverse = 1 / max(largest, tiny)

    def times(x: Tensor) -> Tensor:
        if gram is None:
            return matrix @ (x @ matrix).mul_(inverse)
        # One call multiplies by the factor, too; with beta=0 it does not read its first argument.
        return torch.addmv(x, gram, x, beta=0, alpha=inverse)

    def step(x: Tensor) -> tuple[Tensor, float]:
        image = times(x)
        return image, _length(image)

    one, first = step(v)
    two, second = step(one)
    mixed = torch.add(_generic_share(len(v), v.dtype, share), two, alpha=1 / max(second, tiny))
    mixed.mul_(1 / _length(mixed))
    third = step(mixed)[1]
    quotients = first * largest, second / max(first, tiny) * largest, third * largest
    return WarmSteps(quotients, largest, mixed[None, None, :, None])


def _length(vector: Tensor) -> float:
    """Returns the norm of a vector on the CPU; a call of numpy takes a tenth of the time."""
    values = vector.numpy()
    return math.sqrt(values.dot(values))


@dataclass(frozen=True)
class _Symbol:
    """The polyphase symbol ``P = C - i S`` at the grid's frequencies, in real arithmetic.

    Attributes:
        cos: ``C``, ``[F, groups, rows, columns]``.
        sin: ``S``; None if the kernel has a single tap: the symbol is then the matrix itself, and vectors are real.
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
        points = frequencies(_grid(weight, geometry), weight.device, weight.dtype)
        angles = points @ tap_positions(blocks.shape[3:], weight.device).to(weight.dtype).T
        # One product gives all frequencies from all taps; each step is then a product of matrix and vector.
        taps = blocks.reshape(-1, angles.shape[1])
        shape = (len(points), *blocks.shape[:3])
        return cls((angles.cos() @ taps.T).reshape(shape), (angles.sin() @ taps.T).reshape(shape))

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

    def real_steps(self, v: Tensor, count: int, generic: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
        """Takes several steps with a matrix in few operations: for small layers, calls take longer than products."""
        tiny = torch.finfo(v.dtype).tiny
        rows, quotients, results = v[..., :1].mT, [], []
        length: Tensor | None = torch.linalg.vector_norm(rows, dim=-1, keepdim=True).clamp_min(tiny)
        for _ in range(count):
            back = rows @ self.cos
            down = torch.linalg.vector_norm(back, dim=-1, keepdim=True)
            # P^H v is scaled to length one, so that weights far from one neither overflow nor vanish.
            new = (back / down.clamp_min(tiny)) @ self.cos.mT
            up = torch.linalg.vector_norm(new, dim=-1, keepdim=True)
            quotients.append((down * up if length is None else down * up / length).amax())
            rows, length = torch.where(up > 0, new / up.clamp_min(tiny), rows), None
            if generic is not None:
                rows = rows + generic[:, :1].mT
                rows = rows / torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
            results.append(functional.pad(rows.mT, (0, 1)))
        return quotients, results

    def _times(self, v: Tensor, adjoint: bool) -> Tensor:
        """Returns ``P v`` or ``P^H v``; the last dimension holds the real and imaginary part."""
        # As rows, because a product with two columns is up to ten times slower than one with two rows.
        rows = v.mT.contiguous()
        assert self.sin is not None
        cos, sin = (self.cos, self.sin) if adjoint else (self.cos.mT, self.sin.mT)
        straight = rows @ cos
        # -i S (a + ib) = S b - i S a; the adjoint has the other sign.
        real, imaginary = (rows.flip(-2) @ sin).unbind(-2)
        turned = [-real, imaginary] if adjoint else [real, -imaginary]
        return (straight + torch.stack(turned, -2)).mT


@functools.lru_cache(maxsize=256)
def _generic_share(count: int, dtype: torch.dtype, share: float) -> Tensor:
    """Returns a share of :func:`_generic` for a real vector, on the CPU; computed once for each length."""
    # Not an inference tensor, which could not be used outside that mode.
    with torch.inference_mode(False):
        vectors = torch.empty(1, 1, count, 2, dtype=dtype, device="cpu")
        return share * _generic(vectors, real=True)[:, 0]


def _generic(vectors: Tensor, real: bool) -> Tensor:
    """Returns a unit vector in a fixed generic direction."""
    index = torch.arange(vectors[0, 0].numel(), device=vectors.device, dtype=vectors.dtype)
    generic = torch.cos(1.7 * index + 0.37 * (index % 97).square()).reshape(vectors.shape[2:])
    if real:
        generic = torch.stack([generic[:, 0], torch.zeros_like(generic[:, 0])], -1)
    return generic / torch.linalg.vector_norm(generic)


def _grid(kernel: Tensor, geometry: Geometry) -> tuple[int, ...]:
    """Returns the number of frequencies per dimension: 1, 4, or 8 for more than three taps."""
    lengths = [-(-taps // step) for taps, step in zip(kernel.shape[2:], geometry.reduced_stride(), strict=True)]
    return tuple(1 if length == 1 else 4 if length <= 3 else 8 for length in lengths)
