"""What may change in a converted model, also during training: settings, step sizes, Gram matrices."""

from typing import Any

from torch import Tensor, nn

from solver_plugins.blocks.block import SolverBlock
from solver_plugins.blocks.gate import check_blend
from solver_plugins.blocks.install import require_blocks
from solver_plugins.errors import OptionError, SolverPluginsError
from solver_plugins.solve import SamplingConfig, Solver, check_gate


def set_blend(model: nn.Module, blend: float) -> None:
    """Sets the blend of every block: 0 is the original network, 1 the solver.

    A schedule may call it at every step: the number is a buffer, and compiled graphs stay as they are, once the model
    was converted with some ``blend`` below one.

    Raises:
        OptionError: If the model has no solver block, or the blend is not in [0, 1].
    """
    blocks = require_blocks(model)
    check_blend(blend)
    for block in blocks.values():
        block.set_blend(blend)


def set_iters(model: nn.Module, iters: int) -> None:
    """Sets how many proximal steps every block takes, in training and evaluation.

    Raises:
        OptionError: If the model has no solver block, or a block cannot take this many steps; nothing is changed then.
    """
    _set_option(require_blocks(model), "iters", iters)


def set_eval_mode(model: nn.Module, mode: str) -> None:
    """Sets what sampling solvers do in evaluation: "deterministic" full gradients, or "stochastic" as in training.

    Blocks whose solver is deterministic stay as they are.

    Raises:
        OptionError: If no block of the model has a sampling solver, or the mode is another one; nothing is changed
            then.
    """
    blocks = require_blocks(model)
    sampling = {name: block for name, block in blocks.items() if isinstance(block.solver.config, SamplingConfig)}
    if not sampling:
        kinds = ", ".join(sorted({block.solver.name for block in blocks.values()}))
        raise OptionError(f"Expected blocks that sample, such as those of proxsg; found {kinds}, always deterministic.")
    _set_option(sampling, "eval_mode", mode)


def _set_option(blocks: dict[str, SolverBlock], option: str, value: Any) -> None:
    made: dict[str, Solver] = {}
    for name, block in blocks.items():
        made[name] = type(block.solver).from_options(**{**block.solver.config.options(), option: value})
        made[name].check_prior(block.prior)
        if block.gate_kind is not None:
            check_gate(made[name], block.prior, block.gate_kind)
    for name, block in blocks.items():
        block.solver = made[name]
        block.collapsed.drop()


def refresh_steps(module: nn.Module, method: str = "certified", tolerance: float = 0.1) -> dict[str, Tensor]:
    """Recomputes the Lipschitz constant of every solver block from its current weights.

    Call it once per epoch for certified steps (as the paper does). Between calls, blocks track their weights by
    themselves in training; see :mod:`solver_plugins.blocks.stepsize`.

    Args:
        module: A block, or a model that contains blocks.
        method: "certified" (never below the truth, for any input size) or "power" (a lower bound).
        tolerance: How far above the truth a certified constant may be.

    Returns:
        The new ``lambda_max(A A^T)`` by module name ("" for a block itself).

    Raises:
        OptionError: If there is no block in the module, or the method is unknown.
        WeightError: If some weights are not finite, naming the block; no block is changed then.
    """
    blocks = require_blocks(module)
    computed = {}
    for name, block in blocks.items():
        try:
            computed[name] = block.compute_step(method, tolerance)
        except SolverPluginsError as error:
            raise type(error)(f"Block {name!r}: {error}" if name else str(error)) from None
    for name, values in computed.items():
        blocks[name].write_step(values)
    return {name: values["L"] for name, values in computed.items()}


def cache_gram(module: nn.Module) -> list[str]:
    """Computes ``A A^T`` of every block that can use it, once, for a model in evaluation.

    Every solve then takes products with a matrix of the outputs' size, instead of two products with the weight. The
    matrices are dropped by ``train()``, loading, ``refresh_steps`` and moving to another device or dtype; call this
    again after that.

    Args:
        module: A block, or a model that contains blocks, after ``eval()``.

    Returns:
        The names of the blocks that keep one ("" for a block itself); see
        :meth:`solver_plugins.blocks.SolverBlock.cache_gram` for which those are.

    Raises:
        OptionError: If there is no block in the module, or one is in training mode; no block is changed then.
    """
    blocks = require_blocks(module)
    training = [name for name, block in blocks.items() if block.training]
    if training:
        raise OptionError(f"A Gram matrix is kept in evaluation only; call eval() first (block {training[0]!r}).")
    return [name for name, block in blocks.items() if block.cache_gram()]
