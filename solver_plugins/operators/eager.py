"""Whether values may be read: reading stalls an accelerator, and under a transform there are no values."""

import torch


def is_eager(device: torch.device) -> bool:
    """Whether reading a value costs nothing: on the CPU, and not compiled, traced or transformed."""
    return (
        device.type == "cpu"
        and not torch.compiler.is_compiling()
        and torch._C._get_tracing_state() is None
        and not torch._C._are_functorch_transforms_active()
        and not is_faked()
    )


def is_faked() -> bool:
    """Whether a FakeTensorMode is active, in which every result is a shape without values."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
