"""What the layer at the start of a chain computed, until the chain's end takes it: of one pass, in one thread."""

import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Kept(NamedTuple):
    """One call of the layer at the start of a chain.

    Attributes:
        input: What the layer was given.
        output: What it returned.
        kernel: Its weight.
        task: The backward pass that it ran in, recomputed by gradient checkpointing; -1 outside of any.
        node: What computed the output, where gradients are recorded.
    """

    input: Tensor
    output: Tensor
    kernel: Tensor
    task: int = -1
    node: Any = None

    def leads_to(self, argument: Tensor) -> bool:
        """Whether an argument can be of this call, and not of one that came after a pass had been broken off."""
        if torch.compiler.is_compiling():
            return True
        if self.task != backward_pass():
            return False
        # Parts of one pass may be recomputed by themselves, a layer without its outlet among them.
        return self.task == -1 or self.node is None or _reaches(argument, self.node)


def backward_pass() -> int:
    """Returns the number of the backward pass that runs in this thread; -1 for none."""
    return -1 if torch.compiler.is_compiling() else torch._C._current_graph_task_id()


def _reaches(tensor: Tensor, node: Any) -> bool:
    """Whether a tensor was computed from what a node of the autograd graph returned; it stands near, if it does."""
    level, seen = {tensor.grad_fn}, set()
    while level:
        if node in level:
            return True
        seen |= level
        level = {one for after in level if after is not None for one, _ in after.next_functions} - seen
    return False


class _Cell:
    """One place for a call."""

    def __init__(self) -> None:
        self.call: Kept | None = None


class Stash(threading.local):
    """A call of the layer, until the outlet takes it: one per thread. Copies and pickles of it are empty."""

    def __init__(self) -> None:
        # For every thread anew, at its first look. A cell, as torch.compile does not follow writes to a local itself.
        self._cell = _Cell()

    @property
    def call(self) -> Kept | None:
        """What is kept in this thread."""
        return self._cell.call

    def keep(self, call: Kept | None) -> None:
        """Keeps a call in place of another one; None keeps nothing."""
        self._cell.call = call

    def take(self) -> Kept | None:
        """Returns the call and forgets it, so that no graph outlives its step."""
        cell = self._cell
        call, cell.call = cell.call, None
        return call

    def __deepcopy__(self, memo: Any) -> "Stash":
        return Stash()

    def __reduce__(self) -> tuple[Any, ...]:
        return Stash, ()
