"""What stands around one call of a linear layer: the longest pattern, its parts, and why no longer one matched."""

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from solver_plugins.errors import SolverPluginsError
from solver_plugins.prox import Prior, prox_for
from solver_plugins.surgery.composite import find_composite
from solver_plugins.surgery.graph import Graph, Rate, Step, rate_of
from solver_plugins.surgery.parts import (
    ActivationPart,
    DropoutPart,
    NormPart,
    Ownership,
    Pattern,
    SkipPart,
    Surroundings,
)
from solver_plugins.surgery.record import Call, Ref

_FOLDED_NORMS = frozenset({"BatchNormAct2d", "SyncBatchNormAct", "FrozenBatchNormAct2d"})
"""Norms of timm that compute what torch's do, and apply an activation."""


def _layer(graph: Graph, found: Surroundings) -> Call:
    """Returns the call of the layer itself."""
    return graph.record.calls[found.calls[0]]


_Found = tuple[ActivationPart, Prior | None, str | None]
"""An activation that reads a value alone, its prior, and why it has none."""


def surroundings_of(graph: Graph, call: Call) -> Surroundings:
    """Finds the longest pattern around a call of a linear layer."""
    found = Surroundings(calls=(call.index,))
    _look_ahead(graph, found)
    _look_back(graph, found)
    return found


def signature(found: Surroundings) -> tuple[Any, ...]:
    """Returns what two calls of one layer must have in common to be one block."""
    names = [getattr(part, "name", None) for part in (found.dropout, found.norm, found.activation)]
    names.append(getattr(found.dropout, "attribute", None))
    return found.pattern, *names, None if found.activation is None else found.activation.label, repr(found.prior)


def _look_ahead(graph: Graph, found: Surroundings) -> None:
    step = graph.follow(_layer(graph, found).outputs[0])
    found.is_last = graph.reaches_output(_layer(graph, found).outputs[0])
    if _take_activation(graph, found, step, "linear-act"):
        return
    if step.call is None:
        found.notes += tuple(_crowd(graph, step, "its output"))
    elif graph.kind(step.call) == "norm":
        _take_norm(graph, found, step)
    elif graph.kind(step.call) == "add":
        if not _take_skip(graph, found, step, "linear-skip-act"):
            found.notes += ("followed by a sum without an activation",)
    elif graph.kind(step.call) == "dropout":
        _take_dropout_behind(graph, found, step.call)
    elif graph.kind(step.call) == "droppath":
        found.notes += (f"followed by {_droppath(graph, step.call)}",)
    else:
        found.notes += (f"followed by {graph.label(step.call)}, which is no activation",)


def _droppath(graph: Graph, call: Call) -> str:
    """Says what a DropPath does between a layer and the sum that it belongs to."""
    return (
        f"{graph.label(call)}, which drops it for some samples in training: what is added to the skip is then not what "
        "the layer computes (it is at a drop path rate of 0)"
    )


def _crowd(graph: Graph, step: Step, what: str) -> list[str]:
    """Says who reads a value that has not exactly one reader."""
    if not step.readers:
        return [] if step.is_output else [f"{what} is read by nothing"]
    readers = [graph.label(reader) for reader in step.readers[:3]] + ["..."] * (len(step.readers) > 3)
    if step.is_output:
        readers.append("the model's caller")
    count = len(step.readers) + step.is_output
    return [
        f"{what} is used by more than one operation ({count}: {', '.join(readers)}), so no single activation follows"
    ]


def _take_activation(graph: Graph, found: Surroundings, step: Step, pattern: Pattern) -> bool:
    activation = _activation_at(graph, step)
    if activation is None:
        return False
    found.pattern, (found.activation, found.prior, found.nonprox_reason) = pattern, activation
    other = _other_axis(graph, found, step)
    if other is not None:
        found.prior, found.nonprox_reason = None, f"{found.activation.label} {other}"
    return True


def _other_axis(graph: Graph, found: Surroundings, step: Step) -> str | None:
    """Says along which axis a prior that couples numbers acts, if that is not the axis of the layer's features."""
    if found.prior is None or found.prior.separable:
        return None
    axes = len(graph.record.values[step.value].shape)
    features = axes - 1 - len(getattr(_layer(graph, found).module, "kernel_size", ()))
    dim = getattr(found.prior, "dim", features) % axes
    if dim == features:
        return None
    return f"acts along axis {dim}, and the layer's features are axis {features}: it would couple independent problems."


def _activation_at(graph: Graph, step: Step) -> _Found | None:
    if step.call is None:
        composite = find_composite(graph, step.value) if len(step.readers) > 1 and not step.is_output else None
        if composite is None:
            return None
        part = ActivationPart(composite.label, None, None, None, (), {}, "functional", 1, composite.calls)
        return part, None, composite.reason
    call = step.call
    # A value may also be read as a bound of a clamp.
    if graph.kind(call) != "activation" or any(
        a.position not in (0, "input") for a in call.inputs if a.value == step.value
    ):
        return None
    if call.module is not None:
        sites = graph.record.call_counts.get(call.name, 1)
        label = type(call.module).__name__
        part = ActivationPart(
            label, call.name, call.module, None, (), {}, "private" if sites == 1 else "shared", sites, (call.index,)
        )
        prior, reason = _prior_of(call.module)
    else:
        args = call.args[1:] if call.args and isinstance(call.args[0], Ref) else call.args
        kwargs = {key: value for key, value in call.kwargs.items() if key != "input"}
        label = call.name.rstrip("_")
        part = ActivationPart(label, None, None, call.function, args, kwargs, "functional", 1, (call.index,))
        prior, reason = _prior_of(call.function, *args, **kwargs)
    if prior is not None and step.reshaped and _needs_axis(prior):
        return part, None, f"{label} acts along an axis, and shape operations before it move the axes."
    return part, prior, reason


def _prior_of(activation: Any, *args: Any, **kwargs: Any) -> tuple[Prior | None, str | None]:
    try:
        return prox_for(activation, *args, **kwargs), None
    except SolverPluginsError as error:
        return None, str(error)


def _needs_axis(prior: Prior) -> bool:
    module = getattr(prior, "module", None)
    return not prior.separable or (isinstance(module, nn.PReLU) and module.num_parameters > 1)


def _take_norm(graph: Graph, found: Surroundings, step: Step) -> None:
    call = step.call
    assert call is not None and call.module is not None
    module, label = call.module, graph.label(call)
    problem = _not_foldable(graph, found, step)
    if problem is not None:
        found.notes += (f"followed by {label}, {problem}",)
        return
    held = getattr(module, "act", None)
    holds = isinstance(held, nn.Module) and not isinstance(held, nn.Identity)
    frozen = not isinstance(module, _BatchNorm)
    part = NormPart(call.name, module, type(module).__name__, "running" if frozen else "batch", holds)
    if holds:
        assert isinstance(held, nn.Module)
        prior, reason = _prior_of(held)
        found.activation = ActivationPart(
            type(held).__name__, f"{call.name}.act", held, None, (), {}, "private", 1, (call.index,)
        )
        found.pattern, found.norm, found.outlet = "linear-norm-act", part, "norm"
        found.prior, found.nonprox_reason = prior, reason
        return
    behind = graph.follow(call.outputs[0])
    if _take_activation(graph, found, behind, "linear-norm-act"):
        found.norm, found.outlet = part, "norm"
        return
    if behind.call is not None and graph.kind(behind.call) == "add":
        if _take_skip(graph, found, behind, "linear-norm-skip-act"):
            found.norm = part
            return
        found.notes += (f"followed by {label} and a sum without an activation",)
        return
    if behind.call is not None and graph.kind(behind.call) == "droppath":
        found.notes += (f"followed by {label} and then {_droppath(graph, behind.call)}",)
        return
    after = "nothing" if behind.call is None else graph.label(behind.call)
    if behind.call is None and (behind.readers or behind.is_output):
        after = "several operations" if behind.readers else "the model's output"
    found.notes += (f"followed by {label} and then {after}, no activation",)


def _not_foldable(graph: Graph, found: Surroundings, step: Step) -> str | None:
    """Returns why a norm cannot be folded into the layer as a diagonal."""
    assert step.call is not None and step.call.module is not None
    module = step.call.module
    name = type(module).__name__
    frozen = "FrozenBatchNorm" in name
    if not isinstance(module, _BatchNorm) and not frozen:
        return "which cannot be folded into the layer: it divides by statistics of each sample, not of the batch"
    if not frozen and name not in _FOLDED_NORMS and type(module).forward not in _TORCH_FORWARDS:
        return "whose class has a forward of its own"
    if not isinstance(getattr(module, "drop", nn.Identity()), nn.Identity):
        return "which drops blocks"
    if step.reshaped:
        return "but shape operations stand between"
    shape = graph.record.values[_layer(graph, found).outputs[0]].shape
    convolution = len(getattr(_layer(graph, found).module, "kernel_size", ())) > 0
    if not convolution and len(shape) != 2:
        return "which normalises another axis than the layer's features"
    if graph.record.call_counts.get(step.call.name, 1) != graph.record.call_counts.get(_layer(graph, found).name, 1):
        return "which is called more often than the layer"
    return None


_TORCH_FORWARDS = frozenset({_BatchNorm.forward, nn.SyncBatchNorm.forward})


def _take_skip(graph: Graph, found: Surroundings, step: Step, pattern: Pattern) -> bool:
    call = step.call
    assert call is not None
    if len(call.inputs) != 2 or call.kwargs.get("alpha", 1) != 1:
        return False
    others = [place for place, argument in enumerate(call.inputs) if argument.value != step.value]
    if len(others) != 1:
        return False
    total = call.outputs[0]
    if graph.record.values[total].shape != graph.record.values[step.value].shape:
        return False
    behind = graph.follow(total)
    if not _take_activation(graph, found, behind, pattern):
        return False
    other = call.inputs[others[0]].value
    found.skip = SkipPart(other, others[0], call.index, graph.source(other))
    found.outlet = "activation"
    assert found.activation is not None
    if found.prior is not None and found.activation.ownership == "functional":
        found.reasons += (
            f"the activation after the skip is a function ({found.activation.label}), and a solver after a sum needs "
            "an activation module to run in",
        )
    elif found.prior is not None and _called_between(graph, found):
        found.reasons += (
            f"the activation {found.activation.name!r} after the skip is also called between the layer and the sum, so "
            "it could not tell its calls apart",
        )
    elif found.prior is not None and (step.reshaped or behind.reshaped):
        found.reasons += ("shape operations between the layer, the skip and the activation",)
    return True


def _called_between(graph: Graph, found: Surroundings) -> bool:
    """Whether the activation module is called for something else while this layer waits for its sum."""
    assert found.activation is not None
    end = found.activation.calls[0]
    return any(call.name == found.activation.name for call in graph.record.calls[_layer(graph, found).index + 1 : end])


def _take_dropout_behind(graph: Graph, found: Surroundings, call: Call) -> None:
    if _take_activation(graph, found, graph.follow(call.outputs[0]), "linear-dropout-act"):
        direct = any(argument.value == _layer(graph, found).outputs[0] for argument in call.inputs)
        found.dropout = _dropout_part(graph, call, direct, after=True)
    else:
        found.notes += (f"followed by {graph.label(call)} and no activation",)


def _look_back(graph: Graph, found: Surroundings) -> None:
    call, readers = graph.back(_layer(graph, found).inputs[0].value)
    if call is None or graph.kind(call) != "dropout":
        dropout = graph.dropout_before(_layer(graph, found).inputs[0].value)
        if dropout is not None:
            found.dropped["inputs"] = graph.label(dropout)
        return
    if found.pattern == "linear-dropout-act" or readers > 1:
        found.dropped["inputs"] = graph.label(call)
    if found.pattern == "linear-dropout-act":
        return
    if readers > 1:
        found.notes += (f"its dropout ({graph.label(call)}) feeds {readers} operations, so it is not the layer's own",)
        return
    if not graph.drops_features(call, _layer(graph, found)):
        found.dropped["inputs"] = graph.label(call)
        found.notes += (f"its dropout ({graph.label(call)}) drops whole channels, which are not the layer's features",)
        return
    found.dropout = _dropout_part(graph, call, _layer(graph, found).inputs[0].value in call.outputs)
    if found.pattern == "linear-act":
        found.pattern = "dropout-linear-act"
    elif found.pattern == "linear":
        found.pattern = "dropout-linear"


def _dropout_part(graph: Graph, call: Call, direct: bool, after: bool = False) -> DropoutPart:
    if call.module is None:
        rate = graph.rates.get(call.index, Rate())
        known = (rate.attribute, rate.problem)
        return DropoutPart(None, None, rate_of(call), "functional", rate.sites, (call.index,), after, direct, *known)
    sites = graph.record.call_counts.get(call.name, 1)
    ownership: Ownership = "private" if sites == 1 else "shared"
    return DropoutPart(call.name, call.module, rate_of(call), ownership, sites, (call.index,), after, direct)
