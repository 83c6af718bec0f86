"""The modes and hooks that watch a forward pass, and what they write: tensors, and the calls between them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from solver_plugins.surgery.kinds import function_name, module_kind, torch_function

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


def tensors_in(thing: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested lists, tuples and mappings."""
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, Mapping):
        for item in thing.values():
            yield from tensors_in(item)
    elif isinstance(thing, list | tuple) and not isinstance(thing, torch.Size):
        for item in thing:
            yield from tensors_in(item)


@dataclass
class _Seen:
    """What a call was given, before it ran."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[Argument, ...]
    before: list[tuple[Tensor, int]]


class Tracer:
    """Writes the calls of one forward pass.

    ``originals`` has the model's own module for each module of the copy that runs, ``names`` the first name of each of
    these, and ``tensors`` the kind and name of each Parameter and buffer of the copy, by ``id``.
    """

    def __init__(
        self,
        originals: Mapping[nn.Module, nn.Module],
        names: Mapping[nn.Module, str],
        tensors: Mapping[int, tuple[ValueKind, str]],
    ):
        self.calls: list[Call] = []
        self.values: list[Value] = []
        self.call_counts: dict[str, int] = {}
        # Inside of a step: everything called there belongs to it.
        self.busy = False
        self._originals = originals
        self._names = names
        self._named_tensors = tensors
        self._steps = {made for made, module in originals.items() if module_kind(module) is not None}
        self._scopes: list[str] = []
        self._inside: nn.Module | None = None
        self._pending: _Seen | None = None
        # The tensors are kept alive, so that no id is used twice.
        self._known: dict[int, tuple[Tensor, int, int]] = {}
        self._last_write: dict[int, int] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Records everything that is called inside of the context."""
        with ExitStack() as stack:
            for made in self._originals:
                if isinstance(made, torch.jit.ScriptModule):
                    continue
                before = made.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
                after = made.register_forward_hook(self._leave, with_kwargs=True, always_call=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
            stack.enter_context(_Operators(self))
            stack.enter_context(_Functions(self))
            yield

    def mark(self, thing: Any, kind: ValueKind) -> None:
        """Notes the tensors that the forward pass is given."""
        for tensor in tensors_in(thing):
            self._new_value(tensor, kind)

    def mark_outputs(self, thing: Any) -> None:
        """Marks the values that the model returned."""
        for tensor in tensors_in(thing):
            self.values[self._value_of(tensor)].is_output = True

    def see(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls a function, and records it unless it is called inside of a step."""
        if self.busy:
            return function(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            seen = self._see(args, kwargs)
        self.busy = True
        try:
            result = function(*args, **kwargs)
        finally:
            self.busy = False
        with torch._C.DisableTorchFunction():
            written = _written(seen.before, result)
            if written:
                self._write(function_name(function), None, torch_function(function), seen, written)
        return result

    def _enter(self, made: nn.Module, args: Any, kwargs: Any) -> None:
        name = self._names[self._originals[made]]
        self.call_counts[name] = self.call_counts.get(name, 0) + 1
        if self._inside is not None or self.busy:
            return
        if made not in self._steps:
            self._scopes.append(name)
            return
        with torch._C.DisableTorchFunction():
            self._pending = self._see(args, kwargs)
        self._inside, self.busy = made, True

    def _leave(self, made: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        if self._inside is not made:
            if self._inside is None and self._scopes and self._scopes[-1] == self._names[self._originals[made]]:
                self._scopes.pop()
            return
        self._inside, self.busy = None, False
        pending, self._pending = self._pending, None
        assert pending is not None
        with torch._C.DisableTorchFunction():
            written = _written(pending.before, result)
            if written:
                module = self._originals[made]
                self._write(self._names[module], module, None, pending, written)

    def _see(self, args: Any, kwargs: Any) -> _Seen:
        """Notes what a call is given before it runs, as it may change its tensors."""
        before = [(tensor, _version(tensor)) for tensor in tensors_in((args, kwargs))]
        places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        inputs = tuple(
            Argument(self._value_of(tensor), position) for position, thing in places for tensor in tensors_in(thing)
        )
        refs = {id(tensor): Ref(argument.value) for (tensor, _), argument in zip(before, inputs, strict=True)}
        return _Seen(_plain(args, refs), _plain(kwargs, refs), inputs, before)

    def _write(
        self,
        name: str,
        module: nn.Module | None,
        function: Callable[..., Any] | None,
        seen: _Seen,
        written: list[Tensor],
    ) -> None:
        inputs = seen.inputs
        if not inputs:  # torch.zeros and the like: the tensor is found where it is used
            return
        sources = [self.values[argument.value] for argument in inputs]
        parameters = tuple(dict.fromkeys(name for source in sources for name in source.parameters))
        only = parameters if all(source.parameters or source.kind == "constant" for source in sources) else ()
        outputs = tuple(self._new_value(tensor, "computed", len(self.calls), only) for tensor in written)
        for tensor, value in zip(written, outputs, strict=True):
            self._last_write[_storage(tensor)] = value
        self._append(name, module, function, seen.args, seen.kwargs, inputs, outputs, parameters)

    def _append(self, name: str, module: nn.Module | None, function: Callable[..., Any] | None, *rest: Any) -> None:
        """Adds a call; the rest is its arguments, inputs, outputs and Parameters."""
        index, scope = len(self.calls), self._scopes[-1] if self._scopes else ""
        made = Call(index, "function" if module is None else "module", name, module, function, scope, *rest)
        for argument in made.inputs:
            self.values[argument.value].consumers.append(index)
        self.calls.append(made)

    def _new_value(
        self, tensor: Tensor, kind: ValueKind, producer: int | None = None, parameters: tuple[str, ...] = ()
    ) -> int:
        value = Value(len(self.values), kind, tuple(tensor.shape), tensor.dtype, producer, parameters=parameters)
        self.values.append(value)
        self._known[id(tensor)] = (tensor, value.id, _version(tensor))
        return value.id

    def _value_of(self, tensor: Tensor) -> int:
        known = self._known.get(id(tensor))
        if known is None:
            if id(tensor) not in self._named_tensors:
                return self._new_value(tensor, "constant")
            kind, name = self._named_tensors[id(tensor)]
            return self._new_value(tensor, kind, parameters=(name,) if kind == "parameter" else ())
        _, value, version = known
        if version == _version(tensor) or self.values[value].kind in ("parameter", "buffer"):
            return value
        # Something else that shares the memory was written to since.
        cause = self._last_write.get(_storage(tensor), value)
        inputs = tuple(Argument(source, place) for place, source in enumerate(dict.fromkeys((value, cause))))
        changed = self._new_value(tensor, "computed", len(self.calls))
        refs = tuple(Ref(argument.value) for argument in inputs)
        self._append("written_through_view", None, None, refs, {}, inputs, (changed,), ())
        return changed


class _Functions(TorchFunctionMode):
    """Sees every function of torch that Python calls."""

    def __init__(self, tracer: Tracer):
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.tracer.see(func, args, kwargs or {})


class _Operators(TorchDispatchMode):
    """Sees the operators that run outside of any such function: those of scripted functions."""

    def __init__(self, tracer: Tracer):
        super().__init__()
        self.tracer = tracer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.tracer.see(func, args, kwargs or {})


def _written(before: list[tuple[Tensor, int]], result: Any) -> list[Tensor]:
    """Returns the tensors that a call made or changed, results first; tensors that it only hands on are left out."""
    changed = {id(tensor): tensor for tensor, version in before if _version(tensor) != version}
    handed = {id(tensor) for tensor, _ in before} - changed.keys()
    made = {id(tensor): tensor for tensor in tensors_in(result) if id(tensor) not in handed}
    return list({**made, **changed}.values())


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _storage(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse and wrapped tensors have no storage of their own
        return id(tensor)


def _plain(thing: Any, refs: Mapping[int, Ref]) -> Any:
    """Returns arguments with references in place of tensors."""
    if isinstance(thing, Tensor):
        return refs[id(thing)]
    if isinstance(thing, Mapping):
        return {key: _plain(item, refs) for key, item in thing.items()}
    if isinstance(thing, torch.Size):
        return tuple(thing)
    if isinstance(thing, list | tuple):
        items = [_plain(item, refs) for item in thing]
        return items if isinstance(thing, list) else tuple(items)
    return thing
