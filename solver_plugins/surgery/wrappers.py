"""Models that cannot be converted as they are: wrapped, hooked, sharded, lazy, or converted already."""

import torch
from torch import nn

from solver_plugins.blocks import blocks_of
from solver_plugins.errors import OptionError
from solver_plugins.surgery.errors import ConversionError

_WRAPPERS = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "unwrap it (model.module), convert, wrap again",
    "torch.nn.parallel.data_parallel.DataParallel": "unwrap it (model.module), convert, wrap again",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "convert first, then shard",
    "torch.distributed.fsdp.FSDPModule": "convert first, then shard",
    "torch._dynamo.eval_frame.OptimizedModule": "convert the original (model._orig_mod), then compile",
}


def refuse_wrapped(model: nn.Module) -> None:
    """Raises ConversionError for a model in which a solver would never run, or that has one already."""
    if not isinstance(model, nn.Module):
        raise OptionError(f"Expected a torch.nn.Module; found {type(model).__name__}.")
    converted = blocks_of(model)
    for name, module in model.named_modules():
        _refuse_wrapper(name, module)
        if name in converted:
            raise ConversionError(f"{name or 'The model'} is converted already; call revert_model(model) first.")
        if hasattr(module, "_hf_hook"):
            raise ConversionError(
                f"{name or 'The model'} carries an accelerate hook, which would hide a solver: convert before "
                "dispatching the model, or remove the hooks with accelerate.hooks.remove_hook_from_module(model, "
                "recurse=True)."
            )
    if any(isinstance(parameter, torch.nn.parameter.UninitializedParameter) for parameter in model.parameters()):
        raise ConversionError("Expected initialised weights; found lazy layers. Run one forward pass first.")


def _refuse_wrapper(name: str, module: nn.Module) -> None:
    """Raises ConversionError for a module that wraps another one, or hides its own forward."""
    found = f"found {type(module).__name__}" + (f" at {name!r}" if name else "")
    for base in type(module).__mro__:
        remedy = _WRAPPERS.get(f"{base.__module__}.{base.__qualname__}")
        if remedy is not None:
            raise ConversionError(f"Expected a plain model; {found}: {remedy}.")
    if getattr(module, "_compiled_call_impl", None) is not None:
        raise ConversionError(f"Expected a plain model; {found} after .compile(): convert first, then compile.")


def is_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` (FSDP2) has given a module its class."""
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)
