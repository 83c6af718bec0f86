"""Whether a module is wrapped, and by what: parallel training, sharding, compilation, accelerate's hooks.

Wrappers are recognised by the qualified names of their classes, so nothing is imported for it.
"""

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Wrapper:
    """Something that stands between a caller and a plain module.

    Attributes:
        label: What messages call it.
        inside: The attribute of the wrapper that holds the plain module; None if the module itself was changed.
        advice: What to do instead, with a place for the verb.
    """

    label: str
    inside: str | None
    advice: str

    def refusal(self, verb: str, at: str = "") -> str:
        """Returns the message of an error: what was found (``at`` names the module), and how to ``verb`` the model."""
        found = f"{self.label} at {at!r}" if at else self.label
        return f"Expected a plain model; found {found}: {self.advice.format(verb=verb)}."


_UNWRAP = "unwrap it, {verb} model.module, then wrap it again"
_SHARD = "{verb} the plain model, then shard it"

DDP = Wrapper("DistributedDataParallel", "module", _UNWRAP)
DATA_PARALLEL = Wrapper("DataParallel", "module", _UNWRAP)
FSDP1 = Wrapper("FullyShardedDataParallel", "module", _SHARD)
FSDP2 = Wrapper("a module sharded by fully_shard", None, _SHARD)
COMPILED = Wrapper("an OptimizedModule of torch.compile", "_orig_mod", "{verb} model._orig_mod, then compile it")
COMPILED_IN_PLACE = Wrapper("a module after .compile()", None, "{verb} the model, then compile it")
HOOKED = Wrapper(
    "a module with an accelerate hook",
    None,
    "{verb} the model before it is dispatched, or remove its hooks with "
    "accelerate.hooks.remove_hook_from_module(model, recurse=True)",
)

_BY_CLASS = {
    "torch.nn.parallel.distributed.DistributedDataParallel": DDP,
    "torch.nn.parallel.data_parallel.DataParallel": DATA_PARALLEL,
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": FSDP1,
    "torch.distributed.fsdp.FSDPModule": FSDP2,
    "torch._dynamo.eval_frame.OptimizedModule": COMPILED,
}


def wrapper_of(module: nn.Module) -> Wrapper | None:
    """Returns what a module is wrapped by, or None for a plain module; its submodules are not searched."""
    for base in type(module).__mro__:
        found = _BY_CLASS.get(f"{base.__module__}.{base.__qualname__}")
        if found is not None:
            return found
    if getattr(module, "_compiled_call_impl", None) is not None:
        return COMPILED_IN_PLACE
    return HOOKED if hasattr(module, "_hf_hook") else None
