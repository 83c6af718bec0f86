"""Communication between the processes of ProxProp: sums, and the calls of the others."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from solver_plugins.proxprop.capture import LayerCall


class Processes:
    """The processes that train together; a single process needs no torch.distributed.

    Args:
        group: A process group; None is all processes, or this one if torch.distributed is not set up.
    """

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
        """Returns the calls of one layer in all processes.

        Args:
            mine: The calls of this process.
            shapes: The results of :func:`shapes_of` in all processes.
            bias: The column of the layer's bias.
            device: The device to use.
        """
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
    return [
        (tuple(one.x.shape), one.x.dtype, tuple(one.d.shape), one.d.dtype, one.rows)
        for one in calls
        if one.x is not None and one.d is not None
    ]
