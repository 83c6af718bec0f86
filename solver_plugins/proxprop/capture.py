"""Listens to layers: which inputs contributed to the gradients that have been accumulated.

An input counts when a gradient arrives at the output that was computed from it, on its way to the layer's weight: so
evaluation, discarded outputs, the first of the two forward passes of gradient checkpointing, and gradients that are
taken of other things (``torch.autograd.grad``, ``backward(inputs=...)``) do not count. It is kept the way autograd
keeps its own tensors, so checkpointing and offloading apply to it as well.
"""

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge

from solver_plugins.errors import UnsupportedLayerError
from solver_plugins.operators.precision import autocast_off
from solver_plugins.proxprop.gram import gram
from solver_plugins.proxprop.rows import Rows


@dataclass(eq=False)
class Record:
    """One call of a layer: its input, the gradient of its output, how many rows that is, and when it was heard."""

    x: Tensor | None
    d: Tensor | None
    rows: int
    epoch: int = 0
    version: int = 0

    @property
    def overwritten(self) -> bool:
        """Whether the input's memory has been written to since the backward pass."""
        return self.x is not None and self.x._version != self.version


@dataclass
class Gram:
    """``X^T X``, ``1^T X`` and the number of rows."""

    matrix: Tensor
    sums: Tensor

    def add(self, other: "Gram") -> None:
        """Adds the Gram matrix of more rows."""
        self.matrix += other.matrix
        self.sums += other.sums


@dataclass(eq=False)
class Tally:
    """What one layer has contributed since its gradient was last empty.

    Attributes:
        name: The layer's name.
        layer: The layer.
        keeps: Whether inputs are kept: not for layers that are only listened to for their place.
        fold_limit: Up to which size (bytes) a Gram matrix replaces the inputs.
        parameter: The weight, where the layer shows another tensor while it runs (FSDP2).
        records: Kept calls.
        gram: Their Gram matrix once they have more rows than columns; the records are dropped then.
        rows: Number of rows in all.
        calls: Number of calls.
        task: The backward pass that was heard last.
        epoch: How often the tally was cleared.
        overwritten: Whether an input was written to before it became a part of the Gram matrix.
        left: The gradient, and its version, as the last backward pass left them.
        shape: How inputs become rows.
    """

    name: str
    layer: nn.Module
    shape: Rows | None
    keeps: bool
    fold_limit: int
    parameter: Tensor | None = None
    records: list[Record] = field(default_factory=list)
    gram: Gram | None = None
    rows: int = 0
    calls: int = 0
    task: int | None = None
    epoch: int = 0
    overwritten: bool = False
    left: tuple[Any, int] | None = None

    def clear(self) -> None:
        """Forgets everything heard."""
        for record in self.records:
            # Its hook lives as long as the graph, perhaps with a loss that the user keeps.
            record.x = record.d = None
        self.records, self.gram, self.rows, self.calls, self.task = [], None, 0, 0, None
        self.overwritten, self.left = False, None
        self.epoch += 1

    def weight(self) -> Tensor:
        """Returns the layer's weight as the optimizer knows it.

        Raises:
            UnsupportedLayerError: If it is no Parameter any more (pruned or parametrised since).
        """
        weight = self.parameter if self.parameter is not None else self.layer._parameters.get("weight")
        if weight is None:
            raise UnsupportedLayerError(
                f"The weight of {self.name} was a Parameter when the ProxProp was made, and is computed from others "
                "now (pruning, a parametrisation). Detach the ProxProp, and make it anew."
            )
        return weight

    def discarded(self) -> bool:
        """Whether the gradient that was heard of is gone: set to None, or to zeros by somebody else."""
        grad = self.weight().grad
        if grad is None:
            return True
        if self.left is not None and self.left[0]() is grad and self.left[1] == grad._version:
            # As a backward pass has left it, even if that gave zeros.
            return False
        return not grad.any()

    def take_note(self) -> None:
        """Remembers the gradient as a backward pass leaves it."""
        grad = self.weight().grad
        self.left = None if grad is None else (weakref.ref(grad), grad._version)

    def add(self, x: Tensor, d: Tensor) -> Record:
        """Counts one call."""
        assert self.shape is not None
        record = Record(x, d, self.shape.count(x), self.epoch, x._version)
        self.calls += 1
        self.rows += record.rows
        self.records.append(record)
        size = self.shape.columns**2 * self.shape.groups * working_dtype(x.dtype).itemsize
        if self.rows >= self.shape.columns and size <= self.fold_limit:
            self.fold()
        return record

    def knows(self, record: Record) -> bool:
        """Whether a call has been counted since the gradient was last empty."""
        return record.epoch == self.epoch

    def add_gradient(self, record: Record, d: Tensor) -> None:
        """Adds to the gradient of a call that has been counted."""
        if record.d is not None:
            record.d = record.d + d

    def fold(self) -> None:
        """Replaces the kept calls by their Gram matrix."""
        assert self.shape is not None
        for record in self.records:
            assert record.x is not None
            self.overwritten = self.overwritten or record.overwritten
            with autocast_off(record.x.device):
                x, margins = self.shape.without_zeros(record.x, working_dtype(record.x.dtype))
                part = Gram(gram(self.shape, x, margins), self.shape.column_sums(x, margins))
            if self.gram is None:
                self.gram = part
            else:
                self.gram.add(part)
            record.x = record.d = None
        self.records = []


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the precision of Gram matrices and solves: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


class _Keep(torch.autograd.Function):
    """Keeps a tensor as autograd keeps its own: through the saved-tensor hooks of checkpointing and offloading."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return anchor.detach().clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("Nothing depends on the output.")


class Listener:
    """The forward hook of one layer. Copies of it, in a copied or pickled model, hear nothing."""

    def __init__(self, ears: "Ears | None" = None, tally: Tally | None = None):
        # Weak, so that a ProxProp that nobody holds any more stops listening.
        self._ears = None if ears is None else weakref.ref(ears)
        self._tally = None if tally is None else weakref.ref(tally)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Listener":
        return Listener()

    def __reduce__(self) -> Any:
        return Listener, ()

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Prepares to hear the gradient of ``output``, outside of any compiled graph."""
        _UNCOMPILED[0](self, layer, args, kwargs, output)

    def listen(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Prepares to hear the gradient of ``output``."""
        ears = self._ears() if self._ears is not None else None
        tally = self._tally() if self._tally is not None else None
        if ears is None or tally is None or not ears.active or layer is not tally.layer:
            return
        if torch._C._are_functorch_transforms_active() or torch._C._get_tracing_state() is not None:
            # Nothing that a transform or a tracer computes is accumulated anywhere.
            return
        if torch._C._current_graph_task_id() == -1:
            # A forward pass of the user's, not one that checkpointing repeats inside of a backward pass.
            ears.fresh, ears.task = True, None
        if not torch.is_grad_enabled() or not isinstance(output, Tensor) or not output.requires_grad:
            return
        x = args[0] if args else kwargs.get("input", kwargs.get("x"))
        node = None
        if tally.keeps and isinstance(x, Tensor) and tally.weight().requires_grad:
            node = _Keep.apply(x.detach(), torch.zeros((), requires_grad=True)).grad_fn
        shown = layer._parameters.get("weight")
        if hasattr(shown, "full_tensor"):
            # Sharded again already (FSDP2): the tensor that it ran on is not to be had.
            ears.edge = None
        elif shown is not None and shown.requires_grad:
            ears.edge = get_gradient_edge(shown)
        output.register_hook(_Ear(self._ears, tally, node, ears.edge))


_UNCOMPILED: list[Any] = [Listener.listen]


def keep_out_of_graphs() -> None:
    """Makes torch.compile break its graphs at listeners: what they do is no part of the computation."""
    if _UNCOMPILED[0] is Listener.listen:
        # Not when the module is imported: this loads the compiler, as making an optimizer does.
        _UNCOMPILED[0] = torch.compiler.disable(
            Listener.listen, reason="ProxProp listens to this layer; compile without fullgraph=True"
        )


class Ears:
    """What all listeners of one ProxProp share.

    Attributes:
        active: False once detached: hooks that a compiled model still holds do nothing.
        skip_last: Whether the last layer is to be found.
        fresh: Whether a forward pass has run since a gradient was last heard.
        last: Names of the layers whose gradients came first in a backward pass: the last ones before the loss.
        tallies: Of all layers.
        task: The backward pass that runs, with all that it runs inside of it (reentrant checkpointing).
        edge: Where the gradient of the last layer's trainable weight goes.
        earlier: Tallies with calls from before this backward pass, by their weight.
    """

    def __init__(self, skip_last: bool):
        self.active, self.skip_last, self.fresh = True, skip_last, False
        self.last: set[str] = set()
        self.tallies: list[Tally] = []
        self.task: int | None = None
        self.edge: Any = None
        self.earlier: dict[int, list[Tally]] = {}

    def begin(self, tally: Tally) -> None:
        """Begins a backward pass for a layer: what was heard before belongs to nothing if its gradient is gone."""
        if self.task is None:
            self.task = torch._C._current_graph_task_id()
            Variable._execution_engine.queue_callback(self._end)
            self.earlier = {}
            for one in self.tallies:
                if one.calls:
                    self.earlier.setdefault(id(one.weight()), []).append(one)
        if tally.task == self.task:
            return
        # Layers that share a weight share its gradient.
        others = [one for one in self.earlier.get(id(tally.weight()), ()) if one.calls and one.task != self.task]
        if any(one.discarded() for one in others):
            for one in others:
                one.clear()
        tally.task = self.task

    def _end(self) -> None:
        for tally in self.tallies:
            if tally.task == self.task and tally.calls:
                tally.take_note()
        self.task = None


class _Ear:
    """The hook on one output: hears its gradient, once per backward pass."""

    def __init__(self, ears: Any, tally: Tally, node: Any, edge: Any):
        self.ears, self.tally, self.node, self.edge = ears, tally, node, edge
        self.record: Record | None = None

    def __call__(self, d: Tensor) -> None:
        """Counts the call whose output this is the gradient of."""
        ears: Ears | None = self.ears()
        tally = self.tally
        if ears is None or not ears.active or not _accumulates(self.edge):
            return
        if ears.fresh:
            ears.fresh = False
            if ears.skip_last:
                ears.last.add(tally.name)
                tally.clear()
        if self.node is None or tally.name in ears.last:
            self.node = None
            return
        ears.begin(tally)
        with torch.no_grad():
            if self.record is not None and tally.knows(self.record):
                # A second backward pass over the same graph: the same rows, more gradient.
                tally.add_gradient(self.record, d.detach())
            else:
                self.record = tally.add(self.node.saved_tensors[0].detach(), d.detach())
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            # The graph may live on with the loss; autograd has let go of its tensors, and so do we.
            self.node = None


def _accumulates(edge: Any) -> bool:
    """Whether the backward pass that runs adds to the gradient of a weight; True where no weight is trained."""
    if edge is None:
        return True
    try:
        return bool(torch._C._will_engine_execute_node(edge.node))
    except RuntimeError:
        # torch.autograd.grad with respect to the weight hands its gradient out instead.
        return False
