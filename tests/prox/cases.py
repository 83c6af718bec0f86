"""One row per registered prior: instances to test, the torch activation, the domain of ``g``, and its kinks."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from solver_plugins.prox import Prior, make_prior

INF = math.inf
STEPS = (1e-3, 0.05, 0.9, 1.0, 1.7, 20.0)


def rational(v: Tensor) -> Tensor:
    """A user's activation: v / sqrt(1 + v^2), monotone with slopes in (0, 1]."""
    return v / torch.sqrt(1 + v * v)


@dataclass(frozen=True)
class Case:
    """What the tests know of one prior.

    Attributes:
        name: The registered name.
        activation: The same function, written with torch, or None where the prior is the paper's own.
        domain: Of ``g``; open or closed.
        parameters: Of the prior.
        kinks: Of the unit-step proximal map, as values of its *argument*.
        zero_argument: The expected one.
        bounded: The expected flag.
    """

    name: str
    activation: Callable[[Tensor], Tensor] | None
    domain: tuple[float, float] = (-INF, INF)
    parameters: dict = field(default_factory=dict)
    kinks: tuple[float, ...] = ()
    zero_argument: float | None = 0.0
    bounded: bool = False

    def make(self) -> Prior:
        return make_prior(self.name, **self.parameters)

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{value:g}" for value in self.parameters.values() if isinstance(value, float))])


def _prelu(slope: float) -> nn.Module:
    return nn.PReLU(init=slope).double()


CASES = [
    Case("identity", lambda a: a),
    Case("relu", functional.relu, (0, INF), kinks=(0,)),
    Case("relu6", functional.relu6, (0, 6), kinks=(0, 6), bounded=True),
    Case("hardtanh", functional.hardtanh, (-1, 1), kinks=(-1, 1), bounded=True),
    Case(
        "hardtanh",
        lambda a: functional.hardtanh(a, 0.5, 2.0),
        (0.5, 2),
        {"min_val": 0.5, "max_val": 2.0},
        kinks=(0.5, 2),
        zero_argument=None,
        bounded=True,
    ),
    Case("leaky_relu", functional.leaky_relu, kinks=(0,)),
    Case("leaky_relu", lambda a: functional.leaky_relu(a, 0.0), (0, INF), {"negative_slope": 0.0}, kinks=(0,)),
    Case("leaky_relu", lambda a: functional.leaky_relu(a, 0.6), parameters={"negative_slope": 0.6}, kinks=(0,)),
    Case(
        "prelu",
        lambda a: functional.prelu(a, torch.tensor([0.25], dtype=a.dtype)),
        parameters={"module": _prelu(0.25)},
        kinks=(0,),
    ),
    Case("softshrink", functional.softshrink, kinks=(-0.5, 0.5)),
    Case("softshrink", lambda a: functional.softshrink(a, 1.5), parameters={"lambd": 1.5}, kinks=(-1.5, 1.5)),
    Case("tanhshrink", functional.tanhshrink),
    Case("elu", functional.elu, (-1, INF), kinks=(0,)),
    Case("elu", lambda a: functional.elu(a, 0.4), (-0.4, INF), {"alpha": 0.4}, kinks=(0,)),
    Case("elu", lambda a: functional.elu(a, 0.0), (0, INF), {"alpha": 0.0}, kinks=(0,)),
    Case("celu", functional.celu, (-1, INF), kinks=(0,)),
    Case("celu", lambda a: functional.celu(a, 2.5), (-2.5, INF), {"alpha": 2.5}, kinks=(0,)),
    Case("tanh", torch.tanh, (-1, 1), bounded=True),
    Case("sigmoid", torch.sigmoid, (0, 1), zero_argument=None, bounded=True),
    Case("atan", torch.atan, (-math.pi / 2, math.pi / 2), bounded=True),
    Case("softsign", functional.softsign, (-1, 1), kinks=(0,), bounded=True),
    Case("hardsigmoid", functional.hardsigmoid, (0, 1), kinks=(-3, 3), zero_argument=-3.0, bounded=True),
    Case("logsigmoid", functional.logsigmoid, (-INF, 0), zero_argument=None),
    Case("softplus", functional.softplus, (0, INF), zero_argument=None),
    Case(
        "softplus",
        lambda a: functional.softplus(a, 3.0, 30.0),
        (0, INF),
        {"beta": 3.0, "threshold": 30.0},
        zero_argument=None,
    ),
    Case("sqrt_softplus", lambda a: functional.softplus(a).sqrt(), (0, INF), zero_argument=None),
    Case(
        "monotone",
        rational,
        (-1, 1),
        {"function": rational, "bounded": True, "zero_argument": 0.0},
        bounded=True,
    ),
    Case("softplus_barrier", None, (0, INF), zero_argument=None),
    Case("softplus_barrier", None, (0, INF), {"gamma": 0.1}, zero_argument=None),
    Case("tanh_barrier", None, (-1, 1), bounded=True),
    Case("tanh_barrier", None, (-1, 1), {"gamma": 0.1}, bounded=True),
    Case("sigmoid_barrier", None, (0, 1), {"gamma": 0.3}, zero_argument=None, bounded=True),
    Case("squared_hinge", None, kinks=(0,)),
    Case("squared_hinge", None, parameters={"gamma": 2.0, "shift": 0.7}, kinks=(-0.7,)),
    Case("squared_hinge", None, parameters={"gamma": 2.0, "shift": -0.5}, kinks=(0.5,), zero_argument=-1.0),
]

COUPLED = {"softmax"}
"""Priors that are not separable: they have tests of their own."""

each_case = pytest.mark.parametrize("case", CASES, ids=str)
each_activation = pytest.mark.parametrize("case", [case for case in CASES if case.activation is not None], ids=str)


def grid(dtype: torch.dtype = torch.float64) -> Tensor:
    """Arguments on both sides of everything, none of them on a kink of any case."""
    return torch.cat(
        [torch.linspace(-9.03, 9.07, 41, dtype=dtype), torch.tensor([-40.1, -1e-3, 1e-3, 40.3], dtype=dtype)]
    )


def away_from_kinks(prior: Prior, case: Case, a: Tensor, step: float, distance: float = 1e-3) -> Tensor:
    """Keeps the arguments at which ``prox(., step)`` is smooth: those whose unit-step argument is not at a kink."""
    v = prior.argument(a, step).detach()
    keep = torch.ones_like(v, dtype=torch.bool)
    for kink in case.kinks:
        keep &= (v - kink).abs() > distance
        keep &= (a - kink).abs() > distance
    return a[keep]
