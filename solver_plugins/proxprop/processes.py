"""Communication between the processes of ProxProp: sums, the calls of the others, and the checks before a step."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from solver_plugins.errors import some
from solver_plugins.prox.prior import in_float64
from solver_plugins.proxprop.capture import LayerCall
from solver_plugins.proxprop.errors import EmptyBatchError, LayerNotRunError, OverwrittenError, ReplicaError
from solver_plugins.proxprop.shared_weight import SharedWeight


class Processes:
    """The processes that train together, of a group or all of them; a single process needs no torch.distributed."""

    def __init__(self, group: Any = None):
        self.group = group
        ready = dist.is_available() and dist.is_initialized()
        self.count: int = dist.get_world_size(group) if ready else 1

    def exchange(self, mine: Any) -> list[Any]:
        """Returns the objects of all processes, in the order of their ranks."""
        if self.count == 1:
            return [mine]
        all_of_them: list[Any] = [None] * self.count
        dist.all_gather_object(all_of_them, mine, group=self.group)
        return all_of_them

    def sum(self, tensor: Tensor) -> Tensor:
        """Adds up a tensor over all processes, in place."""
        if self.count > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def calls(
        self, mine: Sequence[LayerCall], shapes: list[list[tuple[Any, ...]]], bias: int | None, device: torch.device
    ) -> list[LayerCall]:
        """Returns the calls of one layer in all processes; ``shapes`` are the results of :func:`shapes_of` in each."""
        if self.count == 1:
            return list(mine)
        rank = dist.get_rank(self.group)
        found = []
        for source, theirs in enumerate(shapes):
            for index, (x_shape, x_dtype, d_shape, d_dtype, rows) in enumerate(theirs):
                if source == rank:
                    x, d = mine[index].input().contiguous(), mine[index].output_gradient().contiguous()
                else:
                    x = torch.empty(x_shape, dtype=x_dtype, device=device)
                    d = torch.empty(d_shape, dtype=d_dtype, device=device)
                for tensor in (x, d):
                    dist.broadcast(tensor, group_src=source, group=self.group)
                found.append(LayerCall(x, d, rows, bias=bias))
        return found


def shapes_of(calls: Sequence[LayerCall]) -> list[tuple[Any, ...]]:
    """Returns what another process has to know to receive these calls."""
    kept = [(one.x, one.d, one.rows) for one in calls if one.x is not None and one.d is not None]
    return [(tuple(x.shape), x.dtype, tuple(d.shape), d.dtype, rows) for x, d, rows in kept]


class Summary(NamedTuple):
    """What processes tell each other about a shared weight.

    ``folded``: a Gram matrix replaced inputs; ``shapes`` are those of the kept calls of each layer; ``probe`` is the
    norm of the gradient times fixed signs, 0 if it is not compared.
    """

    calls: int
    rows: int
    folded: bool
    shapes: list[Any]
    has_gradient: bool
    probe: float
    overwritten: bool

    @classmethod
    def of(cls, shared: SharedWeight, processes: int) -> "Summary":
        """Returns the summary of this process; gradients are compared if there are several ``processes``."""
        present = shared.weight.grad is not None
        # A sharded gradient has already been reduced.
        compare = processes > 1 and present and not shared.sharded
        return cls(
            sum(tally.calls for tally in shared.tallies),
            sum(tally.rows for tally in shared.tallies),
            any(tally.gram is not None for tally in shared.tallies),
            [shapes_of(tally.kept) for tally in shared.tallies],
            present,
            float(in_float64(shared.probed_gradient()).norm()) if compare else 0.0,
            any(tally.overwritten or any(call.overwritten for call in tally.kept) for tally in shared.tallies),
        )


def check_summaries(weights: list[SharedWeight], summaries: list[list[Summary]]) -> None:
    """Raises the same error in all processes if any weight cannot be preconditioned."""
    if len({len(one) for one in summaries}) > 1:
        raise ReplicaError("Expected every process to train the same layers; their numbers differ.")
    silent, empty, apart, overwritten = [], [], [], []
    for index, shared in enumerate(weights):
        theirs = [one[index] for one in summaries]
        probes = [one.probe for one in theirs]
        if not any(one.calls for one in theirs) or not all(one.has_gradient for one in theirs):
            silent.append(shared.name)
        elif not any(one.rows for one in theirs):
            empty.append(shared.name)
        elif max(probes) - min(probes) > 1e-3 * max(probes):
            apart.append(shared.name)
        elif any(one.overwritten for one in theirs):
            overwritten.append(shared.name)
    if silent:
        raise LayerNotRunError(
            f"Expected every layer to have run since its gradient was last empty, and to have a gradient; "
            f"{some(silent, 5)} did not run or have no gradient. No gradient was changed. Call precondition() once per "
            "step, after backward(). Name in exclude= a layer that the loss does not use, or whose weight is read "
            "without calling it (nn.MultiheadAttention.out_proj). Compile a model again if it was compiled and run "
            "before the ProxProp was made."
        )
    if empty:
        raise EmptyBatchError(f"Expected at least one sample; {', '.join(empty)} ran on none. No gradient was changed.")
    if overwritten:
        raise OverwrittenError(
            f"The inputs of {', '.join(overwritten)} were changed in place between backward() and precondition(). No "
            "gradient was changed. Do not reuse one tensor for several micro-batches."
        )
    if apart:
        raise ReplicaError(
            f"Expected the same gradients in all processes; those of {', '.join(apart)} differ. No gradient was "
            "changed. Wrap the model in DistributedDataParallel, or reduce the gradients before precondition()."
        )
