"""The Moreau envelopes of unit layers and the block objective of two (Theorem 2, Corollary 1), solved numerically."""

import torch

from solver_plugins.equilibrium.problem import potential
from solver_plugins.equilibrium.solvers import EquilibriumAnderson, settle
from solver_plugins.errors import NotConvergedWarning, OptionError, warn


def envelope(unit, z, alpha):
    """Returns ``alpha M(z)`` per sample, ``M`` the Moreau envelope of ``phi`` with parameter ``1 - alpha``.

        alpha M(z) = max_u <u, z> - alpha psi(u) - (1 - alpha)/2 |u|^2 - |z|^2/2        (proof of Theorem 2)

    The maximum is where ``f(u) = alpha grad psi(u) + (1 - alpha) u = z``, which is solved to rounding errors.

    Raises:
        OptionError: Unless ``0 < alpha < 1``: at 1 the envelope is ``phi`` itself, which may be infinite.
    """
    dims = unit.operator.problem_dims
    u = preimage(unit, z.detach(), alpha)
    inner = (u * z).sum(dims) - alpha * potential(unit, u) - (1 - alpha) / 2 * u.square().sum(dims)
    return inner - z.square().sum(dims) / 2


def block_objective(first, second, alpha, z1, z0):
    """Returns the convex function of Corollary 1 per sample, minimal where ``z1 = f1(z0)`` and ``z0 = f2(z1)``.

    alpha M_1(z1) + alpha M_2(z0) + |z1 - z0|^2 / 2
    """
    coupling = (z1 - z0).square().sum(first.operator.problem_dims) / 2
    return envelope(first, z1, alpha) + envelope(second, z0, alpha) + coupling


def preimage(unit, z, alpha):
    """Returns ``u`` with ``alpha W^T s(W u + c) + (1 - alpha) u = z``, without a gradient.

    ``u -> u - f(u) + z`` contracts by ``alpha``, because the Jacobian of ``f`` lies between ``1 - alpha`` and 1.
    """
    if not 0 < alpha < 1:
        raise OptionError(f"Expected alpha in (0, 1), where a layer has an inverse; found {alpha!r}.")
    solver = EquilibriumAnderson.from_options(tol=4 * torch.finfo(z.dtype).eps, iters=1000)
    run = settle(solver, _Inversion(unit, z, alpha))
    if float(run.residual.amax()) > torch.finfo(z.dtype).eps ** 0.75:
        warn(f"The inverse of a layer is only accurate to {float(run.residual.amax()):.0e}.", NotConvergedWarning)
    return run.value


class _Inversion:
    """``u -> u - f(u) + z``."""

    def __init__(self, unit, z, alpha):
        self.unit, self.z, self.alpha = unit, z, alpha
        self.dims, self.channels_last = unit.operator.problem_dims, False

    def image(self, u):
        u = torch.zeros_like(self.z) if u is None else u
        return u - self.unit.step(u, self.alpha) + self.z
