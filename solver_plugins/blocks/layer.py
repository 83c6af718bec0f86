"""What every solver block has: a linear layer that is read as a kernel, a prior, a solver, and a scale."""

import numbers
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from solver_plugins.blocks.made import hides_forward, take_off
from solver_plugins.blocks.passthrough import undropped
from solver_plugins.blocks.stepsize import STEP_BUFFERS, TrackedStep
from solver_plugins.errors import OptionError, UnsupportedLayerError
from solver_plugins.operators import Geometry, at_rest, autocast_off, read_layer
from solver_plugins.prox import Prior
from solver_plugins.solve import Collapsed, Observer, Solver, check_combination, check_rank

_OWN = {"residual", "geometry", "solver", "prior", "channel_gain", "channel_shift", "blend", "routed", "observer"}
RESERVED = {*STEP_BUFFERS, *_OWN, "gram", "collapsed"}


def check_blend(blend: Any) -> None:
    """Raises OptionError for a blend that is no number in [0, 1]."""
    number = isinstance(blend, numbers.Real) and not isinstance(blend, bool)
    if not number or not 0 <= blend <= 1:
        raise OptionError(f"Expected a blend in [0, 1]; found {blend!r}.")


class LayerBlock(TrackedStep):
    """Mixin in front of a linear layer's class.

    Attributes:
        solver: How it solves.
        prior: Whose proximal map the activation is.
        channel_gain: One factor per output feature on the solver's argument, from :func:`solver_plugins.calibrate`;
            None for ones.
        channel_shift: What is added to that, one number per output feature; None for zeros.
        blend: ``a`` in ``(1 - a) v_1 + a v_K``, between the first iterate and the last; None for one.
        gram: ``A A^T`` for evaluation, from :meth:`cache_gram`; None where it is computed, or not used, in every solve.
        collapsed: The affine map of a block without a prior, kept in evaluation.
        routed: Whether the layer's dropout also serves others: it stays live, and this block undoes it on its input.
        observer: Looks at solves while a model is calibrated.
    """

    kernel_reader: "ClassVar[staticmethod[[nn.Module], tuple[Tensor, Geometry]]]"

    weight: Tensor
    bias: Any
    solver: Solver
    prior: Prior
    residual: Tensor
    channel_gain: Tensor | None
    channel_shift: Tensor | None
    blend: Tensor | None
    gram: Tensor | None
    collapsed: Collapsed
    routed: bool
    observer: Observer | None

    def _set_up_solver(self, prior: Prior, solver: Solver, output: str) -> None:
        with at_rest(self):
            kernel, geometry = type(self).kernel_reader(self)
        check_combination(solver, prior, output, kernel.shape[0], kernel.shape[1] * geometry.groups, geometry)
        check_rank(solver, prior, kernel)
        self.geometry, self.solver, self.prior = geometry, solver, prior
        self.routed, self.observer = False, None
        self.register_buffer("channel_gain", None, persistent=False)
        self.register_buffer("channel_shift", None, persistent=False)
        self.register_buffer("blend", None, persistent=False)
        self.register_buffer("gram", None, persistent=False)
        self.collapsed = Collapsed()
        for name, value in self._new_reference(kernel).items():
            self.register_buffer(name, value, persistent=False)
        self._register_step(kernel)
        if solver.implicit:
            self.register_buffer("residual", torch.zeros_like(self.L), persistent=False)

    def _kernel(self) -> Tensor:
        return type(self).kernel_reader(self)[0]

    def cache_gram(self) -> bool:
        """Computes ``A A^T`` once, for evaluation; returns whether that is of use to this block.

        It is where ``A`` is a matrix with fewer than twice as many outputs as inputs, and the solver takes full
        gradients in evaluation and may choose its path. The matrix is dropped by ``train()``, by loading, by a
        refreshed step, and when the block moves to another device or dtype. Where gradients of the weight are recorded
        it is not used. On an accelerator nothing notices weights that are written to in evaluation: call it again.

        Raises:
            OptionError: If the block is in training mode, where its weights move.
        """
        if self.training:
            raise OptionError("A Gram matrix is kept in evaluation only; call eval() first.")
        kernel = self._kernel_at_rest().detach()
        useful = (
            kernel.dim() == 2
            and self._new_reference(kernel) == {}
            and kernel.shape[0] < 2 * kernel.shape[1]
            and self.solver.config.iters > 1
            and self.solver.path in ("auto", "gram", "masked", "columns")
            and not (self.solver.samples == "inputs" and self.solver.samples_in_evaluation)
            and self._in_reach(kernel)
        )
        if useful:
            matrix = kernel.to(self.L.dtype)
            with torch.no_grad(), autocast_off(kernel.device):
                self.gram = matrix @ matrix.t()
        return useful

    def _own_input(self, input: Tensor) -> Tensor:
        return undropped(input) if self.routed and self.training and self.solver.samples == "inputs" else input

    def set_scale(self, gain: Tensor | None, shift: Tensor | None = None) -> None:
        """Sets factors on the solver's argument and what is added to it; None for ones, and for zeros.

        Raises:
            OptionError: If there is not one finite number per output feature.
        """
        count = self._kernel_at_rest().shape[0]
        for name, row in (("gains", gain), ("shifts", shift)):
            if row is not None and (row.shape != (count,) or not bool(torch.isfinite(row).all())):
                raise OptionError(f"Expected {count} finite {name}, one per output feature; found {tuple(row.shape)}.")
        self.channel_gain = None if gain is None else gain.detach().to(self.L)
        self.channel_shift = None if shift is None else shift.detach().to(self.L)

    def set_blend(self, blend: float) -> None:
        """Sets how much of the solver there is: 0 is the original layer, 1 the solver.

        Raises:
            OptionError: If it is not in [0, 1].
        """
        check_blend(blend)
        if self.blend is not None and not self.blend.is_meta:
            # In place: a compiled graph holds this buffer, and a schedule may change it at every step.
            self.blend.fill_(blend)
        else:
            self.blend = None if blend == 1 else torch.full_like(self.L, blend)

    def extra_repr(self) -> str:
        """Returns the layer's own line, with activation and solver."""
        return f"{super().extra_repr()}, activation={self.prior!r}, solver={self.solver!r}"


def shell_for(layer: nn.Module, kind: type[LayerBlock], reserved: set[str]) -> type[LayerBlock]:
    """Returns the class that turns a layer into a block of this kind, after all checks that need only the layer.

    Raises:
        UnsupportedLayerError: If the layer cannot become one.
    """
    if not isinstance(layer, nn.Module):
        raise UnsupportedLayerError(f"Expected a layer (a torch.nn.Module); found {type(layer).__name__}.")
    if isinstance(layer, LayerBlock):
        raise UnsupportedLayerError(
            f"{type(layer).__name__} is a solver block already; make the new one from the plain layer."
        )
    if hides_forward(layer) or getattr(layer, "_compiled_call_impl", None) is not None:
        raise UnsupportedLayerError(
            f"This {type(layer).__name__} has a forward of its own on the instance, which would hide the solver: an "
            "accelerate hook (remove it with accelerate.hooks.remove_hook_from_module), or the result of "
            "layer.compile() (make the block from a plain layer, then compile the block)."
        )
    taken = sorted(
        reserved & (vars(layer).keys() | layer._parameters.keys() | layer._buffers.keys() | layer._modules.keys())
    )
    if taken:
        raise UnsupportedLayerError(
            f"A solver block needs the names {', '.join(sorted(reserved))} for itself; this {type(layer).__name__} "
            f"has {', '.join(taken)}."
        )
    parametrized = parametrize.is_parametrized(layer)
    made: Any = kind.class_for(type(layer).__bases__[0] if parametrized else type(layer))
    if not issubclass(made, kind):
        raise UnsupportedLayerError(
            f"{kind.__name__} is made from a layer of its own kind; found {type(layer).__name__}."
        )
    read_layer(layer)
    vars(layer).pop("forward", None)
    if parametrized:
        # torch reads a parametrised weight through properties of a class made for this one layer.
        members = {**vars(type(layer)), "plain_class": type(layer)}
        made = type(f"Parametrized{made.__name__}", (made,), members)
    return made


def strip(block: LayerBlock, reserved: set[str]) -> nn.Module:
    """Turns a block into its plain layer again, where it stands."""
    for name in reserved:
        if name in vars(block) or name in block._buffers or name in block._modules:
            delattr(block, name)
    block._forget_step()
    return take_off(block)
