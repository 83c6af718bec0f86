"""What ProxProp asks of other processes: sums, and the batches of the others."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from solver_plugins.proxprop.capture import Record


class Processes:
    """The processes that train together; one process alone needs none of torch.distributed.

    Args:
        group: A process group; None is all processes, or this one alone if torch.distributed is not set up.
    """

    def __init__(self, group: Any = None):
        self.group = group
        ready = dist.is_available() and dist.is_initialized()
        self.count: int = dist.get_world_size(group) if ready else 1

    def exchange(self, mine: Any) -> list[Any]:
        """Returns what every process gave, in the order of their ranks."""
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

    def records(self, mine: Sequence[Record], shapes: list[list[tuple[Any, ...]]], like: Tensor) -> list[Record]:
        """Returns the calls of all processes.

        Args:
            mine: This process's.
            shapes: Per process and call what :func:`shapes_of` returned there.
            like: Tells the device.
        """
        if self.count == 1:
            return list(mine)
        rank = dist.get_rank(self.group)
        found = []
        for source, theirs in enumerate(shapes):
            for index, (x_shape, x_dtype, d_shape, d_dtype, rows) in enumerate(theirs):
                if source == rank:
                    x, d = mine[index].x, mine[index].d
                    assert x is not None and d is not None
                    x, d = x.contiguous(), d.contiguous()
                else:
                    x = torch.empty(x_shape, dtype=x_dtype, device=like.device)
                    d = torch.empty(d_shape, dtype=d_dtype, device=like.device)
                for tensor in (x, d):
                    dist.broadcast(tensor, group_src=source, group=self.group)
                found.append(Record(x, d, rows))
        return found


def shapes_of(records: Sequence[Record]) -> list[tuple[Any, ...]]:
    """Returns what another process must know to receive these calls."""
    return [
        (tuple(one.x.shape), one.x.dtype, tuple(one.d.shape), one.d.dtype, one.rows)
        for one in records
        if one.x is not None and one.d is not None
    ]
