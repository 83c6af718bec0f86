"""One block solve: what the functions and the modules of this room share."""

import math
import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from solver_plugins.errors import NoMinimizerError, NoMinimizerWarning, OptionError
from solver_plugins.gradients import differentiable_solve
from solver_plugins.operators import Geometry, LinearOperator
from solver_plugins.prox import Prior
from solver_plugins.registry import SOLVERS
from solver_plugins.solvers import BlockProblem, Diagnostics, Draws, Solver, working_dtype

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
            f"{solver.name} leaves coordinates at zero, and the activation {prior.name!r} never is zero, so there is "
            f"no "
            "argument to hand out; use output='value'."
        )
    if solver.config.lam > 0 or prior.bounded or out_features <= in_features * math.prod(geometry.stride):
        return
    reason = (
        f"{out_features} outputs of {in_features} inputs with lam=0 and prior {prior.name!r}: the problem need not "
        f"have a "
        "minimiser, and its iterates can grow without bound; use lam > 0 (default 1e-3)"
    )
    if solver.implicit:
        raise NoMinimizerError(f"{reason}. An implicit gradient does not exist there.")
    warnings.warn(f"{reason}.", NoMinimizerWarning, stacklevel=4)


def output_dtype(weight: Tensor) -> torch.dtype:
    """Returns the dtype of the plain layer's output."""
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


def run_block(
    solver: Solver,
    prior: Prior,
    operator: LinearOperator,
    input: Tensor,
    bias: Tensor | None,
    layer: Callable[[], Tensor],
    lipschitz: Tensor,
    *,
    skip: Tensor | None = None,
    output: str = "argument",
    training: bool = True,
    generator: torch.Generator | None = None,
    diagnose: bool = False,
) -> tuple[Tensor, Diagnostics | None]:
    """Solves one block problem.

    Args:
        solver: The solver.
        prior: The prior whose proximal map is the activation.
        operator: ``A``.
        input: ``u``.
        bias: One number per output feature, or None.
        layer: Computes ``A u + b`` (without the skip) as the plain layer does, bit for bit.
        lipschitz: ``lambda_max(A A^T)``, a 0-d tensor that is a constant for the backward pass.
        skip: Joins the bias (appendix J).
        output: The "argument" of the activation, or its "value".
        training: A sampling solver samples in training, and in evaluation if its ``eval_mode`` says so.
        generator: Source of the draws; the global one by default.
        diagnose: Also record objective and residual per iteration.
    """
    sampling = solver.samples != "nothing" and (training or solver.samples_in_evaluation)
    dtype = output_dtype(operator.weight)
    working = working_dtype(dtype)
    additive = None if bias is None else operator.per_feature(bias).to(working)
    if skip is not None:
        additive = skip.to(working) if additive is None else additive + skip
    problem = BlockProblem(
        operator=operator,
        input=input,
        bias=additive,
        layer=layer if skip is None else lambda: layer().to(working) + skip,
        dtype=working,
        rounding=torch.finfo(dtype).eps,
        prior=prior,
        smoothness=solver.smoothness(operator, lipschitz.detach().to(working)),
        lam=solver.config.lam,
        formulation=solver.config.formulation,
    )
    draws = Draws(generator) if sampling else None
    solution = differentiable_solve(solver, problem, draws=draws, diagnose=diagnose)
    result = solution.argument if output == "argument" else solution.value
    return result.to(dtype), solution.diagnostics
