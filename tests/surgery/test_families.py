"""Every family of timm is walked: a few here, all of them when slow tests are asked for."""

import pytest
import timm

from solver_plugins.surgery import match, record

_SMALL = (
    "test_", "atto", "femto", "pico", "nano", "tiny", "_xxs", "_xs", "small", "_s", "_t", "mini", "18", "b0", "_050",
    "m0", "lite", "base", "412m", "167m", "88m", "300m",
)  # fmt: skip
"""Words for small models, the smallest first."""
QUICK = (
    "byobnet", "coat", "convnext", "efficientnet", "ghostnet", "hrnet", "levit", "mobilenetv3", "naflexvit", "regnet",
    "sequencer", "xcit",
)  # fmt: skip


def smallest(family: str) -> str:
    def size(name: str) -> tuple[int, int, str]:
        place = next((place for place, word in enumerate(_SMALL) if word in name), len(_SMALL))
        return place, len(name), name

    return min(timm.list_models(module=family), key=size)


def walk(family: str) -> None:
    model = timm.create_model(smallest(family))
    made = record(model)
    blocks = match(made, model)
    assert made.device == ("cpu" if family == "gemma4_vit" else "meta")
    assert blocks and any(block.convertible for block in blocks)
    # Whatever cannot be converted says why.
    assert all(block.reasons or len(block.convertible) == 3 for block in blocks)


@pytest.mark.parametrize("family", QUICK)
def test_some_families(family: str) -> None:
    walk(family)


@pytest.mark.slow
@pytest.mark.parametrize(
    # Our own models are registered there, too.
    "family",
    [family for family in timm.list_modules() if family not in QUICK and hasattr(timm.models, family)],
)
def test_all_families(family: str) -> None:
    walk(family)
