"""The mean of several dropout masks: the noise of dropout, divided by their number, for one product."""

import torch
from torch import Tensor, nn

from solver_plugins.errors import OptionError


def averaged_dropout(
    x: Tensor, p: float, masks: int = 10, training: bool = True, generator: torch.Generator | None = None
) -> Tensor:
    """Returns the mean of ``masks`` independent dropouts of ``x`` at the rate ``p``; one mask is ordinary dropout.

    A layer behind it has the noise of dropout at the rate ``q/(1 + q)``, ``q = p / (masks (1 - p))``: 0.25 for three
    masks at 0.5. It is the control of a sampling solver, which averages over its iterations, too.
    """
    if not 0 <= p < 1 or masks < 1:
        raise OptionError(f"Expected a rate p in [0, 1) and at least one mask; found p={p}, masks={masks}.")
    if not training or p == 0:
        return x
    # At least float32: half precision would round a mean of masks.
    keep = torch.full_like(x, 1 - p, dtype=torch.promote_types(x.dtype, torch.float32), requires_grad=False)
    count = torch.bernoulli(keep, generator=generator)
    for _ in range(masks - 1):
        count = count + torch.bernoulli(keep, generator=generator)
    return (x * (count / (masks * (1 - p)))).to(x.dtype)


class AveragedDropout(nn.Module):
    """The mean of several dropout masks as a module; see :func:`averaged_dropout`."""

    def __init__(self, p: float = 0.5, masks: int = 10):
        super().__init__()
        averaged_dropout(torch.zeros(0), p, masks)
        self.p, self.masks = p, masks

    def forward(self, input: Tensor) -> Tensor:
        return averaged_dropout(input, self.p, self.masks, self.training)

    def extra_repr(self) -> str:
        return f"p={self.p:g}, masks={self.masks}"
