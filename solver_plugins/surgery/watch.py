"""One forward pass of a converted model that sees every solve, and leaves no trace."""

import contextlib
import random
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from solver_plugins.blocks import ChainBlock, LayerBlock, SolverBlock
from solver_plugins.solve import BlockProblem, Draws, Solver
from solver_plugins.surgery.errors import RecordError
from solver_plugins.surgery.inputs import read_inputs


@dataclass
class Seen:
    """What one solve did; sums over its samples.

    Attributes:
        smoothness: The constant whose inverse was its step.
        first: Objective after the first iteration, the mean over the samples.
        last: The same after the last one.
        residual: Relative size of a further step, the largest of the samples.
        plain_scale: Standard deviation of what the plain layers return.
        scale: Standard deviation of what the block returned.
    """

    smoothness: float
    first: float
    last: float = float("nan")
    residual: float = float("nan")
    plain_scale: float = float("nan")
    scale: float = float("nan")


@dataclass
class _Watch:
    """Stands in for the solver of a block: does what it does, and looks at where it stands."""

    solver: Solver
    activated: bool
    recursion: None = None
    seen: list[Seen] = field(default_factory=list)
    solving: bool = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.solver, name)

    def step(self, problem: BlockProblem, state: Any, iteration: int, draws: Draws | None) -> Any:
        state = self.solver.step(problem, state, iteration, draws)
        if iteration in (0, self.solver.config.iters - 1):
            with torch.no_grad():
                self._look(problem, state, iteration)
        return state

    def _look(self, problem: BlockProblem, state: Any, iteration: int) -> None:
        x = self.solver.value(problem, state)
        objective = float(problem.objective(x).mean())
        if iteration == 0:
            self.seen.append(Seen(float(problem.smoothness), objective))
            self.solving = True
        one = self.seen[-1]
        if iteration == self.solver.config.iters - 1:
            plain = problem.prior.prox(problem.output, 1.0) if self.activated else problem.output
            one.last, one.residual = objective, float(problem.residual(x).max())
            one.plain_scale = _deviation(plain)

    def returned(self, module: nn.Module, args: Any, output: Tensor) -> None:
        """Takes note of what the block hands on: a forward hook of the layer, or of the outlet that several share."""
        if self.solving:
            self.solving, self.seen[-1].scale = False, _deviation(output)


def watch_pass(model: nn.Module, batch: Any) -> dict[str, list[Seen]]:
    """Runs a converted model once, without gradients, in its present mode.

    Args:
        model: The model.
        batch: A tensor, a tuple of positional arguments, or a dict of keyword arguments.

    Returns:
        For the name of each converted layer, its solves in this pass: none for one that was not called.

    Raises:
        RecordError: If the batch is of another kind, or the pass fails.
    """
    _check_batch(batch)
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    args, kwargs = read_inputs(batch).to(device)
    watches: dict[str, _Watch] = {}
    with left_as_it_was(model), contextlib.ExitStack() as stack:
        for name, block in model.named_modules():
            if isinstance(block, LayerBlock):
                watches[name] = watch = _Watch(block.solver, _hands_on_values(block))
                stack.callback(setattr, block, "solver", block.solver)
                block.solver = watch  # type: ignore[assignment]
                outlet = block.outlet.module if isinstance(block, ChainBlock) else block
                stack.callback(outlet.register_forward_hook(watch.returned).remove)
        try:
            with torch.no_grad():
                model(*args, **kwargs)
        except Exception as error:
            raise RecordError(
                f"The forward pass of {type(model).__name__} failed with this batch. Check that model(*batch), or "
                f"model(**batch) for a dict, runs by itself. {type(error).__name__}: {error}"
            ) from error
    return {name: watch.seen for name, watch in watches.items()}


@contextlib.contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Puts back buffers, modes, stashes and random states, whatever happens in between."""
    modules = list(model.modules())
    modes = [module.training for module in modules]
    buffers = [dict(module._buffers) for module in modules]
    tensors = {id(one): one for own in buffers for one in own.values() if one is not None and not one.is_meta}
    values = {key: one.detach().clone() for key, one in tensors.items()}
    stashes = [(module.stash, module.stash.take()) for module in modules if isinstance(module, ChainBlock)]
    python, numpy = random.getstate(), np.random.get_state()
    kinds = {one.device for one in tensors.values() if one.device.type not in ("cpu", "meta")}
    kind = next(iter(kinds)).type if kinds else "cuda"
    with torch.random.fork_rng(list(kinds), device_type=kind), warnings.catch_warnings(), _eager():
        # The model's own warnings come at its next real pass.
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
            for stash, call in stashes:
                stash.keep(call)
            with torch.no_grad():
                for key, one in tensors.items():
                    if not _same(one, values[key]):
                        one.copy_(values[key])
            for module, mode, own in zip(modules, modes, buffers, strict=True):
                module.__dict__["training"] = mode
                # In place: the mapping itself may be referred to.
                if any(module._buffers.get(name) is not one for name, one in own.items()):
                    module._buffers.update(own)


def _same(one: Tensor, other: Tensor) -> bool:
    # A write, even of the same numbers, would count as a change of the tensor (its version).
    return one.shape == other.shape and bool(torch.equal(one.detach().nan_to_num(), other.nan_to_num()))


def _hands_on_values(block: LayerBlock) -> bool:
    """Whether what it returns has gone through the activation."""
    if isinstance(block, ChainBlock):
        return block.role != "norm"
    return isinstance(block, SolverBlock) and block.output == "value"


def _check_batch(batch: Any) -> None:
    mapping = isinstance(batch, Mapping) or hasattr(batch, "keys")
    if isinstance(batch, (Tensor, tuple)) or mapping:
        return
    hint = " Of a loader's [inputs, targets], pass batch[0]." if isinstance(batch, list) else ""
    raise RecordError(
        "Expected a batch that the model's forward takes: a tensor, a tuple of positional arguments or a dict of "
        f"keyword arguments; found {type(batch).__name__}.{hint}"
    )


def _deviation(tensor: Any) -> float:
    if not isinstance(tensor, Tensor) or tensor.numel() < 2:
        return float("nan")
    return float(tensor.detach().float().std())


def _eager() -> contextlib.AbstractContextManager[Any]:
    """A compiled model runs as it is written: its graph knows nothing of who watches."""
    if "torch._dynamo" in sys.modules:
        return torch.compiler.set_stance("force_eager")
    return contextlib.nullcontext()


__all__ = ["Seen", "left_as_it_was", "watch_pass"]
