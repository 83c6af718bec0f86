"""Bounds the norm of a layer with padding by the norm of its convolution on an infinite lattice.

Let ``sup(s)`` be the squared norm of the convolution with stride ``s`` on the infinite lattice. The real layer at an
input of size ``n`` is bounded by ``factor * sup(s')`` with a factor and a stride that depend on the padding:

* zeros: the layer is a compression of the lattice operator (inputs extended by zeros, outputs restricted): ``sup(s)``.
* reflect, replicate: the same after the padding operator ``E``: ``|E|^2 sup(s)``.
* circular, ``s`` divides ``n``: outputs are rows of the strided operator on the torus, whose norm is at most that on
  the lattice; rows repeat if there are more than ``n/s`` outputs: ``ceil(out s / n) sup(s)``.
* circular, otherwise: the gap between rows shrinks where they wrap around (kernel [1, 1], s = 2, n = 3: squared norm 3,
  lattice 2). Outputs are still rows of the *unstrided* torus operator, ``repeats * sup(1)``, and a compression of the
  lattice operator after ``E``, ``|E|^2 sup(s)``. Both bounds hold, so the smaller one does.

A dimension only acts on its own index, so the factors of the dimensions multiply.
"""

from collections.abc import Sequence

from solver_plugins.operators.geometry import Geometry
from solver_plugins.operators.padding import repetition

Bound = tuple[tuple[int, ...], int]
"""A stride per dimension (of the undilated kernel), and the factor of its lattice norm."""


def lattice_bounds(geometry: Geometry, kernel_size: Sequence[int], input_size: Sequence[int] | None) -> list[Bound]:
    """Returns strides and factors that each bound the squared norm of the layer, for all sizes if none is given."""
    reduced = geometry.reduced_stride()
    if geometry.padding_mode == "zeros" or geometry.padding == "same_dynamic":
        return [(reduced, 1)]
    sizes = [None] * geometry.dims if input_size is None else input_size
    if geometry.padding_mode != "circular":
        repeats = 1
        for (left, right), n in zip(geometry.padding, sizes, strict=True):
            repeats *= repetition(geometry.padding_mode, left, right, n)
        return [(reduced, repeats)]

    plain: tuple[int, ...] = ()
    strided, unstrided = 1, 1
    for axis, (s, d, k, n) in enumerate(zip(geometry.stride, geometry.dilation, kernel_size, sizes, strict=True)):
        on_torus, after_padding = _circular(s, d, k, geometry.padding[axis], n)
        if s == 1 or (n is not None and n % s == 0):
            plain += (reduced[axis],)
            strided *= min(on_torus, after_padding)
            unstrided *= min(on_torus, after_padding)
        else:
            plain += (1,)
            strided *= after_padding
            unstrided *= on_torus
    if plain == reduced:
        return [(reduced, min(strided, unstrided))]
    return [(reduced, strided), (plain, unstrided)]


def _circular(s: int, d: int, k: int, sides: tuple[int, int], n: int | None) -> tuple[int, int]:
    """Returns how often rows of the torus operator repeat, and ``|E|^2``; for the worst size if none is given."""
    left, right = sides
    reach = d * (k - 1) + 1
    known = n is not None
    if n is None:
        # Both counts fall as n grows, so the smallest input that torch accepts is the worst.
        n = max(1, left, right, reach - left - right)
    room = n + left + right - reach
    # Row o sits at (o s - left) mod n. If s divides n a position comes back after n/s outputs, else after a span of n.
    span = (room // s + 1) * s if known and n % s == 0 else room + 1
    rows = -(-span // n)
    return rows, repetition("circular", left, right, n)
