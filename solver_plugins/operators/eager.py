"""Whether values may be looked at: on an accelerator that would stall it, and under a transform there are none."""

import torch


def is_eager(device: torch.device) -> bool:
    """Whether tensors on this device have their values here and now: on the CPU, not compiled, traced, transformed."""
    return (
        device.type == "cpu"
        and not torch.compiler.is_compiling()
        and torch._C._get_tracing_state() is None
        and not torch._C._are_functorch_transforms_active()
    )
