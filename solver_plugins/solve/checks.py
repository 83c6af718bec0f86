"""Checks of what goes together in a block."""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from solver_plugins.errors import NoMinimizerError, NoMinimizerWarning, OptionError, warn
from solver_plugins.operators import Geometry
from solver_plugins.prox import Prior
from solver_plugins.prox.prior import in_float64
from solver_plugins.registry import SOLVERS
from solver_plugins.solve.base import SamplingSolver, Solver
from solver_plugins.solve.problem import GateKind

Activation = nn.Module | Callable[..., Tensor] | str | Prior | None
OutputKind = Literal["argument", "value"]


def make_solver(solver: str | Solver, iters: int | None, options: dict[str, Any]) -> Solver:
    """Returns a solver from its registered name and options, or the given one.

    Raises:
        UnknownNameError: For an unknown solver.
        OptionError: For an unknown option or a bad value, or options beside a ready solver.
    """
    if isinstance(solver, Solver):
        if options or iters is not None:
            raise OptionError(
                f"Expected options inside the given solver {solver!r}; found {sorted(options) or ['iters']} beside it."
            )
        return solver
    made: Solver = SOLVERS.get(solver).from_options(**options, **({} if iters is None else {"iters": iters}))
    return made


def check_combination(
    solver: Solver, prior: Prior, output: str, out_features: int, in_features: int, geometry: Geometry
) -> None:
    """Checks that solver, prior, output and shape go together.

    Raises:
        OptionError: If they do not.
        NoMinimizerError: If an implicit gradient is asked of a problem that may have no minimiser.

    Warns:
        NoMinimizerWarning: If iterates may grow without bound.
    """
    if output not in ("argument", "value"):
        raise OptionError(f"Expected output to be 'argument' or 'value'; found {output!r}.")
    solver.check_prior(prior)
    if solver.samples == "outputs" and output == "argument" and prior.zero_argument is None:
        raise OptionError(
            f"{solver.name} leaves coordinates at zero, and the activation {prior.name!r} never is zero: there is no "
            "argument to hand out; use output='value'."
        )
    if solver.config.is_regularised or prior.bounded or out_features <= in_features * math.prod(geometry.stride):
        return
    reason = (
        f"{out_features} outputs of {in_features} inputs with lam=0 and prior {prior.name!r}: the problem need not "
        "have a minimiser, and its iterates can grow without bound; use lam > 0 (default 1e-3)"
    )
    if solver.implicit:
        raise NoMinimizerError(f"{reason}. An implicit gradient does not exist there.")
    warn(f"{reason}.", NoMinimizerWarning)


def check_gate(solver: Solver, prior: Prior, gate: GateKind) -> None:
    """Checks that a gate can be put on a solver: at zero it must leave the plain layer, in between a convex problem.

    Raises:
        OptionError: If it cannot.
    """
    config = solver.config
    # One number per channel divides the prior of that channel: one that couples channels has no such problem.
    reason = ""
    if config.iters == 1:
        reason = "one iteration is the plain layer, whatever the gate, which would get no gradient; use iters=2 or more"
    elif config.formulation == "paper":
        reason = "with formulation='paper' one iteration is not the plain layer; use formulation='normalized'"
    elif gate == "channel" and not prior.separable:
        reason = f"the prior {prior.name!r} couples the channels; use gate='scalar'"
    elif gate == "channel" and solver.implicit:
        reason = (
            "gradient='implicit' solves with a symmetric matrix, which a gate per channel does not leave; use "
            "gate='scalar' or gradient='unrolled'"
        )
    elif isinstance(solver, SamplingSolver) and solver.decays and not prior.scale_free:
        reason = (
            f"step={config.step!r} takes smaller steps, and the proximal map of {prior.name!r} depends on the step, so "
            "that a closed gate would not be the plain layer; use step='constant'"
        )
    elif type(solver).value is not Solver.value and type(solver).gated is Solver.gated:
        reason = "its iterate is not that of its state's v; override gated(), too, and gate v within step()"
    if reason:
        raise OptionError(f"A {gate} gate does not go with {solver.name}: {reason}.")


def check_rank(solver: Solver, prior: Prior, kernel: Tensor) -> None:
    """Raises NoMinimizerError if an implicit gradient with ``lam = 0`` meets a map that may lack full row rank.

    The rank is known for a linear layer only; a bounded prior needs none.
    """
    if not solver.implicit or solver.config.is_regularised or prior.bounded or kernel.is_meta:
        return
    if kernel.dim() == 2 and int(torch.linalg.matrix_rank(in_float64(kernel))) == kernel.shape[0]:
        return
    raise NoMinimizerError(
        "gradient='implicit' with lam=0 needs a linear map of full row rank; a weight of shape "
        f"{tuple(kernel.shape)} was found that is not known to be one. Use lam > 0 (default 1e-3)."
    )
