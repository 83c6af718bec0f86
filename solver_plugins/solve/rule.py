"""What an unrolled solve is, beside its tensors."""

from dataclasses import dataclass

from solver_plugins.prox import Prior
from solver_plugins.solve.products import Map


@dataclass(frozen=True, eq=False)
class Rule:
    """All of a solve that is no tensor.

    Attributes:
        map: What it multiplies by, and with which precision.
        path: "gram" or "two_step".
        prior: ``g``.
        unit: Whether the proximal step is the number one (formulation ``normalized``); else it is the rate.
        iterations: ``T``.
        momentum: Whether there is one (``fista``).
        low: Whether iterates are computed again in the backward pass instead of being kept.
        images: Of how many iterations, the first ones, a two-step path keeps ``z_k``.
        stacked: Whether :mod:`solver_plugins.solve.stacked` may run it, where values are at hand.
    """

    map: Map
    path: str
    prior: Prior
    unit: bool
    iterations: int
    momentum: bool
    low: bool
    images: int
    stacked: bool = False
