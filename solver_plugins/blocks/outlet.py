"""The module behind a layer in which the argument of its activation is complete, and in which its solver runs.

It is the norm (linear -> norm -> activation), or the activation after a skip connection. A norm between the layer and
the skip hands the layer's mark on. These modules hold nothing but the links that they serve, so that one that is
replaced (SyncBatchNorm) is simply made again.
"""

import contextlib
from typing import Any, Literal

import torch
from torch import Tensor, nn

from solver_plugins.blocks.fold import check_foldable, normalised
from solver_plugins.blocks.link import Handed, Link, Place, Role, arrived, hand_over, recovered, take
from solver_plugins.blocks.segment import current_segments, left_out, without_graph
from solver_plugins.blocks.shell import Shell, take_off
from solver_plugins.blocks.stepsize import certify_after_loading
from solver_plugins.errors import SolverPluginsError, UnsupportedLayerError
from solver_plugins.prox import Prior, prox_for


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
            if left_out(handed.segments, now) or _lacks_gradients(handed, now):
                raise SolverPluginsError(_without_its_layer(handed.link, recomputed=True))
        return handed

    def _recovered_on_the_way(self, input: Tensor) -> Handed | None:
        """Returns what a tensor without a mark is known to be; what is not known raises where the solver runs."""
        for link in () if torch.compiler.is_compiling() else self.links:
            with contextlib.suppress(LookupError):
                return recovered(link, input)
        return None

    def _recovered(self, input: Tensor) -> Handed | None:
        """Returns what a tensor without a mark is; None where it may be another layer's.

        Raises:
            SolverPluginsError: If neither is known.
        """
        if torch.compiler.is_compiling():
            if self.role != "activation":
                raise SolverPluginsError(_without_its_layer(self.links[0]))
            return None
        for link in self.links:
            if block_at(link) is None:
                raise SolverPluginsError(
                    f"Expected the converted layer at {link.name!r}; found {type(link.layer.module).__name__}, put "
                    "there after the conversion. Call revert_model(model) first, then replace it, then convert."
                )
            try:
                found = recovered(link, input)
                if self.role != "activation":
                    raise LookupError
            except LookupError:
                again = torch._C._current_graph_task_id() != -1
                raise SolverPluginsError(_without_its_layer(link, recomputed=again)) from None
            if found is not None:
                return found
        return None

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
    if without_graph(handed.segments, now) and not (handed.input is not None and handed.input.requires_grad):
        return True
    # The statistics of a batch depend on what the norm was given, which the norm's own segment may have computed.
    batch = handed.normed is not None and getattr(handed.norm, "training", False)
    trained = handed.input is not None and (handed.input.requires_grad or handed.block.weight.requires_grad)
    return bool(batch and trained and handed.normed is not None and not handed.normed.requires_grad)


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
    """Returns the norm that is folded into the linear map.

    Raises:
        UnsupportedLayerError: If there is another module in its place now.
    """
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
    """Opens the ends of a link again where a module was replaced after the conversion.

    Raises:
        UnsupportedLayerError: If what stands there now is not of the kind that was converted.
    """
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
