"""One block solve: what the functions and the modules of this room share."""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from solver_plugins.errors import InputError, NoMinimizerError, NoMinimizerWarning, OptionError, ShapeError, warn
from solver_plugins.operators import Geometry, LinearOperator, autocasts, product_dtype
from solver_plugins.prox import Prior
from solver_plugins.registry import SOLVERS
from solver_plugins.solve.base import Draws, Solver
from solver_plugins.solve.differentiate import differentiable_solve
from solver_plugins.solve.loop import Diagnostics, Solution
from solver_plugins.solve.problem import BlockProblem, working_dtype

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
    if solver.config.lam > 0 or prior.bounded or out_features <= in_features * math.prod(geometry.stride):
        return
    reason = (
        f"{out_features} outputs of {in_features} inputs with lam=0 and prior {prior.name!r}: the problem need not "
        "have a minimiser, and its iterates can grow without bound; use lam > 0 (default 1e-3)"
    )
    if solver.implicit:
        raise NoMinimizerError(f"{reason}. An implicit gradient does not exist there.")
    warn(f"{reason}.", NoMinimizerWarning)


def check_rank(solver: Solver, prior: Prior, kernel: Tensor) -> None:
    """Raises NoMinimizerError if an implicit gradient with ``lam = 0`` meets a map that may lack full row rank.

    The rank is known for a linear layer only; a bounded prior needs none.
    """
    if not solver.implicit or solver.config.lam > 0 or prior.bounded or kernel.is_meta:
        return
    if kernel.dim() == 2 and int(torch.linalg.matrix_rank(kernel.detach().double())) == kernel.shape[0]:
        return
    raise NoMinimizerError(
        "gradient='implicit' with lam=0 needs a linear map of full row rank; a weight of shape "
        f"{tuple(kernel.shape)} was found that is not known to be one. Use lam > 0 (default 1e-3)."
    )


def check_input(input: Tensor, operator: LinearOperator, skip: Tensor | None) -> None:
    """Raises InputError or ShapeError for what the plain layer would not take, on every path of every solver."""
    if not isinstance(input, Tensor):
        raise InputError(f"Expected a tensor; found {type(input).__name__}.")
    weight = operator.weight
    autocast = autocasts(weight.device)
    if not input.is_floating_point() or (input.dtype != weight.dtype and not autocast):
        raise InputError(f"Expected an input in {weight.dtype}, the weight's dtype; found {input.dtype}.")
    if skip is not None:
        batch = tuple(input.shape[: input.dim() - len(operator.problem_dims)])
        shape = (*batch, operator.out_features, *getattr(operator, "output_size", ()))
        if tuple(skip.shape) != shape:
            raise ShapeError(f"Expected a skip of the output's shape {shape}; found {tuple(skip.shape)}.")


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
    additive: Tensor | None = None,
    dtype: torch.dtype | None = None,
    residual: Tensor | None = None,
    gain: Tensor | None = None,
    shift: Tensor | None = None,
    blend: Tensor | None = None,
    gram: Tensor | None = None,
    fresh_gram: Tensor | None = None,
    observer: Callable[[Tensor, int], tuple[Tensor, Tensor] | None] | None = None,
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
        additive: All that is added to ``A u``, where bias and skip are not known apart; ``layer`` includes it.
        dtype: Of the result; by default that of the plain layer's output.
        residual: A 0-d buffer that receives the residual of an implicit solve.
        gain: One factor per output feature on the last argument.
        shift: What is added to that, one number per output feature.
        blend: ``a`` in ``(1 - a) v_1 + a v_K``, a 0-d tensor; None is one.
        gram: ``A A^T``, where it is known already.
        fresh_gram: The same, computed in this forward; gradients of the weight are right with it, too.
        observer: Sees the last argument and the dimension of its features, and returns the gain and shift to use.
        output: The "argument" of the activation, or its "value".
        training: A sampling solver samples in training, and in evaluation if its ``eval_mode`` says so.
        generator: Source of the draws; the global one by default.
        diagnose: Also record objective and residual per iteration.
    """
    sampling = solver.samples != "nothing" and (training or solver.samples_in_evaluation)
    check_input(input, operator, skip)
    if not prior.separable:
        dim = getattr(prior, "dim", operator.feature_dim)
        if dim - input.dim() * (dim >= 0) != operator.feature_dim:
            raise OptionError(
                f"Expected the prior {prior.name!r} along the features, dimension {operator.feature_dim}; found {dim}, "
                "which would couple independent problems."
            )
    products = product_dtype(operator.weight)
    dtype = products if dtype is None else dtype
    working = working_dtype(products)
    if bias is not None:
        additive = operator.per_feature(bias).to(working)
    if skip is not None:
        additive = skip.to(working) if additive is None else additive + skip
    problem = BlockProblem(
        operator=operator,
        input=input,
        bias=additive,
        layer=layer if skip is None else lambda: layer().to(working) + skip,
        dtype=working,
        rounding=torch.finfo(products).eps,
        prior=prior,
        smoothness=solver.smoothness(operator, lipschitz.detach().to(working)),
        lam=solver.config.lam,
        formulation=solver.config.formulation,
    )
    draws = Draws(generator) if sampling else None
    solution = differentiable_solve(
        solver,
        problem,
        draws=draws,
        diagnose=diagnose,
        residual=residual,
        keep_first=blend is not None,
        gram=gram,
        fresh_gram=fresh_gram,
    )
    if observer is not None:
        gain, shift = observer(solution.argument, operator.feature_dim) or (None, None)
    if gain is None and shift is None and blend is None:
        result = solution.argument if output == "argument" else solution.value
    else:
        result = _rescaled(solution, operator, gain, shift, blend)
        result = result if output == "argument" else prior.prox(result, 1.0)
    return result.to(dtype), solution.diagnostics


def _rescaled(
    solution: Solution,
    operator: LinearOperator,
    gain: Tensor | None,
    shift: Tensor | None,
    blend: Tensor | None,
) -> Tensor:
    last = solution.argument
    if gain is not None:
        last = last * operator.per_feature(gain).to(last.dtype)
    if shift is not None:
        last = last + operator.per_feature(shift).to(last.dtype)
    if blend is None:
        return last
    assert solution.first is not None
    return torch.lerp(solution.first, last, blend.to(last.dtype))
