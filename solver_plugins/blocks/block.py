"""The shell that turns a layer into a solver block without ceasing to be that layer."""

import contextlib
import copy
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from solver_plugins.blocks.dropout import mark_as_drawn, undropped
from solver_plugins.blocks.fold import diagonal_of, reference_diagonal, uses_batch
from solver_plugins.blocks.gate import GATE, SCALE_BUFFERS, Gated
from solver_plugins.blocks.link import Handed, Link
from solver_plugins.blocks.outlet import current_segments, folded_norm, hand_over, repair_ends
from solver_plugins.blocks.shell import hides_forward, made_class, refuse_tracing, take_off
from solver_plugins.blocks.stepsize import STEP_BUFFERS
from solver_plugins.errors import OptionError, SolverPluginsError, UnsupportedLayerError
from solver_plugins.operators import (
    LinearOperator,
    at_rest,
    autocast_off,
    operator_from_kernel,
    read_layer,
    reader_for,
)
from solver_plugins.prox import prox_for
from solver_plugins.registry import DEFAULT_SOLVER
from solver_plugins.solve import (
    Activation,
    Collapsed,
    Constants,
    Diagnostics,
    OutputKind,
    Path,
    Solver,
    check_combination,
    check_rank,
    fresh_gram,
    make_solver,
    pose_problem,
    solve_block,
    working_dtype,
)
from solver_plugins.wrappers import COMPILED_IN_PLACE, wrapper_of

_STATE = {"geometry", "solver", "prior", "link", "routed", "observer", "output", "activation", "collapsed", "gate_kind"}
_BUFFERS = {*SCALE_BUFFERS, "residual", "gram", "diagonal_reference"}
RESERVED = {*STEP_BUFFERS, *_STATE, *_BUFFERS, GATE}
"""Names that a block needs for itself on its layer."""

_NAMED: dict[type[nn.Module], "type[SolverBlock]"] = {}


class SolverBlock(Gated):
    """A layer that runs a solver: its output is the argument of the last proximal map.

    The block *is* its layer: the same class (``isinstance``), the same Parameter objects, state-dict keys, hooks and
    flags. With ``output="argument"`` (default) ``activation(block(x))`` is the solver's result, and at one iteration
    ``block(x)`` is the plain layer's output; the activation stays where it is. With ``output="value"`` the block
    applies the activation itself.

    With a norm or a skip (appendix J) the argument is complete only at the end of a
    :class:`~solver_plugins.blocks.link.Link`: the module there calls :meth:`solve_behind`.

    Step sizes stay up to date by themselves; see :mod:`solver_plugins.blocks.stepsize`.

    Attributes:
        solver: How it solves.
        prior: The prior whose proximal map the activation is.
        link: The way to the norm or activation behind which it solves; None where it solves at once.
        output: "argument" of the activation, or its "value".
        gram: ``A A^T`` for evaluation, from :meth:`cache_gram`; None where it is computed, or not used, in every solve.
        collapsed: The affine map of a block without a prior, kept in evaluation.
        diagonal_reference: The folded norm's diagonal that ``L`` is certified for.
        routed: Whether the layer's dropout also serves others: it stays live, and this block undoes it on its input.
    """

    weight: Tensor
    bias: Any
    link: Link | None
    output: OutputKind
    residual: Tensor
    gram: Tensor | None
    collapsed: Collapsed
    diagonal_reference: Tensor
    routed: bool

    def __init_subclass__(cls, layer_class: type[nn.Module] | None = None, **keywords: Any):
        """Declares the plain class that a block class stands for, and how its weights are read."""
        super().__init_subclass__(**keywords)
        if layer_class is not None:
            cls.plain_class = layer_class
            cls.kernel_reader = staticmethod(reader_for(layer_class))
            _NAMED[layer_class] = cls

    @classmethod
    def class_for(cls, plain: type[nn.Module]) -> "type[SolverBlock]":
        """Returns the class of the block that a layer of this class becomes: always a subclass of it.

        torch's own layers have named classes; for a subclass of them, or another library's layer, one is made.
        """
        if plain in _NAMED:
            return _NAMED[plain]
        shell = next((_NAMED[base] for base in plain.__mro__ if base in _NAMED), SolverBlock)
        return made_class(shell, plain, "Solver", kernel_reader=staticmethod(reader_for(plain)))

    @classmethod
    def restored_class(cls, plain: type[nn.Module]) -> "type[SolverBlock]":
        """Returns the class of a layer that was turned into a block where it stood."""
        return _installed(cls) if _NAMED.get(plain) is cls else cls.class_for(plain)

    @classmethod
    def from_layer(
        cls,
        layer: nn.Module,
        activation: Activation = None,
        solver: str | Solver = DEFAULT_SOLVER,
        iters: int | None = None,
        *,
        output: OutputKind = "argument",
        **options: Any,
    ) -> Self:
        """Makes a block out of a layer, around the very same Parameters.

        Args:
            layer: The layer; it is left as it is and shares its Parameters with the block.
            activation: What follows the layer: a module, a function, a prior or a prior's name; None is the identity.
            solver: A registered name (see :func:`solver_plugins.list_solvers`), or a ready solver.
            iters: How many proximal steps (10 by default).
            output: "argument" of the activation (default), or its "value".
            **options: Options of the solver (``p``, ``lam``, ``formulation``, ...); an unknown one raises.
        """
        made = shell_for(layer, cls)
        block: Any = made.__new__(made)
        nn.Module.__init__(block)
        for name, value in vars(layer).items():
            # Containers of parameters, buffers, submodules and hooks become the block's own; their contents are shared.
            block.__dict__[name] = copy.copy(value) if isinstance(value, (dict, set, list)) else value
        block._set_up(activation, make_solver(solver, iters, options), output)
        return block

    def _set_up(
        self, activation: Activation, solver: Solver, output: OutputKind = "argument", link: Link | None = None
    ) -> None:
        prior = prox_for(activation)
        with at_rest(self):
            kernel, geometry = type(self).kernel_reader(self)
        check_combination(solver, prior, output, kernel.shape[0], kernel.shape[1] * geometry.groups, geometry)
        check_rank(solver, prior, kernel)
        self.geometry, self.solver, self.prior, self.output, self.link = geometry, solver, prior, output, link
        self.routed, self.observer, self.collapsed, self.gate_kind = False, None, Collapsed(), None
        if output == "value" and isinstance(activation, nn.Module):
            # The block applies it, so the block owns it: its parameters train, move and save with the block.
            self.activation = activation
        later: dict[str, Any] = dict.fromkeys((*SCALE_BUFFERS, "gram"))
        for name, value in (later | self._new_reference(kernel)).items():
            self.register_buffer(name, value, persistent=False)
        self._register_step(kernel)
        if solver.implicit:
            self.register_buffer("residual", torch.zeros_like(self.L), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        """Returns the solve's result (see the class's docstring)."""
        if torch._C._get_tracing_state() is not None or not isinstance(input, Tensor):
            refuse_tracing(input)
        if self.routed and self.training and self.solver.samples == "inputs":
            input = undropped(input)
        if self.link is not None:
            return self._hand_over(self.link, input)
        output = self._run(input)[0]
        return mark_as_drawn(output) if self.routed and self.solver.samples == "outputs" else output

    def _hand_over(self, link: Link, input: Tensor) -> Tensor:
        """Returns the layer's output, marked with what the solver behind it needs."""
        repair_ends(link, self.prior)
        with self._one_look():
            output, kernel = super().forward(input), self._kernel()
        return hand_over(output, Handed(link, self, input, kernel, segments=current_segments()))

    def solve_behind(self, handed: Handed, argument: Tensor) -> Tensor:
        """Returns the solver's argument in place of the plain one (``argument``), behind a norm or a skip.

        A norm over the batch scales the rows of ``A`` by ``d = gamma / sqrt(var + eps)``: batch statistics in training,
        running ones in evaluation. ``L`` is certified for a reference diagonal and followed to that of the batch.
        """
        u, kernel = handed.input, handed.kernel
        assert u is not None and kernel is not None
        if not torch.compiler.is_compiling() and hasattr(self, "unshard") and kernel.untyped_storage().size() == 0:
            raise SolverPluginsError(
                f"The weight of this {type(self).__name__} was sharded again before the norm or activation behind it "
                "ran. Shard layer and norm as one unit: fully_shard the module that holds both, or pass "
                "reshard_after_forward=False."
            )
        constant = self._current_L(kernel) if self.solver.needs_constant else self.L
        diagonal = None
        if handed.norm is not None:
            assert handed.normed is not None
            diagonal = diagonal_of(handed.norm, handed.normed, constant.dtype)
            if self.solver.needs_constant:
                constant = self._scaled_L(kernel, constant, diagonal.detach(), uses_batch(handed.norm))
        operator = operator_from_kernel(kernel, self.geometry, u.shape, diagonal=diagonal)
        additive = argument - operator.apply(u) if self.solver.samples == "inputs" else None
        constants = self._constants(constant, self.gram)
        problem = pose_problem(self.solver, self.prior, operator, u, constants, lambda: argument, additive=additive)
        problem.known, problem.result = True, argument.dtype
        return solve_block(problem, self.solver, constants, self._scale(), training=self.training)[0]

    def _constants(self, constant: Tensor, gram: Tensor | None, path: Path | None = None) -> Constants:
        return Constants(constant, gram, self.collapsed, self.residual if self.solver.implicit else None, path)

    def diagnose(self, input: Tensor, generator: torch.Generator | None = None) -> Diagnostics:
        """Runs the block on ``input`` in its present mode and returns objective and residual per iteration.

        A block behind a norm or a skip raises OptionError: only a pass of the model knows its problem.
        """
        if self.link is not None:
            raise OptionError(
                "This block solves behind a norm or a skip connection, so its problem is only known within a pass of "
                "the model: use solver_report(model, batch)."
            )
        with torch.no_grad():
            diagnostics = self._run(input, generator, diagnose=True)[1]
        assert diagnostics is not None
        return diagnostics

    def operator(self, input_shape: torch.Size | tuple[int, ...], diagonal: Tensor | None = None) -> LinearOperator:
        """Returns the layer as a linear operator on inputs of one shape."""
        return operator_from_kernel(self._kernel_at_rest(), self.geometry, input_shape, diagonal=diagonal)

    def _run(
        self, input: Tensor, generator: torch.Generator | None = None, diagnose: bool = False
    ) -> tuple[Tensor, Diagnostics | None]:
        with self._one_look():
            return self._solve(input, generator, diagnose)

    def _one_look(self) -> contextlib.AbstractContextManager[Any]:
        """Some parametrisations change with every look (spectral_norm in training): within it, there is only one."""
        return parametrize.cached() if parametrize.is_parametrized(self) else contextlib.nullcontext()

    def _solve(
        self, input: Tensor, generator: torch.Generator | None, diagnose: bool
    ) -> tuple[Tensor, Diagnostics | None]:
        kernel = self._kernel()
        operator = operator_from_kernel(kernel, self.geometry, input.shape)
        # In training one Gram matrix serves the step size and the solve.
        scale = self._scale()
        path, fresh = None, None
        if self.training:
            path, fresh = fresh_gram(self.solver, self.prior, operator, input.shape, scale)
        # First: it may find that the weights have moved, and drop the Gram matrix.
        constant = self._current_L(kernel, fresh) if self.solver.needs_constant else self.L
        constants, plain = self._constants(constant, fresh if self.training else self.gram, path), super().forward
        problem = pose_problem(
            self.solver, self.prior, operator, input, constants, lambda: plain(input), bias=self.bias
        )
        return solve_block(
            problem,
            self.solver,
            constants,
            scale,
            output=self.output,
            training=self.training,
            generator=generator,
            diagnose=diagnose,
        )

    def _new_reference(self, kernel: Tensor) -> dict[str, Tensor]:
        norm = None if self.link is None else folded_norm(self.link)
        return {} if norm is None else {"diagonal_reference": reference_diagonal(norm, working_dtype(kernel.dtype))}

    def compute_step(self, method: str = "certified", tolerance: float = 0.1) -> dict[str, Tensor]:
        if self.link is not None:
            repair_ends(self.link, self.prior)
        return super().compute_step(method, tolerance)

    def cache_gram(self) -> bool:
        """Computes ``A A^T`` once, for evaluation; returns whether that is of use to this block.

        It is where ``A`` is a matrix with fewer than twice as many outputs as inputs, and the solver takes full
        gradients in evaluation. ``train()``, loading, a refreshed step and another device or dtype drop the matrix. It
        is not used where gradients of the weight are recorded. After writing weights on an accelerator, call it again.

        Raises:
            OptionError: If the block is in training mode, where its weights move.
        """
        if self.training:
            raise OptionError("A Gram matrix is kept in evaluation only; call eval() first.")
        kernel = self._kernel_at_rest().detach()
        useful = (
            kernel.dim() == 2
            and self._reference() is None
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

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.prior!r}, solver={self.solver!r}, output={self.output!r}"


def _installed(made: type[SolverBlock]) -> type[SolverBlock]:
    """Returns the class of a block that takes a layer's place: called with arguments it makes a plain layer.

    ``SolverLinear(3, 2)`` makes a solver, as it says; ``type(model.fc)(3, 2)`` (PEFT) means a layer like that one.
    """
    return made_class(made, made.plain_class, "Solver") if made in _NAMED.values() else made


def shell_for(layer: nn.Module, kind: type[SolverBlock] = SolverBlock) -> type[SolverBlock]:
    """Returns the class that turns a layer into a block of this kind; UnsupportedLayerError if it cannot become one."""
    if not isinstance(layer, nn.Module):
        raise UnsupportedLayerError(f"Expected a layer (a torch.nn.Module); found {type(layer).__name__}.")
    if isinstance(layer, SolverBlock):
        raise UnsupportedLayerError(
            f"{type(layer).__name__} is a solver block already; make the new one from the plain layer."
        )
    if hides_forward(layer) or wrapper_of(layer) is COMPILED_IN_PLACE:
        raise UnsupportedLayerError(
            f"This {type(layer).__name__} has a forward of its own on the instance, which would hide the solver: an "
            "accelerate hook (remove it with accelerate.hooks.remove_hook_from_module), or the result of "
            "layer.compile() (make the block from a plain layer, then compile the block)."
        )
    taken = sorted(
        RESERVED & (vars(layer).keys() | layer._parameters.keys() | layer._buffers.keys() | layer._modules.keys())
    )
    if taken:
        raise UnsupportedLayerError(
            f"A solver block needs the names {', '.join(sorted(RESERVED))} for itself; this {type(layer).__name__} "
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


def become_block(layer: nn.Module, activation: Activation, solver: Solver, link: Link | None) -> SolverBlock:
    """Turns a layer into a block where it stands: only its class changes, so every reference holds.

    After an error the layer is as it was.
    """
    layer.__class__ = _installed(shell_for(layer))
    block: SolverBlock = layer  # type: ignore[assignment]
    try:
        block._set_up(activation, solver, link=link)
    except BaseException:
        become_layer(block)
        raise
    return block


def become_layer(block: SolverBlock) -> nn.Module:
    """Turns a block into its plain layer again, where it stands."""
    for name in RESERVED:
        if any(name in own for own in (vars(block), block._buffers, block._modules, block._parameters)):
            delattr(block, name)
    block._forget_step()
    return take_off(block)
