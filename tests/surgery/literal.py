"""The call that a newcomer types, on any model: what it converts, at which rates, from where; and the way back."""

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from solver_plugins import conversion_of, convert_model, revert_model
from solver_plugins.blocks import PassThrough, RoutedDropout, blocks_of
from solver_plugins.surgery import DefaultsWarning


@dataclass(frozen=True)
class Literal:
    """What ``convert_model(model, solver="proxsg", iters=10)`` did.

    Attributes:
        rates: The rate of each block, by the name of its layer.
        source: Where the rates are from: "dropouts" (modules), "functions" (or both), or "head" where none was live.
        attributes: The attributes whose rates were taken over.
        warning: What was said.
    """

    rates: dict[str, float | None]
    source: str
    attributes: dict[str, float]
    warning: str | None


def numbers_of(model: nn.Module) -> dict[str, Any]:
    """Returns every number that a module of a model holds as an attribute, and the class of each module."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        found[name] = type(module)
        for key, value in vars(module).items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                found[f"{name}.{key}"] = value
    return found


def literal_call(model: nn.Module, solver: str = "proxsg", **options: Any) -> Literal:
    """Converts a model as a newcomer does, reverts it, and checks that all its numbers are what they were.

    Args:
        model: Any model; it is as it was afterwards.
        solver: The solver.
        options: More arguments, such as ``example_inputs`` where the library cannot know them.

    Raises:
        SolverPluginsError: If it cannot be converted.
        AssertionError: If no block was made, something was said more than once, or reverting is not exact.
    """
    before = numbers_of(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = convert_model(model, solver=solver, iters=10, **options)
    said = [str(one.message) for one in caught if issubclass(one.category, DefaultsWarning)]
    blocks, conversion = blocks_of(made), conversion_of(made)
    assert made is model and blocks and len(said) <= 1
    assert all(
        vars(made.get_submodule(path.rpartition(".")[0]))[path.rpartition(".")[2]] == 0 for path in conversion.rates
    )
    replaced = [one for one in made.modules() if isinstance(one, (PassThrough, RoutedDropout))]
    assert bool(said) != bool(replaced or conversion.rates) or solver == "proxgd"
    rates = {name: getattr(block.solver.config, "p", None) for name, block in blocks.items()}
    revert_model(made)
    assert numbers_of(made) == before
    source = "head" if said else "functions" if conversion.rates else "dropouts"
    return Literal(rates, source, conversion.rates, said[0] if said else None)


def outputs_of(model: nn.Module, inputs: Any, training: bool) -> torch.Tensor:
    """Returns the logits of a model, with reproducible dropout."""
    torch.manual_seed(0)
    model.train(training)
    result = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    return result if isinstance(result, torch.Tensor) else result.logits
