"""Small equilibria in float64, and dense references that know only numpy and scipy."""

import itertools

import numpy as np
import torch
from scipy import optimize

from solver_plugins.equilibrium import DeepOptEq, OptEqLayer
from tests.prox.cases import CASES, Case

DOUBLE = torch.float64
TIGHT = {"tol": 1e-14, "iters": 400}
ACTIVATIONS = [case for case in CASES if case.activation is not None and case.name != "softmax"]


def network(layers=1, *, state=6, inputs=5, hidden=8, activation="relu", seed=0, norm=0.9, **options) -> DeepOptEq:
    torch.manual_seed(seed)
    made = [
        OptEqLayer.linear(state, inputs, hidden, activation=activation, constraint="none", norm=norm, dtype=DOUBLE)
        for _ in range(layers)
    ]
    return DeepOptEq(made, **{**TIGHT, **options})


def conv_network(layers=1, *, seed=0, constraint="none", **options) -> DeepOptEq:
    torch.manual_seed(seed)
    made = [OptEqLayer.conv2d(3, 2, 4, constraint=constraint, dtype=DOUBLE) for _ in range(layers)]
    return DeepOptEq(made, **{**TIGHT, **options})


def inputs(*shape, seed=1) -> torch.Tensor:
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def scalar(case: Case):
    """The activation as a function of numpy arrays."""
    return lambda v: case.activation(torch.as_tensor(v, dtype=DOUBLE)).detach().numpy()


def integral(case: Case, v: np.ndarray) -> np.ndarray:
    """The integral of the activation from 0 to ``v``, by Gauss-Legendre between its kinks."""
    nodes, weights = np.polynomial.legendre.leggauss(60)
    ends = [-np.inf, *sorted({0.0, *map(float, case.kinks)}), np.inf]
    total = np.zeros_like(v)
    for low, high in itertools.pairwise(ends):
        a, b = np.clip(0.0, low, high), np.clip(v, low, high)
        points = a + (b - a)[..., None] * (nodes + 1) / 2
        total += (scalar(case)(points) * weights).sum(-1) * (b - a) / 2
    return total


def minimiser(case: Case, W: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Minimises |z|^2/2 - 1^T S(W z + c) by L-BFGS, polished by a root finder on its gradient."""

    def value(z):
        return z @ z / 2 - integral(case, W @ z + c).sum()

    def gradient(z):
        return z - W.T @ scalar(case)(W @ z + c)

    found = optimize.minimize(value, np.zeros(W.shape[1]), jac=gradient, method="L-BFGS-B", tol=1e-14)
    assert np.abs(gradient(found.x)).max() < 1e-4
    # A minimum is flat: function values alone cannot place it to more than half of all digits.
    polished = optimize.root(gradient, found.x, tol=1e-14).x
    assert np.abs(gradient(polished)).max() < 1e-12
    return polished
