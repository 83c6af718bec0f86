"""Settings of a converted model that may change after the conversion, and during training."""

from typing import Any

from torch import nn

from solver_plugins.blocks.block import SolverBlock
from solver_plugins.blocks.install import require_blocks
from solver_plugins.blocks.scale import check_blend
from solver_plugins.errors import OptionError
from solver_plugins.solve import SamplingConfig, Solver, check_gate


def set_blend(model: nn.Module, blend: float) -> None:
    """Sets how much of the solver there is in every block: 0 is the original network, 1 the solver.

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
