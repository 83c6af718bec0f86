"""How much a sampling block's noise is, as the rate of a dropout."""

import copy

import torch
from torch import Tensor

from solver_plugins.blocks.block import SolverBlock
from solver_plugins.errors import OptionError
from solver_plugins.operators import operator_from_kernel
from solver_plugins.prox.prior import in_float64


@torch.no_grad()
def effective_rate(block: SolverBlock, batch: Tensor, draws: int = 64) -> float:
    """Returns the dropout rate that has the same relative noise as a sampling block.

    A solver averages over its iterations, so its noise is that of dropout at a lower rate than its own ``p``: with ten
    iterations at 0.5 about 0.06, with three 0.25, with ten at 0.95 about 0.5. The noise is that of what the activation
    reads, ``E|v - E v|^2 / |E v|^2`` over draws and the whole batch. Dropout at ``q`` in front of the layer has
    ``q/(1 - q) sum_i u_i^2 |a_i|^2 / |A u + b|^2``; behind the layer ``q/(1 - q)``.

    Args:
        block: A block whose solver samples; its mode does not matter. Random numbers come from a copy of the global
            state, which stays as it was.
        batch: The layer's input.
        draws: How many samples are drawn; the result has a relative error of about ``sqrt(2/draws)``, less for wide
            layers and large batches.

    Raises:
        OptionError: If the solver does not sample, the block solves behind a norm or a skip, or ``draws`` is below two.
    """
    solver = block.solver
    if solver.samples == "nothing" or block.link is not None or draws < 2:
        what = "behind a norm or a skip" if block.link is not None else f"with {solver.name!r}, draws={draws}"
        raise OptionError(
            "Expected a block that samples and solves right at its layer, and at least two draws; found one that "
            f"solves {what}."
        )
    sampling = copy.copy(solver)
    sampling.samples_in_evaluation = True
    before = block.solver, block.training, block.output
    others = [] if batch.device.type == "cpu" else [batch.device]
    block.solver, block.training, block.output = sampling, False, "argument"
    try:
        with torch.random.fork_rng(others, device_type=batch.device.type if others else "cuda"):
            found = torch.stack([in_float64(block._run(batch)[0]) for _ in range(draws)])
    finally:
        block.solver, block.training, block.output = before
    # Unbiased: the mean of the draws has a share of their noise.
    noise = found.var(0).sum()
    relative = noise / (found.mean(0).square().sum() - noise / draws)
    odds = relative * _over_dropout(block, in_float64(batch))
    return float(odds / (1 + odds))


def _over_dropout(block: SolverBlock, u: Tensor) -> Tensor:
    """Returns ``|A u + b|^2 / sum_i u_i^2 |a_i|^2``: a relative noise times this is dropout's ``q/(1 - q)``."""
    if block.solver.samples == "outputs":
        return torch.ones(())
    kernel = in_float64(block._kernel_at_rest())
    plain = operator_from_kernel(kernel, block.geometry, u.shape)
    output = plain.apply(u)
    if block.bias is not None:
        output = output + in_float64(block.bias).view(-1, *[1] * block.geometry.dims)
    return (
        output.square().sum() / operator_from_kernel(kernel.square(), block.geometry, u.shape).apply(u.square()).sum()
    )
