"""One forward pass of a converted model that watches every solve and leaves no trace."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from solver_plugins.blocks import blocks_of, effective_rate
from solver_plugins.solve import BlockProblem, Draws, Solver
from solver_plugins.surgery.errors import RecordError
from solver_plugins.surgery.inputs import read_inputs
from solver_plugins.surgery.untouched import left_as_it_was

ROWS, DRAWS = 32, 16
"""How many rows of a batch and how many samples tell an effective rate: enough for its second digit."""


@dataclass
class Seen:
    """How one solve went.

    Attributes:
        smoothness: The constant whose inverse was its step.
        first: Objective after the first iteration, averaged over the samples; ``last`` after the last one.
        residual: Relative size of a further step, the largest over the samples.
        scale: Standard deviation of what the block returned; ``plain_scale`` of what plain layers return.
        effective_rate: With the first input in the pass; see :func:`solver_plugins.effective_rate`.
    """

    smoothness: float
    first: float
    last: float = float("nan")
    residual: float = float("nan")
    plain_scale: float = float("nan")
    scale: float = float("nan")
    effective_rate: float | None = None


@dataclass
class _Watch:
    """Stands in for the solver of a block and looks at its first and last iterate."""

    solver: Solver
    activated: bool
    recursion: None = None
    seen: list[Seen] = field(default_factory=list)
    solving: bool = False
    iteration: int = 0
    input: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.solver, name)

    def step(self, problem: BlockProblem, state: Any, iteration: int, draws: Draws | None) -> Any:
        state = self.solver.step(problem, state, iteration, draws)
        self.iteration = iteration
        # An iterate after the first goes through the gate before it is one.
        if problem.gate is None or iteration == 0:
            self._look(problem, state, iteration)
        return state

    def gated(self, problem: BlockProblem, state: Any) -> Any:
        state = self.solver.gated(problem, state)
        self._look(problem, state, self.iteration)
        return state

    @torch.no_grad()
    def _look(self, problem: BlockProblem, state: Any, iteration: int) -> None:
        if iteration not in (0, self.solver.config.iters - 1):
            return
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

    def given(self, module: nn.Module, args: Any) -> None:
        """Keeps a part of the first input: a hook before the layer."""
        if self.input is None and args:
            self.input = args[0].detach()[:ROWS]

    def returned(self, module: nn.Module, args: Any, output: Tensor) -> None:
        """Notes what the block returns: a forward hook of the layer, or of its outlet."""
        if self.solving:
            self.solving, self.seen[-1].scale = False, _deviation(output)


def watch_pass(model: nn.Module, batch: Any) -> dict[str, list[Seen]]:
    """Runs a converted model once, without gradients, in its present mode; ``batch`` is as for ``read_inputs``.

    Returns the solves in this pass by the name of the layer; none for a layer that was not called. RecordError if the
    batch is of another kind, or the pass fails.
    """
    watches: dict[str, _Watch] = {}
    with left_as_it_was(model):
        with contextlib.ExitStack() as stack:
            for name, block in blocks_of(model).items():
                # Whether it returns what the activation has already been applied to.
                activated = block.output == "value" if block.link is None else block.link.role != "norm"
                watches[name] = watch = _Watch(block.solver, activated)
                stack.callback(setattr, block, "solver", block.solver)
                block.solver = watch  # type: ignore[assignment]
                outlet = block if block.link is None else block.link.outlet.module
                stack.callback(outlet.register_forward_hook(watch.returned).remove)
                stack.callback(block.register_forward_pre_hook(watch.given).remove)
            run_batch(model, batch)
        for name, block in blocks_of(model).items():
            seen, input = watches[name].seen, watches[name].input
            if seen and input is not None and block.link is None and block.solver.samples != "nothing":
                seen[0].effective_rate = effective_rate(block, input, DRAWS)
    return {name: watch.seen for name, watch in watches.items()}


def run_batch(model: nn.Module, batch: Any) -> Any:
    """Returns what a model makes of a batch in its present mode, without gradients; raises as :func:`watch_pass`."""
    if not (isinstance(batch, (Tensor, tuple, Mapping)) or hasattr(batch, "keys")):
        hint = " Of a loader's [inputs, targets], pass batch[0]." if isinstance(batch, list) else ""
        raise RecordError(
            "Expected a batch that the model's forward takes: a tensor, a tuple of positional arguments or a dict of "
            f"keyword arguments; found {type(batch).__name__}.{hint}"
        )
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    args, kwargs = read_inputs(batch).to(device)
    try:
        with torch.no_grad():
            return model(*args, **kwargs)
    except Exception as error:
        raise RecordError(
            f"The forward pass of {type(model).__name__} failed with this batch. Check that model(*batch), or "
            f"model(**batch) for a dict, runs by itself. {type(error).__name__}: {error}"
        ) from error


def _deviation(tensor: Any) -> float:
    if not isinstance(tensor, Tensor) or tensor.numel() < 2:
        return float("nan")
    return float(tensor.detach().float().std())
