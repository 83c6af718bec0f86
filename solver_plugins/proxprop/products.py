"""Products of matrices with a leading dimension of groups, which mostly has size one."""

import torch
from torch import Tensor


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Returns ``a b`` per group; a single group is a plain product."""
    return torch.mm(a[0], b[0]).unsqueeze(0) if a.shape[0] == 1 else torch.bmm(a, b)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Adds ``a b`` to ``total`` per group, in place."""
    if a.shape[0] == 1:
        total[0].addmm_(a[0], b[0])
    elif total.is_contiguous():
        total.baddbmm_(a, b)
    else:
        # torch's baddbmm_ would process the groups one after the other.
        total += torch.bmm(a, b)
