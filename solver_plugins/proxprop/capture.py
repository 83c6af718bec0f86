"""Listens to layers and keeps the inputs that contributed to the accumulated gradients.

An input counts once a gradient arrives at the output that was computed from it, on its way to the layer's weight. So
these do not count: evaluation, discarded outputs, the first of the two forward passes of gradient checkpointing, and
gradients of other things (``torch.autograd.grad``, ``backward(inputs=...)``). Inputs are kept in the same way as
autograd keeps its own tensors, so checkpointing and offloading also apply to them.
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
from solver_plugins.solve import working_dtype


@dataclass(eq=False)
class LayerCall:
    """One call of a layer, counted when its tally had this epoch and its input this version.

    ``x`` is the input and ``d`` the gradient of the output, both None once they are part of a Gram matrix, or
    forgotten. ``bias`` is the column of the bias in the system; None without a trainable bias.
    """

    x: Tensor | None
    d: Tensor | None
    rows: int
    epoch: int = 0
    version: int = 0
    bias: int | None = None

    @property
    def overwritten(self) -> bool:
        """Whether the input was changed in place after the backward pass."""
        return self.x is not None and self.x._version != self.version

    def input(self) -> Tensor:
        assert self.x is not None
        return self.x

    def output_gradient(self) -> Tensor:
        assert self.d is not None
        return self.d


@dataclass
class RowSums:
    """``X^T X`` and ``1^T X``."""

    matrix: Tensor
    sums: Tensor

    def add(self, other: "RowSums") -> None:
        self.matrix += other.matrix
        self.sums += other.sums


@dataclass(eq=False)
class Tally:
    """What one layer has contributed since its gradient was last empty.

    Attributes:
        shape: How inputs become rows; None if the layer is only needed to find the last one.
        fold_limit: Up to this size (bytes) a Gram matrix replaces the inputs.
        parameter: The weight, if the layer shows another tensor while it runs (FSDP2).
        kept: The calls whose inputs are kept; ``rows`` and ``calls`` count those of all calls.
        gram: The Gram matrix of all calls, once they have more rows than columns; the inputs are then dropped.
        task: The last backward pass that reached the layer.
        epoch: How often the tally was cleared.
        overwritten: Whether an input was changed in place before it became part of the Gram matrix.
        left: The gradient and its version, as the last backward pass left them.
    """

    name: str
    layer: nn.Module
    shape: Rows | None
    fold_limit: int
    parameter: Tensor | None = None
    kept: list[LayerCall] = field(default_factory=list)
    gram: RowSums | None = None
    rows: int = 0
    calls: int = 0
    task: int | None = None
    epoch: int = 0
    overwritten: bool = False
    left: tuple[Any, int] | None = None

    def clear(self) -> None:
        for call in self.kept:
            # Its hook lives as long as the graph, perhaps with a loss that the user keeps.
            call.x = call.d = None
        self.kept, self.gram, self.rows, self.calls, self.task = [], None, 0, 0, None
        self.overwritten, self.left = False, None
        self.epoch += 1

    def weight(self) -> Tensor:
        """Returns the layer's weight as the optimizer knows it; an error if it is no longer a Parameter."""
        weight = self.parameter if self.parameter is not None else self.layer._parameters.get("weight")
        if weight is None:
            raise UnsupportedLayerError(
                f"The weight of {self.name} was a Parameter when the ProxProp was made, and is now computed from "
                "others (pruning, a parametrisation). Detach this ProxProp and make a new one."
            )
        return weight

    def discarded(self) -> bool:
        """Whether the gradient of the counted calls is gone: set to None, or to zeros."""
        grad = self.weight().grad
        if grad is None:
            return True
        if self.left is not None and self.left[0]() is grad and self.left[1] == grad._version:
            # Unchanged since the backward pass, even if it consists of zeros.
            return False
        return not grad.any()

    def remember_gradient(self) -> None:
        """Remembers the gradient as a backward pass leaves it."""
        grad = self.weight().grad
        self.left = None if grad is None else (weakref.ref(grad), grad._version)

    def add(self, x: Tensor, d: Tensor) -> LayerCall:
        assert self.shape is not None
        call = LayerCall(x, d, self.shape.count(x), self.epoch, x._version)
        self.calls += 1
        self.rows += call.rows
        self.kept.append(call)
        size = self.shape.columns**2 * self.shape.groups * working_dtype(x.dtype).itemsize
        if self.rows >= self.shape.columns and size <= self.fold_limit:
            self.fold()
        return call

    def fold(self) -> None:
        """Replaces the kept calls by their Gram matrix."""
        assert self.shape is not None
        for call in self.kept:
            self.overwritten = self.overwritten or call.overwritten
            given = call.input()
            with autocast_off(given.device):
                x, margins = self.shape.without_zeros(given, working_dtype(given.dtype))
                part = RowSums(gram(self.shape, x, margins), self.shape.column_sums(x, margins))
            if self.gram is None:
                self.gram = part
            else:
                self.gram.add(part)
            call.x = call.d = None
        self.kept = []


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
    """The forward hook of one layer. Its copies in a copied or pickled model do nothing."""

    def __init__(self, state: "CaptureState | None" = None, tally: Tally | None = None):
        # Weak references, so that a ProxProp stops listening when nobody holds it any more.
        self._state = None if state is None else weakref.ref(state)
        self._tally = None if tally is None else weakref.ref(tally)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Listener":
        return Listener()

    def __reduce__(self) -> Any:
        return Listener, ()

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        _UNCOMPILED[0](self, layer, args, kwargs, output)

    def listen(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        state = self._state() if self._state is not None else None
        tally = self._tally() if self._tally is not None else None
        if state is None or tally is None or not state.active or layer is not tally.layer:
            return
        if torch._C._are_functorch_transforms_active() or torch._C._get_tracing_state() is not None:
            # A transform or a tracer accumulates no gradients.
            return
        if torch._C._current_graph_task_id() == -1:
            # The user's own forward pass, not one that checkpointing repeats inside a backward pass.
            state.fresh, state.task = True, None
        if not torch.is_grad_enabled() or not isinstance(output, Tensor) or not output.requires_grad:
            return
        x = args[0] if args else kwargs.get("input", kwargs.get("x"))
        node = None
        if tally.shape is not None and isinstance(x, Tensor) and tally.weight().requires_grad:
            node = _Keep.apply(x.detach(), torch.zeros((), requires_grad=True)).grad_fn
        shown = layer._parameters.get("weight")
        if hasattr(shown, "full_tensor"):
            # FSDP2 has sharded the weight again; the tensor that the layer used is not available.
            state.edge = None
        elif shown is not None and shown.requires_grad:
            state.edge = get_gradient_edge(shown)
        output.register_hook(_OutputHook(self._state, tally, node, state.edge))


_UNCOMPILED: list[Any] = [Listener.listen]


def keep_out_of_graphs() -> None:
    """Makes torch.compile break its graphs at listeners, which are not part of the computation."""
    if _UNCOMPILED[0] is Listener.listen:
        # Not at import, because this loads the compiler (as making an optimizer does).
        _UNCOMPILED[0] = torch.compiler.disable(
            Listener.listen, reason="ProxProp listens to this layer; compile without fullgraph=True"
        )


class CaptureState:
    """What all listeners of one ProxProp share.

    Attributes:
        active: False once detached: hooks that a compiled model still holds do nothing.
        skip_last: Whether to find the last layer.
        fresh: Whether a forward pass has run since the last gradient arrived.
        last: Names of the layers whose gradients came first in a backward pass: the last ones before the loss.
        task: The running backward pass, including those that it runs inside (reentrant checkpointing).
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
        """Begins a backward pass for a layer: earlier calls are forgotten if their gradient is gone."""
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
                tally.remember_gradient()
        self.task = None


class _OutputHook:
    """The hook on one output: it receives the gradient once per backward pass, and counts the call."""

    def __init__(self, state: Any, tally: Tally, node: Any, edge: Any):
        self.state, self.tally, self.node, self.edge = state, tally, node, edge
        self.call: LayerCall | None = None

    def __call__(self, d: Tensor) -> None:
        state: CaptureState | None = self.state()
        tally = self.tally
        if state is None or not state.active or not _accumulates(self.edge):
            return
        if state.fresh:
            state.fresh = False
            if state.skip_last:
                state.last.add(tally.name)
                tally.clear()
        if self.node is None or tally.name in state.last:
            self.node = None
            return
        state.begin(tally)
        with torch.no_grad():
            if self.call is None or self.call.epoch != tally.epoch:
                self.call = tally.add(self.node.saved_tensors[0].detach(), d.detach())
            elif self.call.d is not None:
                # A second backward pass over the same graph: the same rows, more gradient.
                self.call.d = self.call.d + d.detach()
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            # The graph may live on with the loss; autograd has freed its tensors, so we free ours.
            self.node = None


def _accumulates(edge: Any) -> bool:
    """Whether the running backward pass adds to the gradient of a weight; True if no weight is trained."""
    if edge is None:
        return True
    try:
        return bool(torch._C._will_engine_execute_node(edge.node))
    except RuntimeError:
        # torch.autograd.grad with respect to the weight returns the gradient instead.
        return False
