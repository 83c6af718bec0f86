"""Gains that give converted blocks the scale of the layers they were, and the blend between the two.

At ``K > 1`` a block's output is ``v_K`` instead of the plain layer's ``v_1``, of another size; over a deep network the
sizes multiply. A gain and a shift per output feature give ``g v_K + s`` the mean and the variance that ``v_1`` has in
the original network, so that as much of it passes the activation as before. Gains alone do not: a feature that is
negative most of the time, and then is not, opens a ReLU.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from solver_plugins.blocks.block import SolverBlock
from solver_plugins.blocks.install import require_blocks
from solver_plugins.errors import InputError
from solver_plugins.prox.prior import in_float64
from solver_plugins.registry import SOLVERS

LARGEST_GAIN = 1e3
"""Features that hardly ever are active have no scale to speak of: their gain is kept within this factor."""


class _Moments:
    """Mean and variance of each feature, over all calls that it observes."""

    def __init__(self) -> None:
        self.total: Tensor | float = 0.0
        self.squares: Tensor | float = 0.0
        self.count = 0

    def __call__(self, argument: Tensor, dim: int) -> None:
        features = in_float64(argument).movedim(dim, -1).flatten(0, -2)
        self.total = self.total + features.sum(0)
        self.squares = self.squares + features.square().sum(0)
        self.count += len(features)

    @property
    def mean(self) -> Tensor:
        return torch.as_tensor(self.total) / max(self.count, 1)

    @property
    def variance(self) -> Tensor:
        return (torch.as_tensor(self.squares) / max(self.count, 1) - self.mean.square()).clamp_min(0)


class _Matching:
    """Makes gain and shift of one block from what it has seen so far, while the blocks before it already use theirs."""

    def __init__(self, wanted: _Moments) -> None:
        self.wanted, self.seen = wanted, _Moments()

    def __call__(self, argument: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        self.seen(argument, dim)
        gain, shift = self.scale()
        return gain.to(argument), shift.to(argument)

    def scale(self) -> tuple[Tensor, Tensor]:
        wanted, seen = self.wanted.variance, self.seen.variance
        ratio = (wanted / seen.clamp_min(torch.finfo(seen.dtype).tiny)).sqrt().clamp(1 / LARGEST_GAIN, LARGEST_GAIN)
        gain = torch.where((wanted > 0) & (seen > 0), ratio, 1.0)
        return gain, self.wanted.mean - gain * self.seen.mean


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    progress: bool = True,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Gives every solver block the mean and variance that its layer had in the original network.

    Call it right after the conversion, before wrapping the model. It runs a few batches twice, in evaluation mode and
    without gradients: once with one iteration per block, which is the original network, and once with the solvers, to
    set a gain and a shift for each feature, block after block. These are part of the conversion:
    :func:`solver_plugins.conversion_of` includes them, and :func:`solver_plugins.revert_model` removes them. With
    several processes, all use those of the first.

    Args:
        model: A converted model.
        batches: A few batches, as many images or sentences as you like; about 256 are enough. A tensor is the model's
            argument; a mapping its keyword arguments; of a tuple or list (a DataLoader's images and labels) the first
            element counts.
        forward: How to run the model on one batch, where that is not enough.
        progress: Whether to show a progress bar.

    Returns:
        Gains and shifts by the name of the layer.

    Raises:
        OptionError: If the model has no solver block.
        InputError: If there is no batch, or something else in place of a list of them; if some block never ran, or its
            output is not finite. The model is as it was then, as after every other error.
    """
    blocks, kept = require_blocks(model), read_batches(batches)
    run = _run_model if forward is None else forward
    wanted = {name: _Moments() for name in blocks}
    matching = {name: _Matching(wanted[name]) for name in blocks}
    plain = SOLVERS.get("proxgd").from_options(iters=1)
    from tqdm.auto import tqdm

    with tqdm(total=2 * len(kept), desc="calibrate", unit="batch", disable=not progress, leave=False) as bar:
        with _observed(model, blocks, wanted, plain):
            _pass(model, kept, run, bar)
        _check(wanted, "of the original network")
        with _observed(model, blocks, matching, None):
            _pass(model, kept, run, bar)
        _check({name: one.seen for name, one in matching.items()}, "of a solver")
    scales = {name: _of_first_process(torch.stack(one.scale()).to(blocks[name].L)) for name, one in matching.items()}
    for name, (gain, shift) in scales.items():
        blocks[name].set_scale(gain, shift)
    return {name: (gain, shift) for name, (gain, shift) in scales.items()}


def read_batches(batches: Iterable[Any], limit: int | None = None) -> list[Any]:
    """Returns the batches to calibrate with as a list, the first ``limit`` of them; InputError if it is none."""
    if isinstance(batches, (Tensor, str, bytes, Mapping)) or not isinstance(batches, Iterable):
        one = " For a single batch, pass [batch]." if isinstance(batches, (Tensor, Mapping)) else ""
        raise InputError(
            f"Expected batches to calibrate with, a list of them or a DataLoader; found {type(batches).__name__}.{one}"
        )
    kept = list(itertools.islice(batches, limit))
    if not kept:
        raise InputError("Expected at least one batch to calibrate with; found none.")
    return kept


def _run_model(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch[0] if isinstance(batch, (tuple, list)) else batch)


def _pass(model: nn.Module, batches: list[Any], run: Callable[[nn.Module, Any], Any], bar: Any) -> None:
    for batch in batches:
        run(model, batch)
        bar.update()


@contextlib.contextmanager
def _observed(
    model: nn.Module, blocks: dict[str, SolverBlock], observers: Mapping[str, Any], solver: Any
) -> Iterator[None]:
    """Puts observers (and another solver) into the blocks, in evaluation mode, and everything back afterwards."""
    modes = {module: module.training for module in model.modules()}
    before = {name: (block.solver, block.blend) for name, block in blocks.items()}
    try:
        model.eval()
        for name, block in blocks.items():
            block.observer = observers[name]
            block.solver = block.solver if solver is None else solver
            if solver is not None:
                block.blend = None
        with torch.no_grad():
            yield
    finally:
        for name, block in blocks.items():
            block.observer = None
            block.solver, block.blend = before[name]
        for module, training in modes.items():
            module.training = training


def _check(seen: Mapping[str, _Moments], whose: str) -> None:
    for name, one in seen.items():
        if one.count == 0:
            raise InputError(f"{name} never ran on these batches, so there is nothing to calibrate it by.")
        if not bool(torch.isfinite(torch.as_tensor(one.squares)).all()):
            raise InputError(
                f"The output {whose} at {name} is not finite on these batches. Expected finite inputs, weights and "
                "norm statistics; with very many iterations, a smaller iters may help."
            )


def _of_first_process(scale: Tensor) -> Tensor:
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(scale, src=0)
    return scale
