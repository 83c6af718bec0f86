"""The dilogarithm ``Li2``, which the penalty of softplus needs and torch does not have."""

import math

import torch
from torch import Tensor

_BERNOULLI = {2: 1 / 6, 4: -1 / 30, 6: 1 / 42, 8: -1 / 30, 10: 5 / 66, 12: -691 / 2730, 14: 7 / 6}


def dilogarithm_exp(y: Tensor) -> Tensor:
    """Returns ``Li2(exp(-y)) = sum_k exp(-k y)/k^2`` for ``y >= 0``; NaN below.

    With ``w = -log(1 - z)``, ``Li2(z) = w - w^2/4 + sum_n B_2n w^(2n+1)/(2n+1)!`` converges like ``(w/2 pi)^(2n)``;
    it is used for ``z <= 1/2``, and the reflection ``Li2(z) = pi^2/6 - log(z) log(1 - z) - Li2(1 - z)`` above.
    """
    near = y < math.log(2)  # z > 1/2; there -log(1 - (1 - z)) = y
    w = torch.where(near, y, -torch.log1p(-torch.exp(-y)))
    series = w - w**2 / 4 + sum(b * w ** (n + 1) / math.factorial(n + 1) for n, b in _BERNOULLI.items())
    return torch.where(near, math.pi**2 / 6 + torch.xlogy(y, -torch.expm1(-y)) - series, series)
