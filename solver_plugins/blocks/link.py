"""The hand-over from a layer to the module behind it: it follows the data, not the order of calls.

A solver behind a norm or a skip runs where the argument of the activation is complete, and needs what its layer was
given. So the layer *marks* its output, and whoever receives a marked tensor knows which layer computed it, from what,
and with which weights. Nothing is kept between two calls: a tensor that is dropped, recomputed, reordered or computed
in another thread takes its mark along, or never had one.

A mark is an attribute of a tensor, which an operation does not hand on. While a module that holds both ends of a link
runs (its *scope*), a ``TorchFunctionMode`` carries marks through sums and through operations that change no number.
Another operation *breaks* a mark, and a broken mark is an error where it arrives; a linear layer ends it. Operations
that torch does not show to a mode (scripted functions, an ``autograd.Function``) lose a mark. That is an error, too:
a layer has then handed something over that never arrived.
"""

import contextlib
import copy
import functools
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from solver_plugins.blocks.shell import Shell, made_class

Role = Literal["norm", "norm-activation", "activation"]
"""What the module at the end of a link does itself: the norm (the activation follows), both, or the activation."""


def words(text: str) -> frozenset[str]:
    """Returns the words of a text, the names of functions."""
    return frozenset(text.split())


SUMS = words("add add_ __add__ __radd__ __iadd__ iadd")
SAME_NUMBERS = words("to type type_as float double half bfloat16 clone contiguous alias positive view_as")
LINEAR = words(
    "linear bilinear matmul __matmul__ __rmatmul__ mm bmm mv addmm addmm_ baddbmm addbmm einsum tensordot conv1d "
    "conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution _conv_forward "
    "multi_head_attention_forward grouped_mm _grouped_mm scaled_grouped_mm"
)
"""Functions that multiply by one of their arguments: given a Parameter, they are a linear layer without a module."""
_MARKS = "_solver_plugins_marks"


@dataclass(frozen=True)
class Place:
    """A module of the model by its place: whatever stands there when it is needed, also after a replacement."""

    parent: nn.Module
    name: str

    @property
    def module(self) -> nn.Module:
        """The module that is there now; an empty one where there is none."""
        return self.parent._modules.get(self.name) or nn.Identity()


@dataclass(eq=False)
class Link:
    """One way from a converted layer to the module in which the argument of its activation is complete.

    Attributes:
        name: The layer's name, for messages.
        role: What the module at the end does.
        layer: Where the layer stands.
        outlet: Where the module at the end stands.
        norm: Where the norm on the way stands; None where there is none, or it is the outlet.
        scopes: The modules around both ends, from the whole model to the innermost one that runs both.
    """

    name: str
    role: Role
    layer: Place
    outlet: Place
    norm: Place | None
    scopes: tuple[nn.Module, ...]

    @property
    def scope(self) -> nn.Module:
        """The innermost module that runs both ends."""
        return self.scopes[-1]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Link":
        if not any(id(scope) in memo for scope in self.scopes):
            # One end is copied alone (PEFT's modules_to_save): the copy takes the original's part in the same link.
            return self
        made = object.__new__(Link)
        memo[id(self)] = made
        for field in fields(self):
            setattr(made, field.name, copy.deepcopy(getattr(self, field.name), memo))
        return made

    def carries(self) -> bool:
        """Whether operations stand between both ends: a sum, or an adapter that wraps the layer or hooks into it."""
        layer: Any = self.layer.module
        direct = isinstance(layer, Shell) and vars(layer).get("link") is self and not layer._forward_hooks
        return self.role == "activation" or not direct


@dataclass(eq=False, slots=True)
class Handed:
    """What a mark says: who computed this tensor, from what.

    Attributes:
        link: The link that it is for, or the constant that stands for a shared dropout.
        block: The block that computed it; it may be a copy of the one that was converted.
        input: What the block was given. Of a shared dropout, what it was given; None where it dropped nothing.
        kernel: The block's weight.
        norm: The norm that the tensor has passed.
        normed: What that norm was given.
        segments: The checkpointed segments that the block ran in; see :mod:`solver_plugins.blocks.outlet`.
        broken: The operation that has changed the tensor since; empty for none.
    """

    link: Any
    block: Any = None
    input: Tensor | None = None
    kernel: Tensor | None = None
    norm: nn.Module | None = None
    normed: Tensor | None = None
    segments: tuple[Any, ...] = ()
    broken: str = ""

    def past(self, norm: nn.Module, normed: Tensor) -> "Handed":
        """Returns the mark behind a norm."""
        return Handed(self.link, self.block, self.input, self.kernel, norm, normed, self.segments, self.broken)

    # A tensor that a user copies or saves does not take a part of the model along.
    def __deepcopy__(self, memo: Any) -> "Handed":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Handed, (None,)


def marks_of(tensor: Any) -> tuple[Handed, ...]:
    """Returns the marks of a tensor; those of anything else are none."""
    found: tuple[Handed, ...] = getattr(tensor, _MARKS, ()) if isinstance(tensor, Tensor) else ()
    return found


def put(tensor: Tensor, handed: Handed) -> Tensor:
    """Marks a tensor, in place of a mark of the same link, and returns it."""
    setattr(tensor, _MARKS, (*(one for one in marks_of(tensor) if one.link is not handed.link), handed))
    return tensor


def find(tensor: Tensor, link: Any) -> Handed | None:
    """Returns the mark of a link, if there is one."""
    for one in marks_of(tensor):
        if one.link is link:
            return one
    return None


def take(tensor: Tensor, links: tuple[Link, ...]) -> Handed | None:
    """Returns the mark of one of these links and removes it: no graph outlives its step through a mark."""
    found = [one for one in marks_of(tensor) for link in links if one.link is link]
    if not found:
        return None
    setattr(tensor, _MARKS, tuple(one for one in marks_of(tensor) if one not in found))
    # The sum of two converted layers, of which each waits for this activation, belongs to neither.
    return found[0] if len(found) == 1 else Handed(found[0].link, broken="a sum with another converted layer")


class Carry(TorchFunctionMode):
    """Carries marks through sums, and breaks them at operations that change what a layer has computed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        result = func(*args, **kwargs)
        marks = _marks_among((*args, *kwargs.values()))
        if not marks or name in LINEAR:
            return result
        kept = _keeps_numbers(name, args, kwargs) and result.shape == args[0].shape
        if kept:
            # Of other tensors (x.type_as(y)) only the dtype and the shape are looked at.
            marks = list(marks_of(args[0]))
        summed = name in SUMS and kwargs.get("alpha", 1) == 1
        if summed:
            # What a layer has just computed stays that, whatever is made of its earlier outputs and added to it. A sum
            # of these outputs themselves stays what it is, too: of several calls.
            whole = [one for one in marks if not one.broken or one.broken in SUMS]
            marks = whole + [one for one in marks if one.broken and all(one.link is not other.link for other in whole)]
        results = result if isinstance(result, (tuple, list)) else (result,)
        # An operation in place changes its first argument, whatever becomes of its result.
        if name.endswith("_") and not name.endswith("__") and args:
            results = (*results, args[0])
        for one in results:
            if isinstance(one, Tensor):
                for handed in marks:
                    # The same layer twice in one sum: which of its calls the solver belongs to is not known.
                    once = sum(other.link is handed.link for other in marks) == 1
                    carried = (kept or summed) and once and isinstance(handed.link, Link)
                    why = name if not handed.broken or handed.broken in SUMS else handed.broken
                    put(one, handed if carried else Handed(handed.link, broken=why))
        return result


def _marks_among(values: Iterable[Any]) -> list[Handed]:
    found: list[Handed] = []
    for value in values:
        if isinstance(value, Tensor):
            found.extend(marks_of(value))
        elif isinstance(value, (tuple, list)):
            for one in value:
                found.extend(marks_of(one))
    return found


def _keeps_numbers(name: str, args: Any, kwargs: Any) -> bool:
    """Whether an operation returns the numbers that it was given."""
    if name in ("dropout", "dropout_") and args:
        p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
        return p == 0 or not (args[2] if len(args) > 2 else kwargs.get("training", True))
    return name in SAME_NUMBERS and len(args) > 0 and isinstance(args[0], Tensor)


class Scope(Shell):
    """Mixin in front of the class of a module that holds both ends of links.

    Attributes:
        links: Those whose innermost common module this is.
    """

    links: tuple[Link, ...]

    @classmethod
    def class_for(cls, plain: type[nn.Module]) -> "type[Scope]":
        """Returns the class of a scope. It keeps its name, by which libraries write down what a model is."""

        @functools.wraps(plain.forward)
        def forward(self: Scope, *args: Any, **kwargs: Any) -> Any:
            return self._within(*args, **kwargs)

        return made_class(cls, plain, "", forward=forward, __module__=plain.__module__)

    def _within(self, *args: Any, **kwargs: Any) -> Any:
        forward = super().forward
        if not any(link.carries() for link in self.links):
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            with Carry():
                return self._unmarked(forward(*args, **kwargs))
        here = THREAD
        # A new run knows nothing of one that was broken off, nor of one that it is called by.
        before = {link: here.waiting.pop(link, []) for link in self.links}
        try:
            with carrying():
                return self._unmarked(forward(*args, **kwargs))
        finally:
            here.waiting.update(before)

    def _unmarked(self, result: Any) -> Any:
        """Removes the marks of this scope's links from what it returns: nobody outside of it could take them."""
        for one in result if isinstance(result, (tuple, list)) else (result,):
            if marks_of(one):
                left = tuple(mark for mark in marks_of(one) if all(mark.link is not link for link in self.links))
                setattr(one, _MARKS, left)
        return result


class _Thread(threading.local):
    """What runs in one thread.

    Attributes:
        depth: How many scopes.
        waiting: The calls of layers that have been handed over and that nobody has taken yet, each with the node that
            computed it. A tensor of a reentrant segment gets its node only when the segment ends, so that it is kept
            itself.
        recomputing: The node of a backward pass for which a segment is recomputed; None outside of any.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.waiting: dict[Link, list[tuple[Handed, Any]]] = {}
        self.recomputing: Any = None


THREAD = _Thread()


@contextlib.contextmanager
def carrying() -> Iterator[None]:
    """Carries marks within the context; within another one that one does."""
    here = THREAD
    here.depth += 1
    try:
        with Carry() if here.depth == 1 else contextlib.nullcontext():
            yield
    finally:
        here.depth -= 1


def carried() -> bool:
    """Whether marks are carried here: a scope runs. A compiler can follow this."""
    modes = (torch._C._get_function_stack_at(place) for place in range(torch._C._len_torch_function_stack()))
    return any(isinstance(mode, Carry) for mode in modes)


def open_scope(link: Link) -> None:
    """Makes a link's scope one."""
    scope: Any = link.scope
    if not isinstance(scope, Scope):
        vars(scope).pop("forward", None)
        scope.__class__ = Scope.class_for(type(scope))
        scope.links = ()
    scope.links = (*scope.links, link)
