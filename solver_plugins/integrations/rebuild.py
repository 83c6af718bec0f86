"""Checks whether a model that was built again is the same network, and guesses what it was built with."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from solver_plugins.blocks import blocks_of
from solver_plugins.integrations.heads import head_of, remove_opteq_head
from solver_plugins.surgery import revert_model
from solver_plugins.surgery.clone import clone, to_meta

_MODES = {"training", "inplace", "grad_checkpointing"}
"""Attributes that say how a module runs, not what it computes."""


def plain_copy(model: nn.Module) -> nn.Module:
    """Returns the plain form of a model, without solvers, head and weights; the model itself is only read."""
    copied = clone(model, to_meta)[0]
    if head_of(copied) is not None:
        remove_opteq_head(copied)
    return revert_model(copied) if blocks_of(copied) else copied


def differences(model: nn.Module, made: nn.Module) -> list[str]:
    """Returns what differs between a plain model and one that was built again, other than weights.

    Names, classes, shapes, and every number or text that a module keeps: no state dict holds the rate of a dropout.
    """
    ours, theirs = dict(model.named_modules()), dict(made.named_modules())
    lines = [f"{name or 'the model'} is not built" for name in ours if name not in theirs]
    lines += [f"{name or 'the model'} is built beside it" for name in theirs if name not in ours]
    for name in ours.keys() & theirs.keys():
        lines += [f"{name or 'the model'}: {line}" for line in _compare(ours[name], theirs[name])]
    return sorted(lines)


def guesses(model: nn.Module) -> dict[str, Any]:
    """Returns timm's usual arguments as far as a model shows them, in the order to try them."""
    found: dict[str, Any] = {}
    any_model: Any = model
    cfg = getattr(model, "pretrained_cfg", None) or {}
    modules = dict(model.named_modules())
    stem = next((module for module in modules.values() if isinstance(module, nn.Conv2d)), None)
    if stem is not None:
        found["in_chans"] = stem.in_channels
    size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    if size is not None:
        found["img_size"] = list(size) if isinstance(size, tuple) else size
    pools = (getattr(model, "global_pool", None), getattr(getattr(model, "head", None), "global_pool", None))
    pool = next((getattr(one, "pool_type", one) for one in pools if one is not None), None)
    if isinstance(pool, str) and pool != cfg.get("global_pool"):
        found["global_pool"] = pool
    drops = [module.p for module in modules.values() if isinstance(module, nn.Dropout) and module.p > 0]
    rate = getattr(any_model, "drop_rate", None) or (drops[-1] if drops else None)
    if rate:
        found["drop_rate"] = rate
    paths = [getattr(module, "drop_prob", None) for module in modules.values()]
    largest = max((p for p in paths if isinstance(p, float)), default=0.0)
    if largest > 0:
        found["drop_path_rate"] = largest
    return found


def _compare(one: nn.Module, other: nn.Module) -> Iterator[str]:
    if type(one) is not type(other):
        yield f"a {type(one).__name__} in the model, a {type(other).__name__} as built"
        return
    for kind in ("_parameters", "_buffers"):
        yield from _unequal(*({n: _shape(t) for n, t in vars(module)[kind].items()} for module in (one, other)))
    yield from _unequal(_settings(one), _settings(other))


def _unequal(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    for name in sorted(before.keys() | after.keys()):
        found, built = before.get(name, "nothing"), after.get(name, "nothing")
        if found != built:
            yield f"{name} is {found} in the model, {built} as built"


def _shape(tensor: Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tuple(tensor.shape)


def _settings(module: nn.Module) -> dict[str, Any]:
    return {
        name: _tuples(value)
        for name, value in vars(module).items()
        if not name.startswith(("_", "solver_plugins_")) and name not in _MODES and _simple(value)
    }


def _simple(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_simple(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, (list, tuple)) else value
