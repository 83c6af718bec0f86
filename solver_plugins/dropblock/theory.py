"""The average objective of structured dropout.

Samples are rows, as usual in torch. With inputs ``X`` (N, b), targets ``Y`` (N, a) and weights ``V`` (b, d), ``U``
(a, d), the network is ``X V U^T`` and its hidden features are ``X V``. The paper uses the transposed matrices.

    E_z |Y - X V diag(z/mu) U^T|^2 = |Y - X V U^T|^2 + <Cbar, U^T U o (X V)^T (X V)>      (Lemma 3.1)
"""

import torch
from torch import Tensor

from solver_plugins.dropblock.estimate import Estimate
from solver_plugins.dropblock.retain import check_theta
from solver_plugins.dropblock.schemes import ESTIMATE_SAMPLES, SampledScheme, Sampler, Scheme, make_scheme
from solver_plugins.errors import OptionError, ShapeError


def characteristic_matrix(
    scheme: str | Scheme | Sampler,
    d: int | tuple[int, ...],
    theta: float | None = None,
    block_size: int | None = None,
    *,
    samples: int = ESTIMATE_SAMPLES,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Returns ``Cbar_ij = Cov(z_i, z_j)/(mu_i mu_j)`` (eq. 16) in float64, for a scheme as in :func:`make_scheme`.

    It is exact for named schemes. For a sampler it is estimated from ``samples`` masks;
    :func:`estimate_characteristic_matrix` also gives error bars. ``d`` is the width, or the size of a map, whose units
    are in the order of ``flatten``.
    """
    made = make_scheme(scheme, theta, block_size)
    if isinstance(made, SampledScheme):
        return made.estimate(_size(d), samples, generator).matrix
    return made.characteristic_matrix(_size(d))


def estimate_characteristic_matrix(
    sampler: Sampler | SampledScheme,
    d: int | tuple[int, ...],
    *,
    mean: float | Tensor | None = None,
    samples: int = ESTIMATE_SAMPLES,
    generator: torch.Generator | None = None,
) -> Estimate:
    """Estimates ``Cbar`` of a sampler by Monte Carlo, with error bars, which a known ``mean`` makes smaller."""
    scheme = sampler if isinstance(sampler, SampledScheme) else SampledScheme(sampler, mean)
    return scheme.estimate(_size(d), samples, generator)


def omega(U: Tensor, features: Tensor, cbar: Tensor) -> Tensor:
    """Returns ``<Cbar, U^T U o H^T H>`` with the features ``H`` as rows (eq. 15), in O(d^2 (a + N)).

    ``U`` ``(a, d)`` is the weight of the last layer, as in ``nn.Linear``. ``cbar`` may be the diagonal ``(d,)`` alone,
    which costs O(d (a + N)).
    """
    d = U.shape[-1]
    if U.ndim != 2 or features.ndim != 2 or features.shape[1] != d or cbar.shape not in ((d, d), (d,)):
        raise ShapeError(
            "Expected U (a, d), features (N, d) and cbar (d, d) or (d,); found "
            f"{tuple(U.shape)}, {tuple(features.shape)} and {tuple(cbar.shape)}."
        )
    cbar = cbar.to(U)
    if cbar.ndim == 1:
        return (cbar * U.square().sum(0) * features.square().sum(0)).sum()
    return (cbar * (U.mT @ U) * (features.mT @ features)).sum()


def dropconnect_omega(outer: Tensor | None, weight: Tensor, inputs: Tensor, theta: float) -> Tensor:
    """Returns DropConnect's regulariser ``(1-theta)/theta sum_k |u_k|^2 v_k^T diag(M^T M) v_k``, for any inputs ``M``.

    It only equals the regulariser of dropout, as in Theorem 4.1, if ``M^T M`` is diagonal. ``outer`` is ``U`` ``(a,
    d)``, the layer behind the one that drops (None if that is the last one), and ``weight`` ``(d, b)`` the transpose of
    ``V``.
    """
    check_theta(theta)
    if weight.ndim != 2 or inputs.ndim != 2 or inputs.shape[1] != weight.shape[1]:
        raise ShapeError(
            f"Expected weights (d, b) and inputs (N, b); found {tuple(weight.shape)} and {tuple(inputs.shape)}."
        )
    if outer is not None and (outer.ndim != 2 or outer.shape[1] != weight.shape[0]):
        raise ShapeError(f"Expected outer weights (a, {weight.shape[0]}); found {tuple(outer.shape)}.")
    each = weight.square() @ inputs.square().sum(0)
    if outer is not None:
        each = outer.square().sum(0) * each
    return (1 - theta) / theta * each.sum()


def deterministic_objective(U: Tensor, V: Tensor, X: Tensor | None, Y: Tensor, scheme: Scheme) -> Tensor:
    """Returns ``E_z |Y - X V diag(z/mu) U^T|^2`` without sampling (Lemma 2.1, 3.1); ``X=None`` is the identity."""
    features = V if X is None else X @ V
    return (Y - features @ U.mT).square().sum() + scheme.variance(U, features).sum()


def _size(d: int | tuple[int, ...]) -> tuple[int, ...]:
    size = (d,) if isinstance(d, int) else tuple(d)
    if not size or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in size):
        raise OptionError(f"Expected a width, or the size of a map; found {d!r}.")
    return size
