"""Solver blocks as functions of their weights, beside ``torch.nn.functional``."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from solver_plugins.errors import OptionError, ShapeError
from solver_plugins.operators import Geometry, lipschitz_from_kernel, operator_from_kernel
from solver_plugins.prox import prox_for
from solver_plugins.registry import DEFAULT_SOLVER
from solver_plugins.solve import (
    Activation,
    Constants,
    Diagnostics,
    OutputKind,
    Scale,
    Solver,
    check_combination,
    check_gate,
    check_rank,
    make_solver,
    pose_problem,
    solve_block,
    working_dtype,
)

Size = int | Sequence[int]


def solver_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, **solve: Any
) -> Tensor | tuple[Tensor, Diagnostics]:
    """A linear layer as a solver: ``activation(solver_linear(x, W, b, activation=...))`` is the solver's result.

    Args:
        input: ``[*, n1]``; every row is a problem of its own.
        weight: ``[n2, n1]``.
        bias: ``[n2]``.
        **solve: The keyword arguments of :func:`solve_layer`: ``activation``, ``solver``, ``iters``, ``output``, ...

    Returns:
        ``[*, n2]``, and the diagnostics if asked for.
    """
    _check_dims(weight, 0)
    return solve_layer(input, weight, bias, Geometry(), **solve)


def _solver_conv(spatial: int) -> Callable[..., Tensor | tuple[Tensor, Diagnostics]]:
    def solver_conv(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Size = 1,
        padding: Size | str = 0,
        dilation: Size = 1,
        groups: int = 1,
        padding_mode: str = "zeros",
        **solve: Any,
    ) -> Tensor | tuple[Tensor, Diagnostics]:
        """A convolution as a solver; ``**solve`` are the keyword arguments of :func:`solve_layer`."""
        _check_dims(weight, spatial)
        geometry = Geometry.for_conv(weight.shape[2:], stride, padding, dilation, groups, padding_mode)
        return solve_layer(input, weight, bias, geometry, **solve)

    solver_conv.__name__ = solver_conv.__qualname__ = f"solver_conv{spatial}d"
    return solver_conv


solver_conv1d = _solver_conv(1)
"""A 1-D convolution as a solver; ``**solve`` are the keyword arguments of :func:`solve_layer`."""
solver_conv2d = _solver_conv(2)
"""A 2-D convolution as a solver; ``**solve`` are the keyword arguments of :func:`solve_layer`."""
solver_conv3d = _solver_conv(3)
"""A 3-D convolution as a solver; ``**solve`` are the keyword arguments of :func:`solve_layer`."""


@dataclass(frozen=True, kw_only=True)
class LayerSolve:
    """Further keyword arguments of :func:`solve_layer`.

    Attributes:
        lipschitz: ``lambda_max(A A^T)``, with the diagonal; computed with a certificate if not given.
        diagonal: A scale ``d`` per output feature (a folded norm): ``A`` becomes ``diag(d) A``.
        skip: Added to the bias: a skip connection that ends before the activation.
        scale: Gain, shift, blend and gate, as :class:`~solver_plugins.solve.Scale` says.
        training: Whether a sampling solver samples (see its ``eval_mode`` for False).
        generator: Source of the draws; the global one by default.
        diagnose: Also return the :class:`~solver_plugins.solve.Diagnostics` of the solve.
    """

    lipschitz: Tensor | float | None = None
    diagonal: Tensor | None = None
    skip: Tensor | None = None
    scale: Scale | None = None
    training: bool = True
    generator: torch.Generator | None = None
    diagnose: bool = False


_FIELDS = tuple(one.name for one in fields(LayerSolve))
"""Read once: a compiler cannot ask a class for its fields."""


def solve_layer(
    input: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    *,
    activation: Activation = None,
    solver: str | Solver = DEFAULT_SOLVER,
    iters: int | None = None,
    output: OutputKind = "argument",
    **options: Any,
) -> Tensor | tuple[Tensor, Diagnostics]:
    """Any linear layer, given by kernel and geometry, as a solver.

    Args:
        input: ``u``, batched or not.
        kernel: ``[n2, n1/groups, *k]``.
        bias: ``[n2]``, added after the diagonal.
        geometry: Stride, padding, dilation and groups; ``Geometry()`` is a linear layer.
        activation: The activation that follows: a module, a function, a prior or a prior's name; None is the identity.
        solver: A registered name, or a ready solver.
        iters: How many proximal steps (10 by default).
        output: "argument" of the activation (default) or its "value".
        **options: The fields of :class:`LayerSolve`, and options of the solver; an unknown one raises.

    Returns:
        The layer's output after the solve, and the diagnostics if asked for.
    """
    how = LayerSolve(**{name: options.pop(name) for name in _FIELDS if name in options})
    made, prior = make_solver(solver, iters, options), prox_for(activation)
    operator = operator_from_kernel(kernel, geometry, input.shape, diagonal=how.diagonal)
    check_combination(made, prior, output, operator.out_features, operator.in_features, geometry)
    if bias is not None and bias.shape != (operator.out_features,):
        raise ShapeError(f"Expected a bias of shape ({operator.out_features},); found {tuple(bias.shape)}.")
    check_rank(made, prior, kernel)
    if how.scale is not None and how.scale.gate_kind is not None:
        check_gate(made, prior, how.scale.gate_kind)
    lipschitz = _checked(how.lipschitz)
    if lipschitz is None:
        lipschitz = lipschitz_from_kernel(kernel.detach(), geometry, diagonal=how.diagonal)
    constants = Constants(torch.as_tensor(lipschitz, dtype=working_dtype(kernel.dtype), device=kernel.device))

    def layer() -> Tensor:
        plain = operator.apply(input)
        return plain if bias is None else plain + operator.per_feature(bias)

    problem = pose_problem(made, prior, operator, input, constants, layer, bias=bias, skip=how.skip)
    result, diagnostics = solve_block(
        problem,
        made,
        constants,
        how.scale,
        output=output,
        training=how.training,
        generator=how.generator,
        diagnose=how.diagnose,
    )
    return (result, diagnostics) if diagnostics is not None else result


def _checked(lipschitz: Tensor | float | None) -> Tensor | float | None:
    if isinstance(lipschitz, Tensor):
        if lipschitz.dim() != 0:
            raise ShapeError(
                f"Expected lipschitz to be a number or a 0-d tensor; found shape {tuple(lipschitz.shape)}."
            )
        # A number on an accelerator is not looked at: that would stall it.
        seen = lipschitz.device.type == "cpu" and not torch.compiler.is_compiling()
        wrong = seen and not 0 <= lipschitz < math.inf
    else:
        wrong = lipschitz is not None and not (isinstance(lipschitz, (int, float)) and 0 < lipschitz < math.inf)
    if wrong:
        raise OptionError(f"Expected a positive, finite lipschitz constant; found {lipschitz!r}.")
    return lipschitz


def _check_dims(weight: Tensor, spatial: int) -> None:
    if weight.dim() != spatial + 2:
        expected = "[n2, n1]" if spatial == 0 else f"[n2, n1/groups, {', '.join('k' * spatial)}]"
        raise ShapeError(f"Expected a weight of shape {expected}; found {tuple(weight.shape)}.")
