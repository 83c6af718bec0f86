"""Forward passes that leave no trace: on the model, on random states, on the screen."""

import contextlib
import random
import sys
import warnings
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn


@contextlib.contextmanager
def unnoticed(*devices: torch.device) -> Iterator[None]:
    """Puts back random states, shows no warnings (they come at the next real pass), and compiles nothing."""
    python, numpy = random.getstate(), np.random.get_state()
    others = [device for device in devices if device.type not in ("cpu", "meta")]
    kind = others[0].type if others else "cuda"
    # Compiled parts run as they are written; without dynamo there are none, and its import is slow.
    dynamo = "torch._dynamo" in sys.modules
    eager = torch.compiler.set_stance("force_eager") if dynamo else contextlib.nullcontext()
    with torch.random.fork_rng(others, device_type=kind), warnings.catch_warnings(), eager:
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@contextlib.contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Puts back buffers, modes and random states, whatever happens in between."""
    modules = list(model.modules())
    modes = [module.training for module in modules]
    buffers = [dict(module._buffers) for module in modules]
    tensors = {id(one): one for own in buffers for one in own.values() if one is not None and not one.is_meta}
    values = {key: one.detach().clone() for key, one in tensors.items()}
    with unnoticed(*{one.device for one in tensors.values()}):
        try:
            yield
        finally:
            with torch.no_grad():
                for key, one in tensors.items():
                    if not _same(one, values[key]):
                        one.copy_(values[key])
            for module, mode, own in zip(modules, modes, buffers, strict=True):
                if module.training != mode:
                    module.__dict__["training"] = mode
                # In place: the mapping itself may be referred to.
                if any(module._buffers.get(name) is not one for name, one in own.items()):
                    module._buffers.update(own)


def _same(one: Tensor, other: Tensor) -> bool:
    # A write, even of the same numbers, would count as a change of the tensor (its version).
    return one.shape == other.shape and bool(torch.equal(one.detach().nan_to_num(), other.nan_to_num()))
