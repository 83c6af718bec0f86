"""The one entrance to a block solve, for modules, functions and the cost model alike."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from solver_plugins.errors import InputError, OptionError, ShapeError
from solver_plugins.operators import LinearMap, LinearOperator, autocasts, product_dtype
from solver_plugins.prox import IdentityPrior, Prior
from solver_plugins.solve.base import Draws, SamplingSolver, Solver
from solver_plugins.solve.collapse import Affine, Collapsed, applied, collapse, collapse_output, multiplied, scaled
from solver_plugins.solve.implicit import solve_implicit
from solver_plugins.solve.layout import is_matrix, symmetric_product
from solver_plugins.solve.paths import Path, path_for, solve_size
from solver_plugins.solve.problem import BlockProblem, Scale, working_dtype
from solver_plugins.solve.run import Diagnostics, Solution, runs_in_kernel, solve, solve_in_kernel
from solver_plugins.solve.steps import times


@dataclass(frozen=True)
class Constants:
    """What a block knows about its weights before it solves.

    Attributes:
        L: ``lambda_max(A A^T)``, a 0-d tensor that is a constant for the backward pass.
        gram: ``A A^T``, where it is known already: kept in evaluation, or computed in this forward pass.
        collapsed: Where the block keeps a collapsed solve in evaluation.
        residual: A 0-d buffer that receives the residual of an implicit solve.
        path: The path, where it is chosen already.
    """

    L: Tensor
    gram: Tensor | None = None
    collapsed: Collapsed | None = None
    residual: Tensor | None = None
    path: Path | None = None


def pose_problem(
    solver: Solver,
    prior: Prior,
    operator: LinearOperator,
    input: Tensor,
    constants: Constants,
    layer: Callable[[], Tensor],
    *,
    bias: Tensor | None = None,
    skip: Tensor | None = None,
    additive: Tensor | None = None,
) -> BlockProblem:
    """Returns the problem that a block solves.

    Args:
        solver: The solver, whose options are part of the problem.
        prior: The prior whose proximal map is the activation.
        operator: ``A``.
        input: ``u``.
        constants: What is known about ``A``.
        layer: Computes ``A u + b`` (without the skip) as the plain layer does, bit for bit.
        bias: One number per output feature, or None.
        skip: Joins the bias (appendix J).
        additive: All that is added to ``A u``, where bias and skip are not known apart; ``layer`` includes it.

    Raises:
        InputError: For an input that the plain layer would not take.
        ShapeError: For a skip of another shape than the output.
        OptionError: For a prior that couples independent problems.
    """
    _check_input(input, operator, skip)
    if not prior.separable:
        dim = getattr(prior, "dim", operator.feature_dim)
        if dim - input.dim() * (dim >= 0) != operator.feature_dim:
            raise OptionError(
                f"Expected the prior {prior.name!r} along the features, dimension {operator.feature_dim}; found {dim}, "
                "which would couple independent problems."
            )
    products = product_dtype(operator.weight)
    working = working_dtype(products)
    if bias is not None:
        additive = operator.per_feature(bias).to(working)
    if skip is not None:
        additive = skip.to(working) if additive is None else additive + skip
    return BlockProblem(
        operator=operator,
        input=input,
        bias=additive,
        layer=layer if skip is None else lambda: layer().to(working) + skip,
        dtype=working,
        rounding=torch.finfo(products).eps,
        prior=prior,
        smoothness=solver.smoothness(operator, constants.L.detach().to(working)),
        lam=solver.lam(constants.L.detach().to(working)),
        formulation=solver.config.formulation,
        known=skip is not None or (additive is not None and bias is None),
        result=products,
    )


def fresh_gram(
    solver: Solver, prior: Prior, operator: LinearOperator, shape: torch.Size, scale: Scale
) -> tuple[Path | None, Tensor | None]:
    """Returns the path of a solve in training, and ``A A^T``, recorded nowhere, if the solve will multiply by it.

    The step size can use the matrix, too. Gradients of the weight do not come through it. None where it is not known.

    Args:
        solver: The solver.
        prior: The prior.
        operator: ``A``.
        shape: Of the input.
        scale: That of the block.
    """
    if solver.recursion is None or prior.learnable or prior.opaque or not isinstance(operator, LinearMap):
        return None, None
    weight, sampling = operator.weight, solver.samples != "nothing"
    batch, gate = math.prod(shape[:-1]), scale.gate_kind
    path = path_for(solver, solve_size(solver, operator, batch, sampling=sampling, prior=prior, gate=gate))
    small = path == "gram" or (path == "collapsed" and weight.shape[0] <= weight.shape[1])
    if not small or operator.diagonal is not None or product_dtype(weight) != working_dtype(weight.dtype):
        return path, None
    with torch.no_grad():
        return path, symmetric_product(weight.detach())


def affine_map(
    solver: Solver,
    prior: Prior,
    operator: LinearOperator,
    bias: Tensor | None,
    constants: Constants,
    scale: Scale | None = None,
) -> Affine:
    """Returns the weight and the bias of the plain layer that computes what a block computes in evaluation.

    Gain, shift, blend and gate are part of both. So is the diagonal of a folded norm, which scales the rows of the
    weight; ``bias`` is then what the norm adds. Both are in the working precision, the weight shaped like the layer's.

    Args:
        solver: The solver.
        prior: The prior.
        operator: ``A``, on inputs of any size that the layer takes.
        bias: One number per output feature, or None.
        constants: What is known about ``A``.
        scale: What is done to the result.

    Raises:
        OptionError: If the block is not affine in evaluation; the message says why.
    """
    scale, recursion = Scale() if scale is None else scale, solver.recursion
    reason = ""
    if not isinstance(prior, IdentityPrior):
        reason = f"its prior {prior.name!r} is not linear"
    elif solver.samples != "nothing" and solver.samples_in_evaluation:
        reason = "its evaluation is stochastic; use eval_mode='deterministic'"
    elif recursion is None or recursion.momenta(solver.config.iters) is None:
        reason = f"the iterations of {solver!r} depend on the input"
    elif not is_matrix(operator):
        reason = "the windows of its convolution overlap, so that A A^T is not the same at the border"
    elif scale.shift is not None and bias is None:
        reason = "it has a shift, and the layer has no bias that could hold it"
    if reason:
        raise OptionError(f"Expected a block that is affine in evaluation; found one that is not: {reason}.")
    nothing = operator.weight.new_empty(0)
    problem = pose_problem(solver, prior, operator, nothing, constants, lambda: nothing, bias=bias)
    problem.gate = None if scale.gate is None else scale.gate.to(problem.dtype)
    return _scaled_map(problem, solver, scale, constants.gram)


def _scaled_map(problem: BlockProblem, solver: Solver, scale: Scale, gram: Tensor | None) -> Affine:
    weight, bias = problem.operator.folded().weight.to(problem.dtype), problem.bias
    first = Affine(times(weight, problem.step), None if bias is None else times(bias.reshape(-1), problem.step))
    return scaled(scale, first, collapse(solver, problem, gram))


def solve_block(
    problem: BlockProblem,
    solver: Solver,
    constants: Constants,
    scale: Scale | None = None,
    *,
    output: str = "argument",
    training: bool = True,
    generator: torch.Generator | None = None,
    diagnose: bool = False,
) -> tuple[Tensor, Diagnostics | None]:
    """Solves one block problem so that gradients reach its input, weights, bias and prior.

    Unrolled (any order of derivatives) unless the solver's config says ``gradient="implicit"`` (first derivatives
    only; a second one is refused). The path is that of the cost model, or of the solver's config.

    Args:
        problem: From :func:`pose_problem`.
        solver: The solver.
        constants: What is known about the weights.
        scale: What is done to the result.
        output: The "argument" of the activation, or its "value".
        training: A sampling solver samples in training, and in evaluation if its ``eval_mode`` says so.
        generator: Source of the draws; the global one by default.
        diagnose: Also record objective and residual per iteration.
    """
    scale, operator, prior = Scale() if scale is None else scale, problem.operator, problem.prior
    sampling = solver.samples != "nothing" and (training or solver.samples_in_evaluation)
    if sampling and isinstance(solver, SamplingSolver) and solver.recursion is not None and not diagnose:
        sampling = solver.thins(operator)
    if scale.gate is not None:
        problem = replace(problem, gate=scale.gate.to(problem.dtype))
    tensors = (operator.weight, operator.diagonal, problem.bias, scale.gate)
    recorded = torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors)
    # In training a Gram matrix is that of this very pass.
    gram = None if not training and recorded else constants.gram
    path: Path | None = "loop" if diagnose else constants.path
    if path is None:
        batch = math.prod(problem.input.shape[: -len(operator.problem_dims)])
        size = solve_size(
            solver, operator, batch, sampling=sampling, prior=prior, known=problem.known, gate=scale.gate_kind
        )
        # With gradients, too, so that evaluation computes the same numbers.
        kept = not training and constants.collapsed is not None
        path = path_for(solver, size, gram_is_known=gram is not None and not training, kept=kept)
    dtype = problem.result or problem.dtype
    if path == "collapsed":
        keeper = None if training or recorded else constants.collapsed
        return _collapsed(problem, solver, scale, keeper, gram).to(dtype), None

    def run(keep_first: bool) -> Solution:
        draws = Draws(generator) if sampling else None
        if path != "loop" and runs_in_kernel(solver, problem, draws):
            return solve_in_kernel(solver, problem, path, draws, gram, keep_first)
        made = problem
        if path == "gram" and isinstance(operator, LinearMap):
            live = torch.is_grad_enabled() and operator.weight.requires_grad
            made = replace(problem, gram=problem.make_gram(None if live else gram))
        return solve(solver, made, draws=draws, diagnose=diagnose, keep_first=keep_first)

    keep_first = scale.blend is not None
    if solver.implicit:
        solution = solve_implicit(solver, problem, run=run, residual=constants.residual, keep_first=keep_first)
    else:
        solution = run(keep_first)
    scale = scale.observed(lambda: solution.argument, operator.feature_dim)
    if scale.is_one:
        result = solution.argument if output == "argument" else solution.value
    else:
        result = scale.of(solution.argument, solution.first, operator.per_feature)
        result = result if output == "argument" else prior.prox(result, 1.0)
    return result.to(dtype), solution.diagnostics


def _collapsed(
    problem: BlockProblem, solver: Solver, scale: Scale, keeper: Collapsed | None, gram: Tensor | None
) -> Tensor:
    """Returns the scaled argument of a solve without a prior, which is also its value."""
    operator, whole = problem.operator, scale.observer is None and not problem.known
    if problem.known:
        form: Any = lambda: (collapse_output(solver, problem, gram),)  # noqa: E731
    else:
        form = lambda: (_scaled_map(problem, solver, scale if whole else Scale(), gram),)  # noqa: E731
    if keeper is None or not (whole or problem.known):
        made = form()
    else:
        made = keeper.get(problem, scale if whole else Scale(gate=scale.gate), form)
    last = multiplied(problem, made[0]) if problem.known else applied(operator, problem.input, made[0])
    if whole:
        return last
    scale = scale.observed(lambda: last, operator.feature_dim)
    return scale.of(last, None if scale.blend is None else problem.first(problem.step), operator.per_feature)


def _check_input(input: Tensor, operator: LinearOperator, skip: Tensor | None) -> None:
    """Raises InputError or ShapeError for what the plain layer would not take, on every path of every solver."""
    if not isinstance(input, Tensor):
        raise InputError(f"Expected a tensor; found {type(input).__name__}.")
    weight = operator.weight
    autocast = autocasts(weight.device)
    if not input.is_floating_point() or (input.dtype != weight.dtype and not autocast):
        raise InputError(f"Expected an input in {weight.dtype}, the weight's dtype; found {input.dtype}.")
    if skip is not None:
        batch = tuple(input.shape[: input.dim() - len(operator.problem_dims)])
        shape = (*batch, *operator.output_shape)
        if tuple(skip.shape) != shape:
            raise ShapeError(f"Expected a skip of the output's shape {shape}; found {tuple(skip.shape)}.")
