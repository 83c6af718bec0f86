"""timm's models as cases: how each is built small enough, and the smallest image that it takes."""

import functools
import itertools
import re
from collections.abc import Iterator
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from solver_plugins.surgery import Inputs
from solver_plugins.surgery.clone import clone, to_meta
from tests.coverage.result import Case
from tests.coverage.weights import undrawn_weights

BATCH = 2
SIDES = (64, 56, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
"""Tried in this order: 64 leaves 2x2 pixels to a network of stride 32, enough numbers for a norm over the batch."""
ENOUGH = 128
"""A norm over two numbers per channel gives plus and minus one, and its gradient is noise. If 64 pixels leave no more
than that (in a network of stride 64), this many pixels are tried."""
DROP_RATE = 0.1
"""Rate of the classifier's dropout, with which it is the paper's block if the model has one."""
LARGEST = 1_000_000_000
"""Models with more parameters than this are made less deep."""
KEPT = 2
"""Blocks that such a model keeps of each of its stages."""
_SMALL = (
    "test_", "atto", "femto", "pico", "nano", "tiny", "_xxs", "_xs", "small", "_s", "_t", "mini", "18", "b0", "_050",
    "m0", "lite", "base", "412m", "167m", "88m", "300m",
)  # fmt: skip
"""Words for small models, the smallest first."""
_LARGE = re.compile(r"giant|gigantic|enormous|huge|large|xlarge|_xl|_l_|_\d+b_|x4|l2|_2560|_1280|_640|so400m")


_PATCH = re.compile(r"patch(\d+)")
_UNEXPECTED = re.compile(r"unexpected keyword argument '(\w+)'")


def _size(name: str) -> tuple[bool, int, int, str]:
    place = next((place for place, word in enumerate(_SMALL) if word in name), len(_SMALL))
    return bool(_LARGE.search(name)), place, len(name), name


def families() -> dict[str, list[str]]:
    """Returns the names of timm's own models by module, those that look smallest first."""
    found = {}
    for family in timm.list_modules():
        # Other packages, such as this one, may have registered models as well.
        own = [name for name in timm.list_models(module=family) if _module(name).startswith("timm.")]
        if own:
            found[family] = sorted(own, key=_size)
    return found


def _module(name: str) -> str:
    return timm.model_entrypoint(name).__module__


def names() -> list[tuple[str, str]]:
    """Returns every model with its family: first the smallest of each family, then the next ones."""
    ordered = families()
    found, place = [], 0
    while any(len(models) > place for models in ordered.values()):
        found += [(models[place], family) for family, models in ordered.items() if len(models) > place]
        place += 1
    return sorted(dict(found).items(), key=lambda pair: bool(_LARGE.search(pair[0])))


def build(name: str, options: dict[str, Any], kept: int | None = None) -> nn.Module:
    """Makes a model without drawing its weights.

    Args:
        name: The model's name.
        options: Further options of the model.
        kept: How many blocks are kept of each stage; None keeps all.
    """
    with undrawn_weights():
        model: nn.Module = timm.create_model(name, num_classes=10, **options)
    if kept is not None:
        shorten(model, kept)
    return model


def shorten(model: nn.Module, kept: int) -> list[str]:
    """Keeps the first blocks of every long row of equal blocks, and returns how many each row had."""
    cut = []
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Sequential | nn.ModuleList) or len(module) <= kept + 1:
            continue
        children = list(module.named_children())
        last = type(children[-1][1])
        alike = sum(type(child) is last for _, child in children)
        if alike <= kept or not list(children[-1][1].children()):
            continue
        cut.append(f"{name} {len(children)} to {len(children) - alike + kept}")
        for child, _ in [pair for pair in children if type(pair[1]) is last][kept:]:
            del module._modules[child]
    return cut


def case(name: str, family: str) -> Case:
    """Finds options and the smallest image for a model.

    Raises:
        RuntimeError: If it takes none of the sizes; the error of the largest is the cause.
    """
    config = timm.get_pretrained_cfg(name)
    known = tuple(config.input_size) if config is not None else (3, 224, 224)
    error: Exception | None = None
    refused: set[str] = set()
    whole = _parameters(name) if _LARGE.search(name) else 0
    shallow: list[dict[str, Any]] = [{"depth": KEPT}, {"depths": (1, 1, KEPT, 1)}, {}] if whole > LARGEST else [{}]
    patch = _PATCH.search(name)
    attempts = _attempts(known, bool(config is not None and config.fixed_input_size), int(patch[1]) if patch else 0)
    starving: tuple[int, Case] | None = None
    for (tried, shape), depth in itertools.product(attempts, shallow):
        asked = {**tried, **depth}
        if refused & asked.keys() or (starving is not None and shape[1] < ENOUGH):
            continue
        try:
            options, model = _accepted(name, {"drop_rate": DROP_RATE, **asked}, refused)
            if refused & asked.keys():
                continue
            cut = shorten(model, KEPT) if whole > LARGEST and not depth else []
            kept = KEPT if cut else None
            starved = _starved_norms(model, shape)
        except Exception as found:
            error = found
            continue
        how = ", ".join(cut or [f"{key}={value}" for key, value in depth.items()])
        reduced = f"{whole / 1e9:.1f}B parameters: {how}" if whole > LARGEST else None
        rebuild = functools.partial(build, name, options, kept)
        whole_size = functools.partial(as_it_is, name) if asked else None
        made = Case("timm", name, family, rebuild, Inputs((_image(shape),)), whole_size, model, reduced)
        if starving is not None:
            return made if starved < starving[0] else starving[1]
        if not starved or shape[1] >= ENOUGH:
            return made
        starving = starved, made
    if starving is not None:
        return starving[1]
    raise error if error is not None else RuntimeError(f"no size was tried for {name}")


def as_it_is(name: str, weights: bool) -> nn.Module:
    """Makes a model as it is, with undrawn weights or on the meta device."""
    with undrawn_weights() if weights else torch.device("meta"):
        model: nn.Module = timm.create_model(name)
    return model


def _parameters(name: str) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in timm.create_model(name).parameters())


def _accepted(name: str, options: dict[str, Any], refused: set[str]) -> tuple[dict[str, Any], nn.Module]:
    """Builds a model with those of the options that it takes; the others are added to ``refused``."""
    while True:
        taken = {key: value for key, value in options.items() if key not in refused}
        try:
            return taken, build(name, taken)
        except TypeError as error:
            unknown = _UNEXPECTED.search(str(error))
            if unknown is None or unknown[1] not in taken:
                raise
            refused.add(unknown[1])


def _attempts(native: tuple[int, ...], fixed: bool, patch: int) -> Iterator[tuple[dict[str, Any], tuple[int, ...]]]:
    """Yields options and image sizes to try, small ones first if the model's size can be set or any size fits."""
    channels, side = native[0], min(native[1:])
    small = [(channels, tried, tried) for tried in SIDES if tried < side]
    if patch >= 8 and 2 * patch < min(side, SIDES[0]):
        # Four patches are enough for a transformer with one scale.
        yield {"img_size": 2 * patch}, (channels, 2 * patch, 2 * patch)
    yield from (({"img_size": shape[1]}, shape) for shape in small)
    if not fixed:
        yield from (({}, shape) for shape in small)
    yield {}, native


def _image(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(BATCH, *shape, generator=torch.Generator().manual_seed(0))


def _starved_norms(model: nn.Module, shape: tuple[int, ...]) -> int:
    """Runs a copy of the model without weights, or the model itself if it looks at its data.

    Returns:
        How many norms over the batch saw no more than one number per channel and image.
    """
    starved: list[str] = []

    def look(norm: nn.Module, args: tuple[Any, ...]) -> None:
        if args[0].numel() <= BATCH * args[0].shape[1]:
            starved.append(type(norm).__name__)

    def run(made: nn.Module, image: Tensor) -> None:
        starved.clear()
        handles = [m.register_forward_pre_hook(look) for m in made.modules() if isinstance(m, _BatchNorm)]
        try:
            made.train()(image)
        finally:
            for handle in handles:
                handle.remove()

    with torch.no_grad():
        try:
            with torch.device("meta"):
                run(clone(model, to_meta)[0], torch.empty(BATCH, *shape, device="meta"))
        except (NotImplementedError, RuntimeError) as error:
            if "meta" not in str(error):
                raise
            run(model, _image(shape))
    return len(starved)
