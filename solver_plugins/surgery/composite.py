"""Activations that a model writes out in several operations: QuickGELU as ``x * sigmoid(1.702 * x)``."""

from dataclasses import dataclass

from solver_plugins.surgery.graph import Graph

_LONGEST = 16
"""The most operations that one activation may take; GELU by its tanh formula takes nine."""
_ELEMENTWISE = frozenset(
    f"{before}{name}{after}"
    for name in ("add", "sub", "mul", "div", "truediv", "pow", "rsub", "neg")
    for before, after in (("", ""), ("", "_"), ("__", "__"), ("__r", "__"), ("__i", "__"))
) | frozenset(
    {"sigmoid", "tanh", "exp", "erf", "square", "sqrt", "rsqrt", "log", "log1p", "abs", "reciprocal", "where"}
)

_KNOWN = (
    ({"erf"}, "GELU"),
    ({"tanh", "pow"}, "GELU by its tanh formula"),
    ({"tanh", "softplus"}, "Mish"),
    ({"sigmoid"}, "SiLU or QuickGELU"),
    ({"relu6"}, "Hardswish"),
    ({"hardsigmoid"}, "Hardswish"),
    ({"hardtanh"}, "Hardswish"),
    ({"clamp"}, "Hardswish"),
    ({"tanh"}, "GELU by its tanh formula"),
)
"""The activation that a product with these functions is; the first match counts."""


@dataclass(frozen=True)
class Composite:
    """An activation that takes several operations: what it is, and why it is not known to be a proximal map."""

    label: str
    reason: str
    calls: tuple[int, ...]


def find_composite(graph: Graph, value: int) -> Composite | None:
    """Finds elementwise operations that start at a value with several readers, read nothing else, and end in one."""
    record = graph.record
    inside: set[int] = {value}
    taken: list[int] = []
    first = min((call.index for call in graph.readers(value)), default=len(record.calls))
    for call in record.calls[first:]:
        if not any(argument.value in inside for argument in call.inputs):
            continue
        alone = all(a.value in inside or record.values[a.value].kind == "constant" for a in call.inputs)
        elementwise = call.name in _ELEMENTWISE or graph.kind(call) in ("shape", "activation")
        if not alone or not elementwise or len(taken) == _LONGEST:
            return None
        taken.append(call.index)
        inside.update(call.outputs)
        open_values = {
            v for v in inside if record.values[v].is_output or any(r.index not in taken for r in graph.readers(v))
        }
        if len(open_values) == 1 and call.outputs[0] in open_values and len(taken) > 1:
            return _named(graph, tuple(taken))
    return None


def _named(graph: Graph, calls: tuple[int, ...]) -> Composite:
    names = [graph.record.calls[index].name.strip("_") for index in calls]
    product = any(name in ("mul", "rmul", "imul") for name in names)
    label = next((label for needed, label in _KNOWN if product and needed <= set(names)), None)
    if label is not None:
        reason = f"{label} is written out in {len(calls)} operations; it is not monotone, and every proximal map is."
        return Composite(f"{label}, written out", reason, calls)
    reason = (
        f"The activation is written out in {len(calls)} operations ({', '.join(dict.fromkeys(names))}), and it is not "
        "known whether they are a proximal map; put them in a module and declare that with declare_activation."
    )
    return Composite("written out", reason, calls)
