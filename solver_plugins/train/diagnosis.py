"""The solver blocks of a model in training: their constants and residuals, and which block is worst."""

import math
from typing import Any

import torch
from torch import nn

from solver_plugins.errors import SolverPluginsError
from solver_plugins.surgery import solver_report
from solver_plugins.train.classification import inputs_of
from solver_plugins.train.data import Batch, example_of
from solver_plugins.train.randomness import seeded


def block_rows(
    model: nn.Module, loader: Any, dtype: torch.dtype, place: tuple[int | str, ...]
) -> dict[str, dict[str, float | None]]:
    """Returns ``L`` and the last residual of each block, on the first examples of a split."""
    device = next(model.parameters()).device
    batch = {key: value.to(device) for key, value in example_of(loader).items()}
    training = model.training
    with seeded(*place, "blocks", devices=True):
        try:
            model.eval()
            found = solver_report(model, inputs_of(batch, dtype))
        finally:
            model.train(training)
    return {block.name: {"L": _number(block.L), "residual": _number(block.last_residual)} for block in found.blocks}


def _number(value: float | None) -> float | None:
    """Returns None for what JSON cannot hold."""
    return value if value is not None and math.isfinite(value) else None


def worst_block(model: nn.Module, batch: Batch, dtype: torch.dtype) -> str:
    """Returns a sentence about the block with the worst residual on a batch, or about why it is unknown.

    It is empty where every block has solved its problem: then no block is to blame.
    """
    try:
        found = solver_report(model, inputs_of(batch, dtype)).blocks
    except SolverPluginsError as error:
        return f" The blocks could not be looked at: {error}"
    lost = [block for block in found if block.verdict == "not finite"]
    # The first block that is not finite: the ones behind it only received its output.
    worst = lost[0] if lost else max(found, key=lambda block: block.last_residual or 0.0)
    if not lost and not worst.last_residual:
        return ""
    scale = "" if worst.scale is None else f", scale {worst.scale:.3g} of the plain layer's"
    return f" The worst block is {worst.name!r}: residual {worst.last_residual:.3g}, L {worst.L:.3g}{scale}."
