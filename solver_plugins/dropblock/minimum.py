"""The global minimum of DropBlock training for a linear network with one hidden layer (Theorem 2.7, corrected).

    f(U, V, d) = |Y - X V U^T|^2 + (1 - theta(d))/theta(d) sum_k |X V_k U_k^T|^2        (eq. 8)

over all widths ``d``, with ``theta(d)`` of eq. 7. Its minimum is that of a convex problem: ``|Y - A|^2`` plus
``(1 - theta_bar)/theta_bar`` times the squared k-support norm of the singular values of ``A``. At a fixed width it is a
lower bound; see :attr:`GlobalMinimum.fewest_blocks` for the widths that attain it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from solver_plugins.dropblock.errors import FactorisationError
from solver_plugins.dropblock.retain import check_block_size, check_divides, check_theta, theta_of_width
from solver_plugins.dropblock.support_norm import k_support_norm_sq, shrink
from solver_plugins.errors import OptionError, ShapeError
from solver_plugins.prox.prior import in_float64

_TRIES = 4


@dataclass(frozen=True)
class GlobalMinimum:
    """The minimum and one point that attains it, in float64.

    Attributes:
        singular_values: Of the optimal product ``A = X V U^T``, ``min(N, a)`` of them, largest first.
        rho: ``rho - 1`` singular values of ``Y`` are divided by ``1 + beta`` ...
        lam: ... those from ``rho`` to ``lam`` are lowered by the same number, and the others become zero.
        objective: The minimum.
        beta: ``(1 - theta_bar)/theta_bar``.
        product: ``A``, of shape ``(N, a)``.
        U: Of shape ``(a, d)``.
        V: Of shape ``(b, d)``; ``(N, d)`` without inputs ``X``.
        width: ``d``, a multiple of the block size.
        theta: ``theta(d)``, the retain probability at this width.
        fewest_blocks: No width with fewer blocks attains the minimum. At the minimum, every block holds all scaled
            singular values and a projection of rank ``s = r - rho + 1`` of the ``n = lam - rho + 1`` lowered ones,
            which needs at least ``max(n/s, n/(n - s))`` blocks.
    """

    singular_values: Tensor
    rho: int
    lam: int
    objective: float
    beta: float
    product: Tensor
    U: Tensor
    V: Tensor
    width: int
    theta: float
    fewest_blocks: int


def global_minimum(
    Y: Tensor, theta_bar: float, block_size: int, X: Tensor | None = None, *, width: int | None = None
) -> GlobalMinimum:
    """Computes the global minimum of DropBlock training in closed form (Theorem 2.7), with a balanced factorisation.

    Args:
        Y: Targets, of shape ``(N, a)``: one sample per row.
        theta_bar: The retain probability of a network with a single block; see :func:`theta_bar_of`.
        block_size: The block size ``r``.
        X: Inputs, of shape ``(N, b)``; by default the identity. With more samples than inputs, ``Y`` is projected onto
            the range of ``X``; the rest adds to the objective.
        width: The width of the factorisation; by default one at which it is easy to find.

    Raises:
        OptionError: If ``theta_bar`` is not in (0, 1], or the width is less than ``r`` times the fewest blocks.
        BlockSizeError: If the block size does not divide the width.
        ShapeError: If the shapes do not fit.
        FactorisationError: If no balanced factorisation was found at this width.
    """
    check_theta(theta_bar, "theta_bar")
    r = check_block_size(block_size)
    if Y.ndim != 2 or 0 in Y.shape:
        raise ShapeError(f"Expected targets (N, a); found the shape {tuple(Y.shape)}.")
    if X is not None and (X.ndim != 2 or X.shape[0] != Y.shape[0]):
        raise ShapeError(f"Expected inputs ({Y.shape[0]}, b), one row for each target; found {tuple(X.shape)}.")
    Y = in_float64(Y)
    # The pseudo-inverse drops directions of X that are zero up to rounding.
    inverse = None if X is None else torch.linalg.pinv(in_float64(X))
    reachable = Y if X is None or inverse is None else in_float64(X) @ (inverse @ Y)
    left, m, right = torch.linalg.svd(reachable, full_matrices=False)
    m = torch.where(m > m[0] * 1e-14 * max(Y.shape), m, 0)
    beta = (1 - theta_bar) / theta_bar
    a, rho, lam = shrink(m, r, beta) if beta > 0 else (m, torch.tensor(1), (m > 0).sum())
    product = left * a @ right
    objective = (Y - product).square().sum() + beta * k_support_norm_sq(a, r)
    blocks = _Blocks.of(a, r)
    bases = _bases(blocks, width, r)
    count = len(bases)
    scaled, lowered = slice(0, blocks.scaled), slice(blocks.scaled, blocks.rank)
    root = (a[scaled] / count).sqrt()
    level = (blocks.level / count) ** 0.5

    def columns(vectors: Tensor) -> Tensor:
        tail = level * (vectors[:, lowered] @ bases)
        head = (root * vectors[:, scaled]).expand(count, -1, -1)
        block = torch.cat([head, tail], dim=-1)
        # If the rank is lower than the block size, the remaining columns are zero.
        block = torch.nn.functional.pad(block, (0, r - block.shape[-1]))
        return block.transpose(0, 1).reshape(len(vectors), count * r)

    features = columns(left)
    return GlobalMinimum(
        a, int(rho), int(lam), float(objective), beta, product, columns(right.mT),
        features if inverse is None else inverse @ features, count * r, theta_of_width(theta_bar, count * r, r),
        blocks.fewest,
    )  # fmt: skip


@dataclass(frozen=True)
class _Blocks:
    """How the singular values ``a`` go to blocks: ``scaled`` of them to every block, the others in parts.

    ``t`` has the ``t_i`` of the k-support norm for the other values, ``a_i / level``; for scaled values ``t_i = 1``.
    """

    t: Tensor
    scaled: int
    rank: int
    level: float
    s: int

    @staticmethod
    def of(a: Tensor, r: int) -> "_Blocks":
        rank = int((a > a[0] * 1e-13).sum()) if a[0] > 0 else 0
        a = a[:rank]
        if rank <= r:
            return _Blocks(a[rank:], rank, rank, 0.0, 0)
        scaled = 0
        # The rule of the norm: an entry is scaled if it is at least its share of the rest.
        while (r - scaled) * a[scaled] >= a[scaled:].sum() * (1 - 1e-12):
            scaled += 1
        level = float(a[scaled:].sum()) / (r - scaled)
        return _Blocks(a[scaled:] / level, scaled, rank, level, r - scaled)

    @property
    def fewest(self) -> int:
        return 1 if self.s == 0 else fewest_projections(self.rank - self.scaled, self.s)


def _bases(blocks: _Blocks, width: int | None, r: int) -> Tensor:
    """Returns the bases ``(K, n, s)`` of the parts that each block holds."""
    fewest = blocks.fewest
    if width is not None:
        if not isinstance(width, int) or width < r * fewest:
            raise OptionError(
                f"Expected a width of at least {r * fewest} ({fewest} blocks of {r}), where the minimum can be "
                f"attained; found {width!r}."
            )
        check_divides(r, width)
    if blocks.s == 0:
        return blocks.t.new_zeros(1 if width is None else width // r, 0, 0)
    counts = [width // r] if width is not None else [fewest * 2 ** (i + 1) for i in range(_TRIES)]
    for count in counts:
        bases = mean_of_projections(blocks.t, blocks.s, count)
        if bases is not None:
            return bases
    raise FactorisationError(
        f"No balanced factorisation of {blocks.rank} singular values was found with {counts[-1]} blocks of {r}; "
        + ("the width may be too small: try twice as much." if width is not None else "the values may be too uneven.")
    )


_TOLERANCE = 1e-12
_ITERATIONS = 4000


def fewest_projections(n: int, s: int) -> int:
    """Returns the least possible number, ``max(ceil(n/s), ceil(n/(n - s)))``; 1 if ``n = s``."""
    return 1 if n == s else max(math.ceil(n / s), math.ceil(n / (n - s)))


def mean_of_projections(t: Tensor, s: int, count: int) -> Tensor | None:
    """Finds ``K = count`` orthogonal projections of rank ``s`` with the mean ``diag(t)``, ``0 < t_i < 1``, or None.

    Returns orthonormal bases ``B`` of shape ``(count, n, s)``, with ``sum_k B_k B_k^T = count diag(t)``. It alternates
    between these two properties. Ranks bound ``K`` from below: ``K s >= n``, and, for the complements of the
    projections, ``K (n - s) >= n``.
    """
    n = len(t)
    if 2 * s > n:
        # The complements have the smaller rank.
        complements = mean_of_projections(1 - t, n - s, count)
        return None if complements is None else torch.linalg.qr(complements, mode="complete").Q[..., n - s :]
    generator = torch.Generator().manual_seed(0)
    bases = torch.randn(count, n, s, generator=generator, dtype=torch.float64).to(t.device)
    root = (count * t).sqrt()[:, None]
    for iteration in range(_ITERATIONS):
        # The nearest orthonormal columns within each basis ...
        u, _, vh = torch.linalg.svd(bases, full_matrices=False)
        bases = u @ vh
        rows = bases.transpose(0, 1).reshape(n, count * s)
        if iteration % 8 == 0:
            error = rows @ rows.mT - torch.diag(count * t)
            if float(error.abs().amax()) < _TOLERANCE * count:
                return bases
        # ... then the nearest orthogonal rows with the right lengths, over all bases.
        u, _, vh = torch.linalg.svd(root * rows, full_matrices=False)
        bases = (root * (u @ vh)).reshape(n, count, s).transpose(0, 1)
    return None
