"""The module behind a layer in which the argument of its activation is complete, and in which its solver runs.

It is the norm (linear -> norm -> activation), or the activation after a skip connection. A norm between the layer and
the skip hands the layer's mark on. These modules hold nothing but the links that they serve, so that one that is
replaced (SyncBatchNorm) is simply made again.

A segment of gradient checkpointing is run again in the backward pass, by itself. A solver that runs in it, while its
layer ran before it, would then find nothing of its layer, so the forward pass refuses this already. Where both are in
the segment, it is run again in the same context, so that the second pass knows what the first one knew.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import GeneratorType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from solver_plugins.blocks.fold import check_foldable, normalised
from solver_plugins.blocks.link import THREAD, Handed, Link, Place, Role, carried, carrying, put, take
from solver_plugins.blocks.shell import Shell, take_off
from solver_plugins.blocks.stepsize import certify_after_loading
from solver_plugins.errors import SolverPluginsError, UnsupportedLayerError
from solver_plugins.prox import Prior, prox_for

_REENTRANT = CheckpointFunction.forward.__code__
# Says at once that there is no segment. Where torch lacks it (2.7), the stack is always looked through.
_TOP_HOOKS = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


class Outlet(Shell):
    """Mixin in front of the class of a norm or activation on a link.

    Attributes:
        role: What the module does itself; "passing" for a norm on the way to an outlet.
        links: The links that end here: several for an activation module that is shared.
    """

    prefix = "Outlet"
    role: Role | Literal["passing"]
    links: tuple[Link, ...]

    def forward(self, input: Tensor) -> Tensor:
        """Returns what the module returned, with the solver's argument in place of the activation's."""
        if self.role == "activation":
            handed = self._taken(input)
            return super().forward(input if handed is None else handed.block.solve_behind(handed, input))
        if self.role == "passing":
            handed = take(input, self.links) or self._recovered_on_the_way(input)
            output: Tensor = super().forward(input)
            return output if handed is None else hand_over(output, handed.past(self, input), handed)
        handed = self._taken(input)
        assert handed is not None
        handed = handed.past(self, input)
        if self.role == "norm":
            return handed.block.solve_behind(handed, super().forward(input))
        inner: Any = self
        return inner.act(inner.drop(handed.block.solve_behind(handed, normalised(inner, input))))

    def _taken(self, input: Tensor) -> Handed | None:
        """Returns what a layer handed over; None where the data is not that of a converted layer."""
        handed = take(input, self.links)
        if handed is None:
            handed = self._recovered(input)
        if handed is None:
            return None
        if handed.broken:
            raise SolverPluginsError(
                f"Between {handed.link.name!r} and the norm or activation in which its solver runs, {handed.broken} "
                f"changed what the layer returned. Expected nothing but sums there. Convert again with "
                f"exclude=[{handed.link.name!r}], or without what was put in between."
            )
        if not torch.compiler.is_compiling():
            arrived(handed)
            now = current_segments()
            # What ran outside of the innermost segment is left out when that is recomputed.
            left_out = bool(now) and not any(now[0] is one for one in handed.segments)
            if left_out or _lacks_gradients(handed, now):
                raise SolverPluginsError(_without_its_layer(handed.link, recomputed=True))
        return handed

    def _recovered_on_the_way(self, input: Tensor) -> Handed | None:
        """Returns what a tensor without a mark is known to be; what is not known raises where the solver runs."""
        for link in () if torch.compiler.is_compiling() else self.links:
            with contextlib.suppress(LookupError):
                return recovered(link, input)
        return None

    def _recovered(self, input: Tensor) -> Handed | None:
        """Returns what a tensor without a mark is; None where it may be another layer's. Raises if neither is known."""
        compiling, after_sum = torch.compiler.is_compiling(), self.role == "activation"
        if compiling and after_sum:
            if not carried():
                self._refuse_compiled()
            return None
        for link in self.links:
            if not compiling and block_at(link) is None:
                raise SolverPluginsError(
                    f"Expected the converted layer at {link.name!r}; found {type(link.layer.module).__name__}, put "
                    "there after the conversion. Call revert_model(model) first, then replace it, then convert."
                )
            try:
                found = recovered(link, input) if after_sum else None
            except LookupError:
                after_sum = False
            if not after_sum:
                again = not compiling and torch._C._current_graph_task_id() != -1
                raise SolverPluginsError(_without_its_layer(link, recomputed=again))
            if found is not None:
                return found
        return None

    @torch.compiler.assume_constant_result
    def _refuse_compiled(self) -> bool:
        """Raises while a compiler traces, which must not leave this to eager code: that knows as little here."""
        raise SolverPluginsError(_without_its_layer(self.links[0]))

    def extra_repr(self) -> str:
        """Returns the module's own line, and whose solver runs here."""
        layers = ", ".join(link.name for link in self.links)
        what = "folded into" if self.role == "passing" else "solves for"
        own = super().extra_repr()
        return f"{own}, {what} {layers}" if own else f"{what} {layers}"


def _lacks_gradients(handed: Handed, now: tuple[Any, ...]) -> bool:
    """Whether gradients cannot pass through what was handed over: it was computed in a reentrant segment, without any.

    What such a segment was given has its graph. What was computed in it has none until it is recomputed.
    """
    if not torch.is_grad_enabled():
        return False
    u, normed = handed.input, handed.normed
    reached = u is not None and u.requires_grad
    # Segments of the reentrant kind that have ended: no gradients were recorded in them.
    ended = [one for one in handed.segments if not any(one is other for other in now)]
    if not reached and any(not isinstance(one, GeneratorType) and not callable(one) for one in ended):
        return True
    # The statistics of a batch depend on what the norm was given, which the norm's own segment may have computed.
    batch = normed is not None and not normed.requires_grad and getattr(handed.norm, "training", False)
    return batch and u is not None and (reached or handed.block.weight.requires_grad)


def _without_its_layer(link: Link, recomputed: bool = False) -> str:
    """Says what is wrong where a solver runs without its layer."""
    scope = type(link.scope).__name__
    if recomputed:
        return (
            f"The norm or activation behind {link.name!r} is recomputed by gradient checkpointing without that layer, "
            f"so its solver could not run. Checkpoint the module that holds both (the {scope}), or a larger one."
        )
    where, between = "a skip connection", ""
    if link.role != "activation":
        where, between = "a norm", "Code between the two, a sum as well, is followed in adapters alone. "
    return (
        f"The solver of {link.name!r} runs behind {where}, and got a tensor of which it is not known that "
        f"{link.name!r} computed it. Call the model, or the {scope} that holds both, and not their parts. {between}"
        "Shard a layer and the norm behind it as one unit. Forward hooks in between must not replace what the layer "
        "returns, and a scripted function or a custom autograd function hides what it does: leave that layer out with "
        f"exclude=[{link.name!r}]."
    )


def block_at(link: Link) -> nn.Module | None:
    """Returns the converted layer of a link: at its place, or inside of what stands there (an adapter)."""
    found = link.layer.module
    for module in (found, *found.modules()):
        if getattr(module, "link", None) is link and isinstance(module, Shell):
            return module
    return None


def _end_at(place: Place, link: Link) -> Outlet | None:
    """Returns the outlet at a place, or inside of what stands there (PEFT's modules_to_save)."""
    found = place.module
    if isinstance(found, Outlet):
        return found
    return next((one for one in found.modules() if isinstance(one, Outlet) and link in one.links), None)


def folded_norm(link: Link) -> nn.Module | None:
    """Returns the norm that is folded into the linear map; UnsupportedLayerError if another module is there now."""
    place = link.norm if link.role == "activation" else link.outlet
    if place is None:
        return None
    norm = _end_at(place, link) or place.module
    try:
        check_foldable(norm)
    except UnsupportedLayerError:
        raise UnsupportedLayerError(
            f"Expected the BatchNorm that was folded into the solver of {link.name!r} at {place.name!r}; found "
            f"{type(norm).__name__}, put there after the conversion. Call revert_model(model) first, then replace the "
            "norm, then convert."
        ) from None
    return norm


def open_ends(link: Link) -> None:
    """Makes the module at the end of a link an outlet, and a norm on the way one that hands on what it gets."""
    _open(link.outlet, link.role, link)
    if link.norm is not None:
        _open(link.norm, "passing", link)


def repair_ends(link: Link, prior: Prior) -> None:
    """Opens the ends of a link again where a module of the converted kind was put in after the conversion."""
    outlet, norm = _end_at(link.outlet, link), None if link.norm is None else _end_at(link.norm, link)
    if outlet is not None and (link.norm is None or norm is not None):
        return
    found = (link.outlet if outlet is None or link.norm is None else link.norm).module
    if torch.compiler.is_compiling():
        raise SolverPluginsError(
            f"A {type(found).__name__} was put in the place of a converted module. Run one forward pass, or call "
            "refresh_steps(model), before the model is compiled."
        )
    folded_norm(link)
    if link.role == "activation" and outlet is None:
        _check_activation(found, link, prior)
    if outlet is None:
        _open(link.outlet, link.role, link)
    if link.norm is not None and norm is None:
        _open(link.norm, "passing", link)


def _check_activation(found: nn.Module, link: Link, prior: Prior) -> None:
    """Raises UnsupportedLayerError for an activation that the solver does not know."""
    try:
        other = prox_for(found)
    except SolverPluginsError:
        other = None
    if other is None or (other != prior and not (other.learnable and type(other) is type(prior))):
        raise UnsupportedLayerError(
            f"Expected the activation of {prior!r} at {link.outlet.name!r}; found {type(found).__name__}, put there "
            "after the conversion. Call revert_model(model) first, then replace it, then convert."
        )


def _open(place: Place, role: Role | Literal["passing"], link: Link) -> None:
    module = place.module
    if not isinstance(module, Outlet):
        vars(module).pop("forward", None)
        module.__class__ = Outlet.class_for(type(module))
        made: Outlet = module  # type: ignore[assignment]
        made.role, made.links = role, ()
        made.register_load_state_dict_post_hook(_certify_links)
        module = made
    if link not in module.links:
        module.links = (*module.links, link)


def _certify_links(module: nn.Module, incompatible_keys: Any) -> None:
    # The layer loads before its norm, so its constant may belong to the norm's old scales.
    assert isinstance(module, Outlet)
    for link in module.links:
        block: Any = block_at(link)
        if block is None:
            continue
        if block.L.is_meta:
            certify_after_loading(block)
        else:
            block.certify_if_moved()


def close(outlet: Outlet) -> None:
    """Makes an outlet the plain module again, where it stands."""
    del outlet.role, outlet.links
    hooks = outlet._load_state_dict_post_hooks
    for key in [key for key, hook in hooks.items() if hook is _certify_links]:
        del hooks[key]
    take_off(outlet)


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


@contextlib.contextmanager
def _again() -> Iterator[None]:
    """What a recomputed segment runs in: marks are carried as they were in the first pass."""
    here = THREAD
    before, here.waiting = here.waiting, {}
    try:
        with carrying():
            yield
    finally:
        here.waiting = before


def hand_over(tensor: Tensor, handed: Handed, before: Handed | None = None) -> Tensor:
    """Marks what a layer hands to where its solver runs, and waits for its arrival.

    ``before`` is what was handed to a norm on the way.
    """
    link = handed.link
    if not torch.compiler.is_compiling():
        if link.carries():
            run_again_within(handed.segments, _again)
        if link.role == "activation":
            here, node = THREAD, torch._C._current_autograd_node()
            if here.recomputing is not node:
                # What another recomputed segment has left belongs to nobody, and would keep its graph alive.
                here.recomputing = node
                here.waiting.clear()
            if before is not None:
                arrived(before)
            calls = here.waiting.setdefault(link, [])
            calls.append((handed, tensor.grad_fn or (tensor if handed.segments else None)))
    elif link.carries() and not carried():
        # Where the compiler may break its graph, it leaves this call to eager code, which waits for the arrival.
        raise SolverPluginsError(_without_its_layer(link))
    return put(tensor, handed)


def arrived(handed: Handed) -> None:
    """Takes note that what was handed over has been taken."""
    waiting = THREAD.waiting
    waiting[handed.link] = [call for call in waiting.get(handed.link, []) if call[0] is not handed]


def recovered(link: Link, tensor: Tensor) -> Handed | None:
    """Returns what a tensor without a mark is known to be by its graph of gradients: a sum with what was handed over.

    LookupError if the tensor may come from what was handed over in another way.
    """
    calls = [(one, node.grad_fn if isinstance(node, Tensor) else node) for one, node in THREAD.waiting.get(link, [])]
    summed = _reached(tensor, calls, sums_only=True)
    if len(summed) == 1:
        return summed[0]
    if summed or any(node is None for _, node in calls) or _reached(tensor, calls, sums_only=False):
        raise LookupError
    return None


def _reached(tensor: Tensor, calls: list[tuple[Handed, Any]], sums_only: bool) -> list[Handed]:
    """Returns the calls from which a tensor was computed: the last ones on every way back."""
    found: list[Handed] = []
    level: set[Any] = {tensor.grad_fn} - {None}
    seen: set[Any] = set()
    while calls and level:
        seen |= level
        here = [(handed, node) for handed, node in calls if node in level]
        found += [handed for handed, _ in here]
        level -= {node for _, node in here}
        through = [one for one in level if not sums_only or one.name() == "AddBackward0"]
        level = {after for one in through for after, _ in one.next_functions} - seen - {None}
    return found
