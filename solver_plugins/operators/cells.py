"""Cells that cover all frequencies; a symbol is evaluated at the centre of each.

**What a centre says about its cell.** Let ``G(w) = P(w) P(w)^H`` be the Gram symbol of a kernel (see
:mod:`~solver_plugins.operators.symbol`), a trigonometric polynomial of degree ``m_j`` in ``w_j``, and ``M`` the
supremum of ``lambda_max(G(w))``, attained at ``w*`` by a unit vector ``x``. ``T(w) = x^H G(w) x`` lies in ``[0, M]``,
so ``T - M/2`` is bounded by ``M/2`` and (M. Riesz) is at least ``M/2 cos(m_j d)`` at a distance ``d <= pi/m_j`` from
``w*`` along axis ``j``: ``T >= M cos(m_j d / 2)^2`` there. Axis by axis,

    ``lambda_max(G(w)) >= T(w) >= M prod_j cos(m_j (w_j - w*_j) / 2)^2``.

Let ``shrink`` be the smallest such product between a centre and the points of its cell. If
``lambda_max(G(centre)) <= beta shrink`` at the centre of every cell, then ``M <= beta``: otherwise the cell of ``w*``
would have ``lambda_max(G(centre)) >= M shrink > beta shrink``.

**Which cells.** The product is at least ``cos(r)^2`` at a scaled distance ``r^2 = sum_j (m_j d_j / 2)^2``, because
``-log cos sqrt(t)`` is convex: cells should have a small radius for their size. In two dimensions those are hexagons, a
quarter fewer than squares. Real kernels have ``G(-w) = conj G(w)``, so half of all frequencies are enough.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Cells:
    """Cells of one shape around frequencies ``centres`` ``(count, dims)``, for a symbol of degrees ``m_j``.

    ``widths`` are half the widths of a box that contains a cell, per dimension; ``shrink`` is the smallest ratio of a
    symbol at the centre to its maximum, if the maximum lies in the cell.
    """

    centres: Tensor
    degrees: tuple[int, ...]
    widths: tuple[float, ...]
    shrink: float

    def split(self, which: Tensor) -> "Cells":
        """Returns boxes of half the widths that cover the chosen cells (a mask); a point stays a point."""
        widths = tuple(width / 2 for width in self.widths)
        signs = itertools.product(*((-1, 1) if width else (0,) for width in widths))
        steps = [[sign * width for sign, width in zip(choice, widths, strict=True)] for choice in signs]
        offsets = self.centres.new_tensor(steps).reshape(len(steps), 1, len(widths))
        parents = self.centres[which]
        centres = (parents + offsets).reshape(len(steps) * len(parents), len(widths))
        return Cells(centres, self.degrees, widths, _cos_squared(self.degrees, widths))


def covering(degrees: Sequence[int], factor: float, device: torch.device) -> Cells:
    """Returns cells over one of each pair ``w, -w``, with ``shrink`` at least ``1 / factor``."""
    degrees = tuple(degrees)
    sampled = [axis for axis, degree in enumerate(degrees) if degree]
    if len(sampled) == 2:
        return min((_hexagons(degrees, axes, factor, device) for axes in (sampled, sampled[::-1])), key=_count)
    return _boxes(degrees, sampled, factor, device)


def _boxes(degrees: tuple[int, ...], sampled: list[int], factor: float, device: torch.device) -> Cells:
    radius = math.acos(factor ** (-0.5 / max(1, len(sampled))))
    axes, widths = [], []
    for axis, degree in enumerate(degrees):
        # Half of the last sampled dimension is enough; a dimension of degree zero is not sampled.
        length = 0.0 if degree == 0 else math.pi if axis == sampled[-1] else 2 * math.pi
        count = max(1, math.ceil(length * degree / (4 * radius)))
        axes.append([(index + 0.5) * length / count for index in range(count)])
        widths.append(length / (2 * count))
    points = list(itertools.product(*axes))
    centres = torch.tensor(points, dtype=torch.float64, device=device).reshape(len(points), len(degrees))
    return Cells(centres, degrees, tuple(widths), _cos_squared(degrees, widths))


def _hexagons(degrees: tuple[int, ...], axes: Sequence[int], factor: float, device: torch.device) -> Cells:
    """Returns rows of points along axis ``x``, every other row moved by half a step.

    Around a point at 0 the cell has corners ``(0, +-top)`` and ``(+-dx/2, +-side)``; rows are ``dy = top + side``
    apart. With ``x`` moved by a quarter step the pattern is symmetric about 0, which lies between two rows, so half of
    the rows are enough.
    """
    x, y = axes
    radius = math.acos(factor**-0.5)
    columns = math.ceil(math.pi * degrees[x] / (math.sqrt(3) * radius))
    rows = math.ceil(math.pi * degrees[y] / (3 * radius))
    dx, dy = 2 * math.pi / columns, math.pi / rows
    # All corners have the same scaled distance, as far as whole numbers of rows and columns allow it.
    side = max(0.0, dy / 2 - (degrees[x] * dx / degrees[y]) ** 2 / (8 * dy))
    top = dy - side
    row = torch.arange(rows, dtype=torch.float64)
    column = torch.arange(columns, dtype=torch.float64)
    centres = torch.zeros(rows, columns, len(degrees), dtype=torch.float64)
    centres[..., x] = dx * (column + 0.25 * (1 - 2 * (row[:, None] % 2)))
    centres[..., y] = dy * (row[:, None] + 0.5)
    widths = [0.0] * len(degrees)
    widths[x], widths[y] = dx / 2, top
    # The product falls from the centre outwards and its level sets are convex, so it is smallest at a corner.
    pair = (degrees[x], degrees[y])
    shrink = min(_cos_squared(pair, (0.0, top)), _cos_squared(pair, (dx / 2, side)))
    return Cells(centres.flatten(0, 1).to(device), degrees, tuple(widths), shrink)


def _count(cells: Cells) -> tuple[int, float]:
    return len(cells.centres), -cells.shrink


def _cos_squared(degrees: Sequence[int], distances: Sequence[float]) -> float:
    """Returns the product of ``cos(m d / 2)^2``, or zero where there is no bound."""
    product = 1.0
    for degree, distance in zip(degrees, distances, strict=True):
        product *= math.cos(min(degree * distance, math.pi) / 2) ** 2
    return product
