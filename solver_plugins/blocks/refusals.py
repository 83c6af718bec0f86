"""What a block refuses: tools that read a layer's class or source in place of calling it, and so miss its solver."""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from solver_plugins.blocks.shell import Shell
from solver_plugins.errors import UnsupportedLayerError

_EXPORT = (
    "use torch.export.export(model, ...), or solver_plugins.export_model(model, path, to='onnx' or 'pt2'). A model that"
    " is plain again can be traced, too: merge_model(model) where every block is affine, or revert_model(model)"
)
_QUANTIZE = (
    "first make the layers plain: merge_model(model) keeps the function where every block is affine, "
    "revert_model(model) does not"
)


class Refusing(Shell):
    """Mixin that raises where a tool would trace a solver wrongly, or replace its layer and leave it out."""

    @property
    def __jit_ignored_attributes__(self) -> list[str]:
        """Nothing; raises UnsupportedLayerError if TorchScript asks, as it does before it reads a module's source."""
        if sys._getframe(1).f_globals.get("__name__") == "torch.jit._recursive":
            raise UnsupportedLayerError(_cannot("TorchScript (torch.jit.script, torch.jit.trace)", "be compiled"))
        return []

    @property
    def qconfig(self) -> Any:
        """Not there: see the setter."""
        raise AttributeError(f"{type(self).__name__} has no qconfig.")

    @qconfig.setter
    def qconfig(self, value: Any) -> None:
        # torch.ao.quantization sets it on every module before it swaps those whose very class it knows.
        if value is not None or isinstance(self, nn.Linear):
            raise UnsupportedLayerError(
                "torch.ao.quantization swaps layers by their class, and would silently leave this "
                f"{type(self).__name__} in full precision: {_QUANTIZE}."
            )

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Registers a Parameter; raises UnsupportedLayerError for a quantized one, without the products of a solver."""
        if is_quantized(param):
            raise UnsupportedLayerError(
                f"A solver multiplies by its weight and by its transpose, which a quantized weight "
                f"({type(param).__name__} of torchao) does not offer: {_QUANTIZE}."
            )
        super().register_parameter(name, param)

    def refuse_tracing(self, input: Any) -> None:
        """Raises UnsupportedLayerError while torch.jit.trace or torch.fx traces a forward with this input."""
        if torch._C._get_tracing_state() is not None:
            raise UnsupportedLayerError(
                _cannot("TorchScript (torch.jit.trace, torch.onnx.export with dynamo=False)", "be traced")
            )
        if not isinstance(input, Tensor) and type(input).__module__ == "torch.fx.proxy":
            raise UnsupportedLayerError(_cannot("torch.fx", "be traced symbolically"))


def is_quantized(weight: Any) -> bool:
    """Whether a weight is one of torchao's, whose type knows few operations."""
    return type(weight).__module__.partition(".")[0] == "torchao"


def _cannot(tool: str, verb: str) -> str:
    return f"A solver block chooses its way by its input's shape and cannot {verb} by {tool}: {_EXPORT}."
