"""Solvers behind a norm or a skip connection: linear -> norm (-> add) -> activation as one block (appendix J).

The argument of the activation is only known at its end: behind the norm, or in the activation module after a sum. The
solver belongs to the linear layer, like any other, and keeps that layer's input; an *outlet*, the norm or the
activation, hands it the argument when it is known. Outlets hold nothing, so that one that is replaced (SyncBatchNorm)
is simply made again.

A norm over the batch scales the rows of ``A`` by ``d = gamma / sqrt(var + eps)``: batch statistics in training, running
ones in evaluation. ``L`` is certified for a reference diagonal and scaled by ``max_i (d_i / dbar_i)^2``.
"""

import itertools
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from solver_plugins.blocks.fold import check_foldable, diagonal_of, is_frozen, normalised, reference_diagonal
from solver_plugins.blocks.layer import RESERVED, LayerBlock, shell_for, strip
from solver_plugins.blocks.made import Shell, hides_forward, made_class, take_off
from solver_plugins.blocks.stash import Kept, Stash, backward_pass
from solver_plugins.blocks.stepsize import certify_after_loading
from solver_plugins.errors import SolverPluginsError, UnsupportedLayerError
from solver_plugins.operators import operator_from_kernel, reader_for, rescaled_bound
from solver_plugins.prox import Prior, prox_for
from solver_plugins.solve import Constants, Scale, Solver, pose_problem, solve_block, working_dtype

Role = Literal["norm", "norm-activation", "activation"]
_RESERVED = RESERVED | {"diagonal_reference", "role", "outlet", "norm", "stash", "scope"}


@dataclass(frozen=True)
class Partner:
    """Another module of the model, by its place: whatever stands there when it is needed, also after a replacement."""

    parent: nn.Module
    name: str

    @property
    def module(self) -> nn.Module:
        """The module that is there now."""
        found = self.parent._modules[self.name]
        assert found is not None
        return found


@dataclass(frozen=True, eq=False)
class Held:
    """Another module itself, wherever it stands by now (inside of an adapter), without being a part of its holder."""

    module: "ChainBlock"


def partner_of(name: str, modules: dict[str, nn.Module]) -> Partner:
    """Returns the place of the module of this name in a model, given its modules by name."""
    parent, _, child = name.rpartition(".")
    return Partner(modules[parent], child)


def scope_of(names: tuple[str, str], modules: dict[str, nn.Module]) -> nn.Module:
    """Returns the innermost module that holds the modules of both names, given the modules of a model by name."""
    pairs = zip(*(name.split(".")[:-1] for name in names), strict=False)
    return modules[".".join(one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))]


@dataclass(frozen=True, eq=False)
class Around:
    """The innermost module that holds both ends of a chain, without being a part of its holder."""

    module: nn.Module


@dataclass(frozen=True, eq=False)
class Forget:
    """A hook before the module around a chain: a new pass knows nothing of one that was broken off."""

    chain: Held

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Forgets what the chain's layer computed."""
        self.chain.module.stash.keep(None)


class ChainBlock(LayerBlock):
    """Mixin in front of the class of the linear layer at the start of a chain.

    The layer computes what it always did and keeps it; :meth:`finish` solves once the argument is known.

    Attributes:
        role: What the outlet does itself: the "norm" (the activation follows), both ("norm-activation", as timm's
            BatchNormAct2d), or the "activation" (after a norm and a skip).
        outlet: Where the argument is complete.
        norm: The norm, if there is one and it is not the outlet.
        stash: What the layer's last call computed.
        scope: The module in whose passes a shared outlet may be called without the layer; None where an outlet serves
            this layer alone.
    """

    role: Role
    outlet: Partner
    norm: Partner | None
    stash: Stash
    scope: Around | None
    diagonal_reference: Tensor

    @classmethod
    def class_for(cls, plain: type[nn.Module]) -> "type[ChainBlock]":
        """Returns the class of a layer of this kind at the start of a chain."""
        return made_class(cls, plain, "Chained", kernel_reader=staticmethod(reader_for(plain)))

    def folded_norm(self) -> nn.Module | None:
        """Returns the norm that is folded into the linear map."""
        place = self.norm if self.role == "activation" else self.outlet
        if place is None:
            return None
        norm = place.module
        if not isinstance(norm, _BatchNorm) and not is_frozen(norm):
            raise UnsupportedLayerError(
                f"Expected the BatchNorm that was folded into a solver at {place.name!r}; found {type(norm).__name__}, "
                "put there after the conversion. Call revert_model(model) first, then replace the norm, then convert."
            )
        return norm

    def _reference(self) -> Tensor | None:
        return None if self.folded_norm() is None else self.diagonal_reference

    def _new_reference(self, kernel: Tensor) -> dict[str, Tensor]:
        norm = self.folded_norm()
        if norm is None:
            return {}
        return {"diagonal_reference": reference_diagonal(norm, working_dtype(kernel.dtype))}

    def forward(self, input: Tensor) -> Tensor:
        """Returns the layer's output."""
        self._find_outlet()
        input = self._own_input(input)
        if parametrize.is_parametrized(self):
            # Some parametrisations change with every look (spectral_norm in training): look once.
            with parametrize.cached():
                output, kernel = super().forward(input), self._kernel()
        else:
            output, kernel = super().forward(input), self._kernel()
        node = None if torch.compiler.is_compiling() else output.grad_fn
        self.stash.keep(Kept(input, output, kernel, backward_pass(), node))
        return output

    def _find_outlet(self) -> None:
        """Makes the outlet again where the module in its place was replaced after the conversion."""
        outlet = self.outlet.module
        if isinstance(outlet, Outlet):
            return
        if torch.compiler.is_compiling():
            raise SolverPluginsError(
                f"A {type(outlet).__name__} was put in the place of a converted module. Run one forward pass, or call "
                "refresh_steps(model), before the model is compiled."
            )
        if self.role == "activation":
            self._check_activation(outlet)
        else:
            self.folded_norm()
        install_outlet(self.outlet, self.role).chained = (Held(self),)

    def _check_activation(self, found: nn.Module) -> None:
        """Raises UnsupportedLayerError for an activation in the place of another one that the solver does not know."""
        try:
            prior = prox_for(found)
        except SolverPluginsError:
            prior = None
        if prior is None or (prior != self.prior and not (prior.learnable and type(prior) is type(self.prior))):
            raise UnsupportedLayerError(
                f"Expected the activation of {self.prior!r} at {self.outlet.name!r}; found {type(found).__name__}, put "
                "there after the conversion. Call revert_model(model) first, then replace it, then convert."
            )

    def compute_step(self, method: str = "certified", tolerance: float = 0.1) -> dict[str, Tensor]:
        if "outlet" in vars(self):
            self._find_outlet()
        return super().compute_step(method, tolerance)

    def finish(self, argument: Tensor, normed: Tensor | None = None) -> Tensor | None:
        """Returns the solver's argument in place of the plain one, or None if the layer has not been called.

        Args:
            argument: What the activation would get.
            normed: What the outlet, a norm, was given: the layer's output, and what others (adapters) added to it.
        """
        call = self.stash.take()
        if call is None or not call.leads_to(argument):
            return None
        u, y, kernel = call.input, call.output, call.kernel
        if not torch.compiler.is_compiling() and hasattr(self, "unshard") and kernel.untyped_storage().size() == 0:
            raise SolverPluginsError(
                f"The weight of this {type(self).__name__} was sharded again before the norm or activation behind it "
                "ran. Shard layer and norm as one unit: fully_shard the module that holds both, or pass "
                "reshard_after_forward=False."
            )
        norm = self.folded_norm()
        constant = self._current_L(kernel) if self.solver.needs_constant else self.L
        diagonal = None
        if norm is not None:
            diagonal = diagonal_of(norm, y if normed is None else normed, constant.dtype)
            constant = rescaled_bound(constant, diagonal.detach(), self.diagonal_reference)
        operator = operator_from_kernel(kernel, self.geometry, u.shape, diagonal=diagonal)
        additive = argument - operator.apply(u) if self.solver.samples == "inputs" else None
        constants = Constants(
            constant,
            gram=self.gram,
            collapsed=self.collapsed,
            residual=self.residual if self.solver.implicit else None,
        )
        problem = pose_problem(self.solver, self.prior, operator, u, constants, lambda: argument, additive=additive)
        problem.known, problem.result = True, argument.dtype
        scale = Scale(self.channel_gain, self.channel_shift, self.blend, self.observer)
        return solve_block(problem, self.solver, constants, scale, training=self.training)[0]


class Outlet(Shell):
    """Mixin in front of the class of a norm or activation in which the argument of a chain is complete.

    Attributes:
        role: See :class:`ChainBlock`.
        chained: The linear layers that it serves: several for an activation module that is shared.
        shared: Whether it is also called for no chain at all.
    """

    role: Role
    chained: tuple[Held, ...]
    shared: bool

    @classmethod
    def class_for(cls, plain: type[nn.Module]) -> "type[Outlet]":
        """Returns the class of an outlet of this kind."""
        return made_class(cls, plain, "Outlet")

    def forward(self, input: Tensor) -> Tensor:
        """Returns what the module returned, with the solver's argument in place of the activation's."""
        if self.role == "activation":
            return super().forward(self._finished(input))
        if self.role == "norm":
            return self._finished(super().forward(input), input)
        inner: Any = self
        return inner.act(inner.drop(self._finished(normalised(inner, input), input)))

    def _finished(self, argument: Tensor, normed: Tensor | None = None) -> Tensor:
        for held in self.chained:
            found = held.module.finish(argument, normed)
            if found is not None:
                return found
        if self.shared:
            # A call on behalf of another layer: none of the chains has begun.
            return argument
        raise SolverPluginsError(
            "A solver behind a norm or a skip ran without its linear layer: expected that layer to be called just "
            "before, in the same forward pass. Was the norm or activation alone recomputed by gradient checkpointing? "
            "Checkpoint the module that holds both."
        )


def install_chain(
    layer: nn.Module,
    outlet: Partner,
    role: Role,
    norm: Partner | None,
    prior: Prior,
    solver: Solver,
    shared: bool = False,
    scope: nn.Module | None = None,
) -> ChainBlock:
    """Turns the layer at the start of a chain into a solver where it stands, and opens its outlet.

    Args:
        layer: The linear layer.
        outlet: The module in which the argument is complete.
        role: What that module does.
        norm: The norm, where it is not the outlet.
        prior: Whose proximal map the activation is.
        solver: How to solve.
        shared: Whether the outlet is also called for no chain at all.
        scope: The innermost module that holds both (see :func:`scope_of`): its pass starts with nothing computed.

    Raises:
        SolverPluginsError: If it cannot be one; both modules are as they were then.
    """
    host = outlet.module
    check_foldable(host if role != "activation" else None if norm is None else norm.module)
    if isinstance(host, LayerBlock) or hides_forward(host):
        raise UnsupportedLayerError(
            f"This {type(host).__name__} is a solver or has a forward of its own on the instance already."
        )
    layer.__class__ = shell_for(layer, ChainBlock, _RESERVED)
    block: ChainBlock = layer  # type: ignore[assignment]
    try:
        block.role, block.outlet, block.norm, block.stash = role, outlet, norm, Stash()
        block.scope = Around(scope) if scope is not None and shared else None
        if block.scope is not None:
            block.scope.module.register_forward_pre_hook(Forget(Held(block)))
        opened = install_outlet(outlet, role)
        opened.chained, opened.shared = (*opened.chained, Held(block)), opened.shared or shared
        block._set_up_solver(prior, solver, "argument")
    except BaseException:
        remove_chain(block)
        raise
    return block


def install_outlet(place: Partner, role: Role) -> Outlet:
    """Opens an outlet where a module stands."""
    module = place.module
    if not isinstance(module, Outlet):
        vars(module).pop("forward", None)
        module.__class__ = Outlet.class_for(type(module))
        made: Outlet = module  # type: ignore[assignment]
        made.role, made.chained, made.shared = role, (), False
        made.register_load_state_dict_post_hook(_certify_chains)
        return made
    return module


def _certify_chains(module: nn.Module, incompatible_keys: Any) -> None:
    # The layer loads before its norm, so its constant may belong to the norm's old scales.
    assert isinstance(module, Outlet)
    for held in module.chained:
        if held.module.L.is_meta:
            certify_after_loading(held.module)
        else:
            held.module.certify_if_moved()


def remove_chain(block: ChainBlock) -> nn.Module:
    """Makes the linear layer and its outlet plain again, where they stand."""
    outlet = block.outlet.module
    if isinstance(outlet, Outlet):
        for name in ("role", "chained", "shared"):
            delattr(outlet, name)
        hooks = outlet._load_state_dict_post_hooks
        for key in [key for key, hook in hooks.items() if hook is _certify_chains]:
            del hooks[key]
        take_off(outlet)
    scope = vars(block).get("scope")
    if scope is not None:
        before = scope.module._forward_pre_hooks
        for key in [key for key, hook in before.items() if isinstance(hook, Forget) and hook.chain.module is block]:
            del before[key]
    return strip(block, _RESERVED)
