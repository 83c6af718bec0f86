"""Step sizes and Gram matrices of a whole model at once."""

from torch import Tensor, nn

from solver_plugins.blocks.install import require_blocks
from solver_plugins.errors import OptionError, SolverPluginsError


def refresh_steps(module: nn.Module, method: str = "certified", tolerance: float = 0.1) -> dict[str, Tensor]:
    """Recomputes the Lipschitz constant of every solver block, from the weights as they are now.

    Call it once per epoch for certified steps (as the paper does). Blocks also follow their weights by themselves in
    training; see :mod:`solver_plugins.blocks.stepsize`.

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
