"""A device without float64 and numpy, as MPS is: tensors of the CPU that say they are elsewhere.

Every tensor counts as one of the device, except what ``.cpu()`` returns, what a function makes without naming a device,
and what is computed from such tensors alone. Autograd's own steps are not seen.
"""

from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

_DEVICE = torch.device("mps", 0)


class FakeMps(TorchFunctionMode):
    """Inside of it tensors are on MPS, and what MPS refuses raises TypeError."""

    def __enter__(self) -> Self:
        # The device has a generator of its own, which is not there.
        self.states = mock.patch.multiple(torch.mps, get_rng_state=mock.DEFAULT, set_rng_state=mock.DEFAULT)
        self.states.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.states.stop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs or {}))
        tensors = [one for one in leaves if isinstance(one, Tensor)]
        on_cpu, name = all(hasattr(one, "on_cpu") for one in tensors), func.__name__
        if func == Tensor.device.__get__:
            return torch.device("cpu") if on_cpu else _DEVICE
        if name == "numpy" and not on_cpu:
            raise TypeError("can't convert mps:0 device type tensor to numpy")
        named = [torch.device(one).type for one in leaves if _is_device(one)]
        if named or name == "cpu":
            on_cpu = name == "cpu" or named[-1] == "cpu"
        elif name in ("to", "type_as") and len(tensors) == 2:
            on_cpu = hasattr(tensors[1], "on_cpu")
        found = func(*_without_device(args), **_without_device(kwargs or {}))
        return tree_map(lambda one: _placed(one, on_cpu, tensors, name), found)


def _placed(found: Any, on_cpu: bool, given: list[Tensor], name: str) -> Any:
    if not isinstance(found, Tensor):
        return found
    if any(found is one for one in given) and hasattr(found, "on_cpu") != on_cpu:
        # Moved, without a copy: the tensor that was given stays where it was.
        found = found.view_as(found)
    if on_cpu:
        found.on_cpu = True
    elif found.dtype == torch.float64:
        raise TypeError(f"{name}: the MPS framework doesn't support float64")
    return found


def _is_device(one: Any) -> bool:
    return isinstance(one, torch.device) or (isinstance(one, str) and one.partition(":")[0] in ("cpu", "mps"))


def _without_device(tree: Any) -> Any:
    return tree_map(lambda one: "cpu" if _is_device(one) else one, tree)
