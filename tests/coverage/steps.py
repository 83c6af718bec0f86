"""Rough step sizes, for checks of many models whose weights do not move.

Certificates would take most of the time of these checks, and nothing in them depends on a constant being a bound:
certificates have tests of their own.
"""

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
from torch import Tensor

from solver_plugins.blocks.stepsize import STEP_BUFFERS, TrackedStep
from solver_plugins.operators import start_vectors
from solver_plugins.solve import working_dtype

POWER_STEPS = 3
MARGIN = 1.3
"""Factor on the quotient of the power steps."""


@contextlib.contextmanager
def rough_steps() -> Iterator[None]:
    """Within it, blocks of this process take rough constants, and keep those that they computed first.

    A rough constant takes a kernel as one matrix, whose norm is not the convolution's. It may be too low, and a solve
    with it may diverge; the few iterations of a check do not.
    """
    with (
        mock.patch.object(TrackedStep, "compute_step", _rough_step),
        mock.patch.object(TrackedStep, "_current_L", lambda block, *_: block.L),
        mock.patch.object(TrackedStep, "certify_in_evaluation", False),
    ):
        yield


@torch.no_grad()
def _rough_step(block: TrackedStep, method: str = "certified", tolerance: float = 0.1) -> dict[str, Tensor]:
    """Stands in for ``TrackedStep.compute_step``."""
    kernel = block._kernel_at_rest().detach()
    reference = block._new_reference(kernel)
    constant = rough_constant(kernel, block.geometry.groups, next(iter(reference.values()), None))
    # An image of NaN belongs to no weights: behind the context the first look certifies.
    values = dict.fromkeys(STEP_BUFFERS, torch.ones_like(constant))
    unknown = {"image": torch.full_like(block.image, torch.nan), "power_vectors": start_vectors(kernel, block.geometry)}
    return {**values, "L": constant, **unknown, **reference}


def rough_constant(kernel: Tensor, groups: int, diagonal: Tensor | None) -> Tensor:
    """Returns roughly ``lambda_max(A A^T)``: a few power steps on the kernel as one matrix per group, with a margin."""
    matrix = kernel.flatten(1).to(working_dtype(kernel.dtype))
    if diagonal is not None:
        matrix = matrix * diagonal[:, None]
    blocks = matrix.unflatten(0, (groups, -1))
    v = torch.ones(*blocks.shape[:2], 1, dtype=matrix.dtype)
    quotient = v.new_zeros(())
    for _ in range(POWER_STEPS):
        v = v / torch.linalg.vector_norm(v, dim=1, keepdim=True).clamp_min(torch.finfo(v.dtype).tiny)
        v = blocks @ (blocks.mT @ v)
        quotient = torch.linalg.vector_norm(v, dim=1).amax()
    return MARGIN * torch.maximum(quotient, matrix.square().sum(1).amax())
