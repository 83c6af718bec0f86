"""The shell that turns a layer into a solver block without ceasing to be that layer."""

import copy
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from solver_plugins.blocks.layer import RESERVED, LayerBlock, shell_for, strip
from solver_plugins.blocks.made import made_class
from solver_plugins.blocks.passthrough import mark_as_drawn
from solver_plugins.operators import LinearOperator, operator_from_kernel, reader_for
from solver_plugins.prox import prox_for
from solver_plugins.solve import (
    Activation,
    Constants,
    Diagnostics,
    OutputKind,
    Scale,
    Solver,
    fresh_gram,
    make_solver,
    pose_problem,
    solve_block,
)

_RESERVED = RESERVED | {"output", "activation"}


_NAMED: dict[type[nn.Module], "type[SolverBlock]"] = {}


class SolverBlock(LayerBlock):
    """Mixin in front of a layer class: the layer's output becomes the argument of the last proximal map of a solve.

    The block *is* its layer: the same class (``isinstance``), the same Parameter objects, state-dict keys, hooks and
    flags. With ``output="argument"`` (default) ``activation(block(x))`` is the solver's result, and at one iteration
    ``block(x)`` is the plain layer's output; the activation stays where it is. With ``output="value"`` the block
    applies the activation itself.

    Step sizes keep themselves up to date; see :mod:`solver_plugins.blocks.stepsize`.
    """

    output: OutputKind

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
        made = shell_for(layer, cls, _RESERVED)
        block: Any = made.__new__(made)
        nn.Module.__init__(block)
        for name, value in vars(layer).items():
            # Containers of parameters, buffers, submodules and hooks become the block's own; their contents are shared.
            block.__dict__[name] = copy.copy(value) if isinstance(value, (dict, set, list)) else value
        block._set_up(activation, make_solver(solver, iters, options), output)
        return block

    def _set_up(self, activation: Activation, solver: Solver, output: OutputKind) -> None:
        self._set_up_solver(prox_for(activation), solver, output)
        self.output = output
        if output == "value" and isinstance(activation, nn.Module):
            # The block applies it, so the block owns it: its parameters train, move and save with the block.
            self.activation = activation

    def forward(self, input: Tensor) -> Tensor:
        """Returns the solve's result (see the class's docstring)."""
        output = self._run(self._own_input(input))[0]
        return mark_as_drawn(output) if self.routed and self.solver.samples == "outputs" else output

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
        return operator_from_kernel(self._kernel_at_rest(), self.geometry, input_shape, diagonal=diagonal)

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
        operator = operator_from_kernel(kernel, self.geometry, input.shape)
        # In training one Gram matrix serves the step size and the solve.
        fresh = fresh_gram(self.solver, self.prior, operator, input.shape) if self.training else None
        # First: it may find that the weights have moved, and drop the Gram matrix.
        constant = self._current_L(kernel, fresh) if self.solver.needs_constant else self.L
        constants = Constants(
            constant,
            gram=fresh if self.training else self.gram,
            collapsed=self.collapsed,
            residual=self.residual if self.solver.implicit else None,
        )
        plain = super().forward
        problem = pose_problem(
            self.solver, self.prior, operator, input, constants, lambda: plain(input), bias=self.bias
        )
        return solve_block(
            problem,
            self.solver,
            constants,
            Scale(self.channel_gain, self.channel_shift, self.blend, self.observer),
            output=self.output,
            training=self.training,
            generator=generator,
            diagnose=diagnose,
        )

    def extra_repr(self) -> str:
        """Returns the layer's own line, with activation and solver."""
        return f"{super().extra_repr()}, output={self.output!r}"


def _installed(made: type[SolverBlock]) -> type[SolverBlock]:
    """Returns the class of a block that takes a layer's place: called with arguments it makes a plain layer.

    ``SolverLinear(3, 2)`` makes a solver, as it says; ``type(model.fc)(3, 2)`` (PEFT) means a layer like that one.
    """
    return made_class(made, made.plain_class, "Solver") if made in _NAMED.values() else made


def install_block(
    layer: nn.Module, activation: Activation, solver: Solver, output: OutputKind = "argument"
) -> SolverBlock:
    """Turns a layer into a block where it stands: the object stays, only its class changes, so every reference holds.

    Raises:
        SolverPluginsError: If it cannot be one; the layer is as it was then.
    """
    layer.__class__ = _installed(shell_for(layer, SolverBlock, _RESERVED))  # type: ignore[arg-type]
    block: SolverBlock = layer  # type: ignore[assignment]
    try:
        block._set_up(activation, solver, output)
    except BaseException:
        remove_block(block)
        raise
    return block


def remove_block(block: SolverBlock) -> nn.Module:
    """Turns an installed block into its plain layer again, where it stands."""
    return strip(block, _RESERVED)
