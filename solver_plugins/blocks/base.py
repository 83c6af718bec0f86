"""The shell that turns a layer into a solver block without ceasing to be that layer."""

import copy
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from solver_plugins.blocks.made import made_class, take_off
from solver_plugins.blocks.run import (
    Activation,
    OutputKind,
    check_combination,
    check_rank,
    make_solver,
    run_block,
)
from solver_plugins.blocks.stepsize import STEP_BUFFERS, TrackedStep
from solver_plugins.errors import UnsupportedLayerError
from solver_plugins.operators import Geometry, LinearOperator, operator_from_kernel, read_layer, reader_for
from solver_plugins.prox import prox_for
from solver_plugins.solvers import Diagnostics, Solver

RESERVED = {*STEP_BUFFERS, "residual", "geometry", "solver", "prior", "output", "activation"}


_NAMED: dict[type[nn.Module], "type[SolverBlock]"] = {}


class SolverBlock(TrackedStep):
    """Mixin in front of a layer class: the layer's output becomes the argument of the last proximal map of a solve.

    The block *is* its layer: the same class (``isinstance``), the same Parameter objects, state-dict keys, hooks and
    flags. With ``output="argument"`` (default) ``activation(block(x))`` is the solver's result, and at one iteration
    ``block(x)`` is the plain layer's output; the activation stays where it is. With ``output="value"`` the block
    applies the activation itself.

    Step sizes keep themselves up to date; see :mod:`solver_plugins.blocks.stepsize`.
    """

    kernel_reader: "ClassVar[staticmethod[[nn.Module], tuple[Tensor, Geometry]]]"

    weight: Tensor
    bias: Any
    solver: Solver
    output: OutputKind
    residual: Tensor

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
    def from_layer(
        cls,
        layer: nn.Module,
        activation: Activation = None,
        solver: str | Solver = "proxsg",
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
        made = _class_for(layer, cls)
        block: Any = made.__new__(made)
        nn.Module.__init__(block)
        for name, value in vars(layer).items():
            # Containers of parameters, buffers, submodules and hooks become the block's own; their contents are shared.
            block.__dict__[name] = copy.copy(value) if isinstance(value, (dict, set, list)) else value
        block._set_up(activation, make_solver(solver, iters, options), output)
        return block

    def _set_up(self, activation: Activation, solver: Solver, output: OutputKind) -> None:
        prior = prox_for(activation)
        kernel, geometry = type(self).kernel_reader(self)
        check_combination(solver, prior, output, kernel.shape[0], kernel.shape[1] * geometry.groups, geometry)
        check_rank(solver, prior, kernel)
        self.geometry, self.solver, self.prior, self.output = geometry, solver, prior, output
        if output == "value" and isinstance(activation, nn.Module):
            # The block applies it, so the block owns it: its parameters train, move and save with the block.
            self.activation = activation
        self._register_step(kernel)
        if solver.implicit:
            self.register_buffer("residual", torch.zeros_like(self.L), persistent=False)

    def _kernel(self) -> Tensor:
        return type(self).kernel_reader(self)[0]

    def forward(self, input: Tensor) -> Tensor:
        """Returns the solve's result (see the class's docstring)."""
        return self._run(input)[0]

    def diagnose(self, input: Tensor, generator: torch.Generator | None = None) -> Diagnostics:
        """Runs the block on ``input`` in its present mode and returns objective and residual per iteration.

        Args:
            input: The layer's input.
            generator: Source of a sampling solver's draws; the global one by default.
        """
        with torch.no_grad():
            diagnostics = self._run(input, generator, diagnose=True)[1]
        assert diagnostics is not None
        return diagnostics

    def operator(self, input_shape: torch.Size | tuple[int, ...], diagonal: Tensor | None = None) -> LinearOperator:
        """Returns the layer as a linear operator on inputs of one shape."""
        return operator_from_kernel(self._kernel(), self.geometry, input_shape, diagonal=diagonal)

    def _run(
        self, input: Tensor, generator: torch.Generator | None = None, diagnose: bool = False
    ) -> tuple[Tensor, Diagnostics | None]:
        if parametrize.is_parametrized(self):
            # Some parametrisations change with every look (spectral_norm in training): look once.
            with parametrize.cached():
                return self._solve(input, generator, diagnose)
        return self._solve(input, generator, diagnose)

    def _solve(
        self, input: Tensor, generator: torch.Generator | None, diagnose: bool
    ) -> tuple[Tensor, Diagnostics | None]:
        kernel = self._kernel()
        return run_block(
            self.solver,
            self.prior,
            operator_from_kernel(kernel, self.geometry, input.shape),
            input,
            self.bias,
            lambda: super(SolverBlock, self).forward(input),
            self._current_L(kernel) if self.solver.needs_constant else self.L,
            residual=self.residual if self.solver.implicit else None,
            output=self.output,
            training=self.training,
            generator=generator,
            diagnose=diagnose,
        )

    def extra_repr(self) -> str:
        """Returns the layer's own line, with activation and solver."""
        return f"{super().extra_repr()}, activation={self.prior!r}, output={self.output!r}, solver={self.solver!r}"


def install_block(
    layer: nn.Module, activation: Activation, solver: Solver, output: OutputKind = "argument"
) -> SolverBlock:
    """Turns a layer into a block where it stands: the object stays, only its class changes, so every reference holds.

    Raises:
        SolverPluginsError: If it cannot be one; the layer is as it was then.
    """
    made = _class_for(layer, SolverBlock)
    layer.__class__ = made
    block: SolverBlock = layer  # type: ignore[assignment]
    try:
        block._set_up(activation, solver, output)
    except BaseException:
        remove_block(block)
        raise
    return block


def remove_block(block: SolverBlock) -> nn.Module:
    """Turns an installed block into its plain layer again, where it stands."""
    for name in RESERVED:
        if hasattr(block, name):
            delattr(block, name)
    block._forget_step()
    return take_off(block)


def _class_for(layer: nn.Module, kind: type[SolverBlock]) -> type[SolverBlock]:
    """Returns the class that turns a layer into a block of this kind, after all checks that need only the layer."""
    if not isinstance(layer, nn.Module):
        raise UnsupportedLayerError(f"Expected a layer (a torch.nn.Module); found {type(layer).__name__}.")
    if isinstance(layer, SolverBlock):
        raise UnsupportedLayerError(
            f"{type(layer).__name__} is a solver block already; make the new one from the plain layer."
        )
    if "forward" in vars(layer) or getattr(layer, "_compiled_call_impl", None) is not None:
        raise UnsupportedLayerError(
            f"This {type(layer).__name__} has a forward of its own on the instance, which would hide the solver: an "
            "accelerate hook (remove it with accelerate.hooks.remove_hook_from_module), or the result of "
            "layer.compile() (make the block from a plain layer, then compile the block)."
        )
    taken = sorted(RESERVED & (vars(layer).keys() | layer._buffers.keys() | layer._modules.keys()))
    if taken:
        raise UnsupportedLayerError(
            f"A solver block needs the names {', '.join(sorted(RESERVED))} for itself; this {type(layer).__name__} "
            f"has {', '.join(taken)}."
        )
    parametrized = parametrize.is_parametrized(layer)
    made = SolverBlock.class_for(type(layer).__bases__[0] if parametrized else type(layer))
    if not issubclass(made, kind):
        raise UnsupportedLayerError(
            f"{kind.__name__} is made from a layer of its own kind; found {type(layer).__name__}."
        )
    read_layer(layer)
    if parametrized:
        # torch reads a parametrised weight through properties of a class made for this one layer.
        members = {**vars(type(layer)), "plain_class": type(layer)}
        made = type(f"Parametrized{made.__name__}", (made,), members)
    return made
