"""The one table of tolerances: how far two ways of computing the same number may lie apart, by dtype."""

from typing import NamedTuple

import torch


class Tolerance(NamedTuple):
    """Bounds for ``torch.testing.assert_close(actual, expected, **tolerance(dtype)._asdict())``."""

    rtol: float
    atol: float


# Some tens of rounding errors each: enough for sums of a few hundred terms, too little to hide a wrong formula.
_TABLE = {
    torch.float64: Tolerance(rtol=1e-9, atol=1e-10),
    torch.float32: Tolerance(rtol=1e-4, atol=1e-5),
    torch.float16: Tolerance(rtol=1e-2, atol=5e-3),
    torch.bfloat16: Tolerance(rtol=5e-2, atol=2e-2),
    torch.complex128: Tolerance(rtol=1e-9, atol=1e-10),
    torch.complex64: Tolerance(rtol=1e-4, atol=1e-5),
}


def tolerance(dtype: torch.dtype) -> Tolerance:
    """Returns ``rtol`` and ``atol`` for results of ``dtype``.

    Raises:
        KeyError: For a dtype without an entry: integers and booleans are compared exactly.
    """
    return _TABLE[dtype]
