"""The plain data of a record: tensors, and the calls between them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

ValueKind = Literal["input", "parameter", "buffer", "constant", "computed"]


@dataclass(frozen=True)
class Ref:
    """Stands for a tensor in the arguments of a call."""

    value: int


@dataclass(frozen=True)
class Argument:
    """A tensor that a call reads: the value's id, and the index or keyword of the argument that is or contains it."""

    value: int
    position: int | str


@dataclass
class Value:
    """A tensor at one moment. After an in-place operation the same tensor is another value.

    Attributes:
        id: Its place in :attr:`Record.values`.
        producer: Index of the call that computed it; None if the forward pass was given it or created it from nothing.
        consumers: Indices of the calls that read it, in order; a call that reads it twice is listed twice.
        is_output: Whether the model returns it.
        parameters: Names of the Parameters that it is, or is computed from, if it is computed from nothing else.
    """

    id: int
    kind: ValueKind
    shape: tuple[int, ...]
    dtype: torch.dtype
    producer: int | None = None
    consumers: list[int] = field(default_factory=list)
    is_output: bool = False
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class Call:
    """One step of the forward pass.

    Attributes:
        index: Its place in :attr:`Record.calls`.
        kind: "module" for a module whose inside is not looked at, "function" for a function called outside of those.
        name: The module's qualified name, or the function's bare name.
        module: The module (of the model itself, never of a copy), or None.
        function: The function as torch knows it, or None; also None for "written_through_view": a write that reached a
            tensor through another one that shares its memory.
        scope: Name of the innermost module around the call that is not itself a step.
        args: Positional arguments, with :class:`Ref` in place of tensors; likewise ``kwargs``.
        outputs: Ids of the values written, those changed in place included.
        parameters: Names of the Parameters read by a function, directly or through a computation from them alone.
    """

    index: int
    kind: Literal["module", "function"]
    name: str
    module: nn.Module | None
    function: Callable[..., Any] | None
    scope: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[Argument, ...]
    outputs: tuple[int, ...]
    parameters: tuple[str, ...]
