"""The named block classes: torch's own layers as solvers."""

from typing import Any

import torch
from torch import nn

from solver_plugins.blocks.block import SolverBlock
from solver_plugins.blocks.functional import Size
from solver_plugins.solve import Activation, OutputKind, Solver, make_solver


class SolverLinear(SolverBlock, nn.Linear, layer_class=nn.Linear):
    """``nn.Linear`` as a solver block; ``SolverLinear.from_linear(fc, activation=nn.ReLU(), solver="proxsg", p=0.5)``.

    Args:
        in_features: ``n1``.
        out_features: ``n2``.
        bias: Whether there is a bias.
        activation: What follows the layer; None is the identity.
        solver: A registered name, or a ready solver.
        iters: How many proximal steps (10 by default).
        output: "argument" of the activation (default), or its "value".
        device: As in ``nn.Linear``.
        dtype: As in ``nn.Linear``.
        **options: Options of the solver.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        activation: Activation = None,
        solver: str | Solver = "proxsg",
        iters: int | None = None,
        output: OutputKind = "argument",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ):
        made = make_solver(solver, iters, options)
        nn.Linear.__init__(self, in_features, out_features, bias, device=device, dtype=dtype)
        self._set_up(activation, made, output)

    # The one method of all blocks, under the name of this kind.
    from_linear = SolverBlock.__dict__["from_layer"]


class _SolverConv(SolverBlock):
    """What the convolutional blocks share: torch's constructor, with the solver's keywords after it."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size | str = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        *,
        activation: Activation = None,
        solver: str | Solver = "proxsg",
        iters: int | None = None,
        output: OutputKind = "argument",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ):
        made = make_solver(solver, iters, options)
        super(SolverBlock, self).__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias,
            padding_mode,
            device=device,
            dtype=dtype,
        )
        self._set_up(activation, made, output)

    # The one method of all blocks, under the name of this kind.
    from_conv = SolverBlock.__dict__["from_layer"]


class SolverConv1d(_SolverConv, nn.Conv1d, layer_class=nn.Conv1d):
    """``nn.Conv1d`` as a solver block."""


class SolverConv2d(_SolverConv, nn.Conv2d, layer_class=nn.Conv2d):
    """``nn.Conv2d`` as a solver block."""


class SolverConv3d(_SolverConv, nn.Conv3d, layer_class=nn.Conv3d):
    """``nn.Conv3d`` as a solver block."""
