"""Finds the dropouts of a model, the inputs of each, and whether structured dropout can replace it."""

import math
import re
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from solver_plugins.surgery.graph import Graph, rate_of
from solver_plugins.surgery.record import Call, Record

_DROP_BLOCK = re.compile(r"DropBlock2d$")
_LAST_FEATURES = frozenset({"LayerNorm", "RMSNorm", "Linear", "NonDynamicallyQuantizableLinear"})
_ELEMENTWISE = frozenset(
    {"add", "add_", "__add__", "__radd__", "__iadd__", "mul", "mul_", "__mul__", "__rmul__", "__imul__", "div", "sub"}
    | {"__sub__", "sigmoid", "tanh", "relu", "relu_", "gelu", "silu", "silu_", "clamp"}
)
_KEEPS_AXES = frozenset({"contiguous", "clone", "to", "type", "float", "half", "bfloat16", "double", "type_as"})
_DEPTH = 30


@dataclass(frozen=True)
class Site:
    """One dropout: a module, or a function (``module`` is None) by the name of the module that calls it.

    Attributes:
        p: Its own rate, and ``block_size``, if it is a DropBlock, its own block size.
        shapes: The shapes of its inputs, one per call of the recorded pass.
        dims: Blocks reach over this many of the last dimensions; None if that is not clear.
        reason: Why it cannot be converted, or None.
        coupled: Whether its channels share a mask.
    """

    name: str
    module: nn.Module | None
    kind: str
    p: float
    block_size: int | None = None
    shapes: tuple[tuple[int, ...], ...] = ()
    dims: int | None = None
    reason: str | None = None
    coupled: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.shapes[0] if self.shapes else ()


def find_sites(model: nn.Module, record: Record) -> list[Site]:
    """Returns all dropouts of a model, modules first, then functions."""
    graph = Graph(record)
    by_module: dict[int, list[Call]] = {}
    for call in record.calls:
        if call.module is not None:
            by_module.setdefault(id(call.module), []).append(call)
    sites = []
    for name, module in model.named_modules():
        kind = type(module).__name__
        if _is_drop_block(module):
            sites.append(_drop_block_site(name, module, record))
        elif isinstance(module, _DropoutNd):
            sites.append(_dropout_site(name, module, by_module.get(id(module), []), graph))
        elif "Drop" in kind and not module._modules and not module._parameters:
            p = getattr(module, "drop_prob", getattr(module, "p", 0.0))
            reason = f"{kind} is not a dropout of single units"
            sites.append(Site(name, module, kind, float(p) if isinstance(p, int | float) else 0.0, reason=reason))
    return sites + _function_sites(graph)


def _is_drop_block(module: nn.Module) -> bool:
    return _DROP_BLOCK.search(type(module).__name__) is not None and isinstance(
        getattr(module, "block_size", None), int
    )


def _drop_block_site(name: str, module: nn.Module, record: Record) -> Site:
    # timm scales the rate of a stage by gamma_scale; torchvision calls the rate p.
    p = float(getattr(module, "drop_prob", getattr(module, "p", 0.0))) * float(getattr(module, "gamma_scale", 1.0))
    shapes = []
    for call in record.calls:
        if call.scope == name:
            shapes += [record.values[a.value].shape for a in call.inputs if len(record.values[a.value].shape) == 4]
    # Its inner masks may have a single channel.
    shapes.sort(key=math.prod, reverse=True)
    reason = "it adds noise instead of zeros" if getattr(module, "with_noise", False) else None
    if name not in record.call_counts:
        reason = "never called"
    coupled = bool(getattr(module, "couple_channels", False))
    size = int(module.block_size)  # type: ignore[arg-type]
    return Site(name, module, type(module).__name__, p, size, tuple(shapes[:1]), 2, reason, coupled)


def _dropout_site(name: str, module: _DropoutNd, calls: list[Call], graph: Graph) -> Site:
    kind = type(module).__name__
    shapes = tuple(graph.record.values[call.inputs[0].value].shape for call in calls if call.inputs)
    reason, dims = None, None
    if not isinstance(module, nn.Dropout):
        reason = "it keeps the statistics of SELU" if "Alpha" in kind else "it drops whole channels"
    elif type(module).forward is not nn.Dropout.forward:
        reason = "its class has its own forward"
    elif not calls:
        reason = "never called: a function such as scaled_dot_product_attention may read its rate"
    elif any(_is_attention(graph, call) for call in calls):
        reason = "it drops attention weights"
    else:
        found = {_dims(graph, call) for call in calls}
        dims = found.pop() if len(found) == 1 else None
    return Site(name, module, kind, float(module.p), None, shapes, dims, reason)


def _is_attention(graph: Graph, call: Call) -> bool:
    source, _ = graph.back(call.inputs[0].value)
    return source is not None and ("softmax" in source.name or isinstance(source.module, nn.Softmax))


def _dims(graph: Graph, call: Call) -> int | None:
    """Returns 2 for maps with channels first; 1 for vectors, sequences and maps with features last."""
    value = call.inputs[0].value
    rank = len(graph.record.values[value].shape)
    if rank < 4:
        return 1
    if rank > 4:
        return None
    for _ in range(_DEPTH):
        producer = graph.record.values[value].producer
        if producer is None:
            # The input of the model, which may have channels first or last.
            return None
        source = graph.record.calls[producer]
        if source.module is not None:
            kinds = {base.__name__ for base in type(source.module).__mro__}
            # timm's LayerNorm2d is a LayerNorm over channels in front.
            if isinstance(source.module, nn.Conv2d | nn.BatchNorm2d | nn.GroupNorm) or type(
                source.module
            ).__name__.endswith("2d"):
                return 2
            if kinds & _LAST_FEATURES:
                return 1
            if graph.kind(source) not in ("activation", "dropout", "droppath", "shape"):
                return None
        elif source.name == "linear":
            return 1
        elif source.name == "conv2d":
            return 2
        elif source.name not in _ELEMENTWISE | _KEEPS_AXES and graph.kind(source) not in ("activation", "dropout"):
            return None
        if not source.inputs:
            return None
        value = source.inputs[0].value
    return None


def _function_sites(graph: Graph) -> list[Site]:
    sites = []
    for call in graph.record.calls:
        if call.function is None:
            continue
        shapes = tuple(graph.record.values[argument.value].shape for argument in call.inputs[:1])
        scope = call.scope or "the model"
        if call.name == "scaled_dot_product_attention" and (p := call.kwargs.get("dropout_p", 0.0)):
            sites.append(Site(scope, None, call.name, float(p), None, shapes, reason="it drops attention weights"))
        elif graph.kind(call) == "dropout":
            reason = "a function, not a module: there is nothing to swap"
            sites.append(Site(scope, None, call.name, rate_of(call), None, shapes, reason=reason))
    return sites
