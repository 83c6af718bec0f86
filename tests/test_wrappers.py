import importlib

import accelerate
import pytest
import torch
from torch import nn

from solver_plugins import wrappers
from solver_plugins.wrappers import wrapper_of


class OwnParallel(nn.DataParallel):
    pass


def compiled_in_place():
    layer = nn.Linear(2, 2)
    layer.compile()
    return layer


CASES = {
    "DATA_PARALLEL": lambda: nn.DataParallel(nn.Linear(2, 2)),
    "COMPILED": lambda: torch.compile(nn.Linear(2, 2)),
    "COMPILED_IN_PLACE": compiled_in_place,
    "HOOKED": lambda: accelerate.hooks.add_hook_to_module(nn.Linear(2, 2), accelerate.hooks.ModelHook()),
}


@pytest.mark.parametrize("name", CASES)
def test_a_wrapper_is_recognised_and_says_what_to_do(name):
    module, expected = CASES[name](), getattr(wrappers, name)
    assert wrapper_of(module) is expected
    message = expected.refusal("save", "layer1.0")
    assert message.startswith(f"Expected a plain model; found {expected.label} at 'layer1.0': ") and "save" in message
    if expected.inside is not None:
        assert isinstance(getattr(module, expected.inside), nn.Linear) and f"model.{expected.inside}" in message


def test_plain_modules_and_subclasses_of_wrappers():
    assert wrapper_of(nn.Sequential(nn.DataParallel(nn.Linear(2, 2)))) is None
    assert wrapper_of(OwnParallel(nn.Linear(2, 2))) is wrappers.DATA_PARALLEL
    hooked = CASES["HOOKED"]()
    assert wrapper_of(accelerate.hooks.remove_hook_from_module(hooked)) is None


def test_classes_of_wrappers_exist_under_these_names():
    """DistributedDataParallel and both FSDPs need processes to be made: see tests/promises/test_6_distributed.py."""
    for path in wrappers._BY_CLASS:
        module, _, name = path.rpartition(".")
        found = getattr(importlib.import_module(module), name)
        assert f"{found.__module__}.{found.__qualname__}" == path
