"""Chooses which layers of a model to listen to, and which to precondition."""

from dataclasses import dataclass

from torch import nn

from solver_plugins.errors import SolverPluginsError, UnsupportedLayerError, did_you_mean
from solver_plugins.proxprop.errors import WrappedModelError
from solver_plugins.proxprop.rows import Rows
from solver_plugins.surgery.errors import TargetError
from solver_plugins.surgery.kinds import linear_like
from solver_plugins.surgery.targets import Target, TargetList, Targets, read_targets
from solver_plugins.wrappers import COMPILED, DATA_PARALLEL, DDP, FSDP1, FSDP2, wrapper_of

_INSTEAD = {DATA_PARALLEL: "DistributedDataParallel", FSDP1: "FSDP2 (fully_shard)"}
"""Wrappers that hide their layers, and what to use instead."""


@dataclass(frozen=True)
class Choice:
    """The linear layers of a model, with how their inputs become rows (None: not preconditioned), and why not."""

    all: list[tuple[str, nn.Module, Rows | None]]
    skipped: dict[str, str]


def choose_layers(model: nn.Module, targets: Targets | None, exclude: Targets | None) -> Choice:
    """Returns the layers of a model; see :class:`ProxProp` for the arguments and the errors."""
    if not isinstance(model, nn.Module):
        raise UnsupportedLayerError(f"Expected a torch.nn.Module; found {type(model).__name__}.")
    named = _linear_layers(model)
    bare = _read_directly(model)
    wanted = None if targets is None else read_targets(targets, "targets")
    unwanted = None if exclude is None else read_targets(exclude, "exclude")
    for given in (wanted, unwanted):
        if given is not None:
            _check_met(given, named)
    result: list[tuple[str, nn.Module, Rows | None]] = []
    skipped: dict[str, str] = {}
    for layer, names in named.values():
        rows: Rows | None = None
        if unwanted is not None and _met(unwanted, names, layer):
            skipped[names[0]] = "excluded"
        elif wanted is not None and not _met(wanted, names, layer):
            skipped[names[0]] = "not among the targets"
        elif wanted is None and id(layer) in bare:
            skipped[names[0]] = f"{bare[id(layer)]} reads its weight without calling it"
        else:
            try:
                rows = Rows.of(layer)
            except SolverPluginsError as error:
                if wanted is not None:
                    raise UnsupportedLayerError(f"{names[0]} cannot be preconditioned: {error}") from error
                skipped[names[0]] = str(error)
        result.append((names[0], layer, rows))
    if not any(rows is not None for _, _, rows in result):
        reasons = "".join(f"\n  - {name}: {reason}" for name, reason in list(skipped.items())[:5])
        raise UnsupportedLayerError(
            f"Expected a model with linear or convolutional layers to precondition; found none.{reasons}"
        )
    kept = [(name, layer) for name, layer, rows in result if rows is not None]
    _check_biases(kept)
    _check_shards(kept, any(wrapper_of(module) is FSDP2 for module in model.modules()))
    return Choice(result, skipped)


def _linear_layers(model: nn.Module) -> dict[int, tuple[nn.Module, list[str]]]:
    """Returns every linear layer once, with all of its names in the plain model."""
    distributed = wrapper_of(model) is DDP
    named: dict[int, tuple[nn.Module, list[str]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        wrapper = wrapper_of(module)
        if wrapper is not None and wrapper in _INSTEAD:
            raise WrappedModelError(
                f"ProxProp cannot listen to layers inside {wrapper.label}; use {_INSTEAD[wrapper]}, or make the "
                "ProxProp from the plain model."
            )
        if linear_like(module):
            # A compiled module may stand anywhere in the path, DistributedDataParallel only at its front.
            parts = [part for part in path.split(".") if part != COMPILED.inside]
            name = ".".join(parts[1:] if distributed else parts)
            names = named.setdefault(id(module), (module, []))[1]
            if name not in names:
                names.append(name)
    return named


def _read_directly(model: nn.Module) -> dict[int, str]:
    """Returns the layers that are never called, because their parent module reads their weights itself."""
    found = {}
    for module in model.modules():
        names = ("out_proj",) if isinstance(module, nn.MultiheadAttention) else ()
        for name in getattr(type(module), "weights_read_directly", names):
            found[id(getattr(module, name))] = type(module).__name__
    return found


def _met(given: Target | TargetList, names: list[str], layer: nn.Module) -> bool:
    return any(given.matches(name, layer) for name in names)


def _check_met(given: TargetList, named: dict[int, tuple[nn.Module, list[str]]]) -> None:
    known = {name for _, names in named.values() for name in names}
    shown = known if len(known) <= 20 else {name.rpartition(".")[2] for name in known}
    for target in given.targets:
        if not any(_met(target, names, layer) for layer, names in named.values()):
            raise TargetError(
                f"{given.option}: {target.label} matches no linear layer.{did_you_mean(target.text or '', shown)}"
            )


def _check_biases(layers: list[tuple[str, nn.Module]]) -> None:
    """Refuses a bias that belongs to two weights, because it would be part of two systems."""
    owners: dict[int, tuple[str, int]] = {}
    for name, layer in layers:
        bias, weight = layer._parameters.get("bias"), layer._parameters.get("weight")
        if bias is None:
            continue
        other, known = owners.setdefault(id(bias), (name, id(weight)))
        if known != id(weight):
            raise UnsupportedLayerError(
                f"{other} and {name} share a bias but not their weights, so their systems cannot be solved "
                "separately; leave one of them out with exclude=."
            )


def _check_shards(layers: list[tuple[str, nn.Module]], fsdp2: bool) -> None:
    """Refuses weights that are spread over processes while their layers run: no process then sees whole rows."""
    for name, layer in layers:
        placements = getattr(layer._parameters["weight"], "placements", ())
        if placements and (not fsdp2 or sum(one.is_shard() for one in placements) > 1):
            raise WrappedModelError(
                f"The weight of {name} is spread over processes by tensor parallelism, so no process sees its whole "
                "inputs. ProxProp supports DistributedDataParallel and FSDP2; leave this layer out with exclude=."
            )
