"""What a solve costs: it runs on tensors without data, which computes nothing but counts every product.

So the numbers are right for every registered solver, including a user's own. A sampling solver multiplies by masks, so
its products are those of the whole layer, however few features it draws.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from solver_plugins.operators import Geometry, LinearOperator, at_rest, operator_from_kernel, read_layer
from solver_plugins.prox import IdentityPrior, Prior, ReluPrior
from solver_plugins.solve import Constants, GateKind, ProxGD, Scale, Solver, pose_problem, solve_block, working_dtype


@dataclass(frozen=True)
class Cost:
    """The cost of one block in the forward pass of a training step, for inputs of one shape.

    Attributes:
        plain: Floating point operations of the plain layer: two for each multiply-add. Elementwise work (norm,
            activation, masks) is not counted.
        solver: Those of the block. Of the work on the weights alone, only a Gram matrix is counted.
        memory: Bytes that the solve keeps for its backward pass beyond what the plain layer keeps.
        backward: Operations of the block's backward pass, if asked for; None for an implicit one.
    """

    plain: int
    solver: int
    memory: int
    backward: int | None = None

    @property
    def training(self) -> float | None:
        """The cost of forward and backward in units of the plain layer's, whose backward takes two products."""
        return None if self.backward is None or not self.plain else (self.solver + self.backward) / (3 * self.plain)


@dataclass(frozen=True)
class _Problem:
    """All that a cost depends on. Equal solvers read the same; of a prior, only its kind matters."""

    kernel_shape: tuple[int, ...]
    dtype: torch.dtype
    geometry: Geometry
    input_shape: tuple[int, ...]
    solver: str
    prior: str
    behind: bool
    normed: bool
    gate: GateKind | None
    backward: bool


_KNOWN: dict[_Problem, Cost] = {}
"""Counting takes a tenth of a second, and networks repeat their layers."""


def cost_of(
    layer: nn.Module,
    input_shape: tuple[int, ...],
    solver: Solver,
    prior: Prior,
    *,
    behind: bool = False,
    normed: bool = False,
    gate: GateKind | None = None,
    backward: bool = False,
) -> Cost:
    """Returns what a solver costs in place of a layer.

    ``behind``: it sits in a norm or an activation behind the layer, which then runs in any case. ``normed``: a norm is
    folded into the map. ``gate`` is in every iteration. ``backward`` is counted, too, if asked for, which takes as long
    again.
    """
    kernel, geometry = read_layer(layer)
    problem = _Problem(
        tuple(kernel.shape), kernel.dtype, geometry, tuple(input_shape), repr(solver), repr(prior), behind, normed,
        gate, backward,
    )  # fmt: skip
    if problem not in _KNOWN:
        _KNOWN[problem] = _counted(problem, solver, prior)
    return _KNOWN[problem]


def plain_flops(layer: nn.Module, output_shape: tuple[int, ...], feature_dim: int) -> int | None:
    """Returns the operations of any linear layer: each weight is used once per position of the output.

    None for what has no single weight, or uses it per position of the input (a transposed convolution).
    """
    with at_rest(layer):
        weight = getattr(layer, "weight", None)
    if not output_shape or not isinstance(weight, Tensor) or "Transpose" in type(layer).__name__:
        return None
    return 2 * weight.numel() * math.prod(output_shape) // max(1, output_shape[feature_dim])


def _counted(problem: _Problem, solver: Solver, prior: Prior) -> Cost:
    with FakeTensorMode(allow_non_fake_inputs=True):
        plain = _flops(lambda: _operator(problem)[0].apply(_input(problem)))
        if not solver.implicit:
            # One run for both counts, unless the prior looks at its numbers, which do not exist.
            try:
                return Cost(plain, *_run(problem, solver, prior))
            except Exception:
                return Cost(plain, *_run(problem, solver, ReluPrior()))
        with torch.no_grad():
            flops = _run(problem, solver, IdentityPrior())[0]
        # An implicit solve records one iteration at its end, which is also all that it keeps.
        memory = _run(problem, ProxGD.from_options(iters=2, formulation=solver.config.formulation), ReluPrior())[1]
        return Cost(plain, flops + 2 * plain, memory)


def _input(problem: _Problem) -> Tensor:
    return torch.empty(problem.input_shape, dtype=problem.dtype, requires_grad=True)


def _operator(problem: _Problem) -> tuple[LinearOperator, LinearOperator]:
    """Returns the layer alone and with its norm, whose column norms cost nothing."""
    kernel = torch.empty(problem.kernel_shape, dtype=problem.dtype, requires_grad=True)
    plain = operator_from_kernel(kernel, problem.geometry, problem.input_shape)
    diagonal = None
    if problem.normed:
        diagonal = torch.empty(problem.kernel_shape[0], dtype=working_dtype(problem.dtype), requires_grad=True)
    folded = operator_from_kernel(kernel, problem.geometry, problem.input_shape, diagonal=diagonal)
    members = {"column_norms_sq": lambda self: torch.ones(self.in_features, dtype=working_dtype(problem.dtype))}
    object.__setattr__(folded, "__class__", type("Counted", (type(folded),), members))
    return plain, folded


def _counter() -> Any:
    # Imported here: it brings triton with it, which takes as long as the rest of this package.
    from torch.utils.flop_counter import FlopCounterMode

    def added(total: Any, left: Any, right: Any, out_shape: Any = None, **options: Any) -> int:
        return 2 * math.prod(left) * int(right[-1])

    # It does not know the products that add in place.
    in_place = {torch.ops.aten.addmm_: added, torch.ops.aten.baddbmm_: added}
    return FlopCounterMode(display=False, custom_mapping=in_place)


def _flops(work: Callable[[], Tensor]) -> int:
    with _counter() as counter, torch.no_grad():
        work()
    total: int = counter.get_total_flops()
    return total


def _run(problem: _Problem, solver: Solver, prior: Prior) -> tuple[int, int, int | None]:
    """Returns the operations of a solve, the bytes that it keeps, and the operations of its backward pass, if asked."""
    plain, operator = _operator(problem)
    u = _input(problem)
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        # By storage: views of one tensor are kept once. The tensors are held, so that no address is used again.
        kept.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    with _counter() as counter:
        c = plain.apply(u) if problem.behind else None
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            additive = None
            if c is not None and solver.samples == "inputs":
                additive = c - operator.apply(u)
            constants = Constants(torch.ones((), dtype=working_dtype(problem.dtype)))
            layer = (lambda: plain.apply(u)) if c is None else (lambda: c)
            posed = pose_problem(solver, prior, operator, u, constants, layer, additive=additive)
            posed.known = problem.behind
            scale = None
            if problem.gate is not None:
                count = () if problem.gate == "scalar" else problem.kernel_shape[:1]
                scale = Scale(gate=torch.empty(count, dtype=posed.dtype, requires_grad=True))
            out = solve_block(posed, solver, constants, scale)[0]
    own = [one.untyped_storage()._cdata for one in (u, operator.weight, c, operator.diagonal) if one is not None]
    memory = sum(one.untyped_storage().nbytes() for key, one in kept.items() if key not in own)
    if not (problem.backward and out.requires_grad):
        return counter.get_total_flops(), memory, None
    with _counter() as pulled:
        torch.autograd.grad(out, (u, plain.weight, operator.weight), torch.empty_like(out), allow_unused=True)
    return counter.get_total_flops(), memory, pulled.get_total_flops()
