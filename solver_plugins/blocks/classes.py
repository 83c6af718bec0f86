"""The named block classes: torch's own layers as solvers."""

import inspect
from typing import Any

from torch import nn

from solver_plugins.blocks.block import SolverBlock
from solver_plugins.registry import DEFAULT_SOLVER
from solver_plugins.solve import Activation, OutputKind, Solver, make_solver


class _Named(SolverBlock):
    """A block with a constructor: the layer's own arguments, and the solver's keywords after them."""

    def __init_subclass__(cls, layer_class: type[nn.Module] | None = None, **keywords: Any):
        super().__init_subclass__(layer_class=layer_class, **keywords)
        if layer_class is not None:
            own = inspect.signature(_Named.__init__).parameters.values()
            solve = [one for one in own if one.kind in (one.KEYWORD_ONLY, one.VAR_KEYWORD)]
            signature = inspect.Signature([*inspect.signature(layer_class).parameters.values(), *solve])
            cls.__signature__ = signature  # type: ignore[attr-defined]

    def __init__(
        self,
        *layer: Any,
        activation: Activation = None,
        solver: str | Solver = DEFAULT_SOLVER,
        iters: int | None = None,
        output: OutputKind = "argument",
        **options: Any,
    ):
        own = inspect.signature(self.plain_class).parameters
        keywords = {name: options.pop(name) for name in own if name in options}
        made = make_solver(solver, iters, options)
        plain: Any = self.plain_class
        plain.__init__(self, *layer, **keywords)
        self._set_up(activation, made, output)


class SolverLinear(_Named, nn.Linear, layer_class=nn.Linear):
    """``nn.Linear`` as a solver block; ``SolverLinear.from_linear(fc, activation=nn.ReLU(), solver="proxsg", p=0.5)``.

    Args:
        *layer: The arguments of ``nn.Linear``, which may also be given by name.
        activation: What follows the layer; None is the identity.
        solver: A registered name, or a ready solver.
        iters: How many proximal steps (10 by default).
        output: "argument" of the activation (default), or its "value".
        **options: Options of the solver.
    """

    # The one method of all blocks, under the name of this kind.
    from_linear = SolverBlock.__dict__["from_layer"]


class SolverConv1d(_Named, nn.Conv1d, layer_class=nn.Conv1d):
    """``nn.Conv1d`` as a solver block; its arguments, then those of :class:`SolverLinear` after the layer's."""

    from_conv = SolverBlock.__dict__["from_layer"]


class SolverConv2d(_Named, nn.Conv2d, layer_class=nn.Conv2d):
    """``nn.Conv2d`` as a solver block; its arguments, then those of :class:`SolverLinear` after the layer's."""

    from_conv = SolverBlock.__dict__["from_layer"]


class SolverConv3d(_Named, nn.Conv3d, layer_class=nn.Conv3d):
    """``nn.Conv3d`` as a solver block; its arguments, then those of :class:`SolverLinear` after the layer's."""

    from_conv = SolverBlock.__dict__["from_layer"]
