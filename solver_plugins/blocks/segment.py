"""Which segments of gradient checkpointing the code runs in, so that both ends of a link can be told to be in one.

A segment is run again in the backward pass, by itself. A solver that runs in it, while its layer ran before it, would
then find nothing of its layer, so this is refused in the forward pass already. Where both ends are in the segment, it
is run again in the same context, so that what was known in the first pass is known in the second.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import GeneratorType
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

_REENTRANT = CheckpointFunction.forward.__code__
# Says at once that there is no segment. Where torch lacks it (2.7), the stack is always looked through.
_TOP_HOOKS = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def current_segments() -> tuple[Any, ...]:
    """Returns one object for every checkpointed segment that runs in this thread, the innermost first."""
    if torch.compiler.is_compiling():
        return ()
    hooks = None if _TOP_HOOKS is None else _TOP_HOOKS(True)
    inside = _TOP_HOOKS is None or getattr(hooks and hooks[0], "__qualname__", "").startswith("_checkpoint_hook")
    # A segment of the reentrant kind runs without gradients.
    if not inside and (torch.is_grad_enabled() or torch.is_inference_mode_enabled()):
        return ()
    # The objects themselves, not their ids: what is kept alive cannot be mistaken for a later segment.
    found = []
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code is _REENTRANT:
            # Where nothing is differentiated, nothing is recomputed.
            if any(frame.f_locals["ctx"].needs_input_grad):
                found.append(frame.f_locals["ctx"])
        elif inside and frame.f_code.co_filename == _REENTRANT.co_filename:
            # A segment of the other kind is a generator that waits for the segment's end.
            found.extend(one for one in frame.f_locals.values() if isinstance(one, GeneratorType))
        frame = frame.f_back
    return (hooks[1],) if hooks and inside and not found else tuple(found)


def left_out(segments: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    """Whether what ran in the first segments is left out when the innermost of the present ones is recomputed."""
    return bool(now) and not any(now[0] is one for one in segments)


def without_graph(segments: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    """Whether some of the first segments, of the reentrant kind, have ended: no gradients were recorded in them."""
    ended = [one for one in segments if not any(one is other for other in now)]
    return any(not isinstance(one, GeneratorType) and not callable(one) for one in ended)


@dataclass
class _Again:
    """What a segment runs when it is recomputed, within a context."""

    run: Callable[..., Any]
    context: Callable[[], AbstractContextManager[None]]

    def __call__(self, *args: Any) -> Any:
        with self.context():
            return self.run(*args)


def run_again_within(segments: tuple[Any, ...], context: Callable[[], AbstractContextManager[None]]) -> None:
    """Has those of the segments that still run be recomputed within a context."""
    for segment in segments:
        if isinstance(segment, GeneratorType):
            frame = segment.gi_frame  # None when the segment has ended.
            holder, name = None if frame is None else frame.f_locals.get("new_frame"), "recompute_fn"
        else:
            holder, name = segment, "run_function"
        run = getattr(holder, name, None)
        if run is not None and not isinstance(run, _Again):
            setattr(holder, name, _Again(run, context))
