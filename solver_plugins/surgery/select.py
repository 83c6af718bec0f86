"""Which blocks a solver converts: its default patterns, and what the user asks for instead."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from solver_plugins.surgery.parts import CALLED, PATTERNS, Block, Pattern, Samples
from solver_plugins.surgery.spec import ConversionSpec
from solver_plugins.surgery.targets import read_targets

_DEFAULTS: dict[Samples, frozenset[Pattern]] = {
    "nothing": frozenset({"linear-act", "dropout-linear-act"}),
    "inputs": frozenset({"dropout-linear-act", "dropout-linear"}),
    "outputs": frozenset({"linear-dropout-act"}),
}
_DEFAULTS_WITH_RATE: dict[Samples, frozenset[Pattern]] = {
    "nothing": frozenset(),
    "inputs": frozenset({"linear-act", "linear"}),
    "outputs": frozenset({"linear-act", "dropout-linear-act"}),
}
"""What else is converted if the user gives a rate for layers without a dropout."""


@dataclass(frozen=True)
class Chosen:
    """A block to convert.

    Attributes:
        block: The block as it is converted: it ends with the linear layer if its activation is not a proximal map, or
            does not fit the solver.
        p: The rate to sample at: the user's, or that of the block's dropout; None for a solver that draws nothing.
    """

    block: Block
    p: float | None


@dataclass(frozen=True)
class Selection:
    """What a solver converts of a model.

    Attributes:
        chosen: The blocks to convert, in the order of the model.
        rejected: Why each other block is not converted, by its name.
    """

    chosen: tuple[Chosen, ...]
    rejected: dict[str, str]

    @property
    def blocks(self) -> list[Block]:
        """The chosen blocks."""
        return [one.block for one in self.chosen]

    def explain(self, limit: int = 10) -> str:
        """Returns why blocks were rejected, for error messages; blocks with the same reason share a line."""
        groups: dict[str, list[str]] = {}
        for name, reason in self.rejected.items():
            groups.setdefault(reason, []).append(name)
        lines = []
        for reason, names in list(groups.items())[:limit]:
            more = f" and {len(names) - 2} more" if len(names) > 2 else ""
            lines.append(f"\n  - {', '.join(names[:2])}{more}: {reason}")
        left = f"\n  - and {len(groups) - limit} more reasons" if len(groups) > limit else ""
        return "".join(lines) + left


def select(blocks: Sequence[Block], spec: ConversionSpec, model: nn.Module | None = None) -> Selection:
    """Chooses the blocks that a spec converts.

    Args:
        blocks: What :func:`~solver_plugins.surgery.match.match` found.
        spec: What is asked for.
        model: The model; with it, the error about a target says what the target matched instead.

    Raises:
        TargetError: If a target converts nothing, with the reason for each layer that it matched, or an exclusion
            matches nothing.
    """
    wish = None if spec.targets is None else read_targets(spec.targets, "targets")
    ban = None if spec.exclude is None else read_targets(spec.exclude, "exclude")
    wanted = _wanted(spec)
    chosen: list[Chosen] = []
    rejected: dict[str, str] = {}
    for block in blocks:
        if wish is not None and not wish.meets(block):
            rejected[block.name] = "not among the targets"
        elif ban is not None and ban.meets(block):
            rejected[block.name] = "excluded"
        else:
            result = _fit(block, spec, wanted)
            if isinstance(result, str):
                rejected[block.name] = result
            else:
                chosen.append(result)
    if wish is not None:
        wish.check([one.block for one in chosen], blocks, rejected, model)
    if ban is not None:
        ban.check_met(blocks, model)
    return Selection(tuple(chosen), rejected)


def _wanted(spec: ConversionSpec) -> frozenset[Pattern]:
    if spec.pattern is None:
        more = _DEFAULTS_WITH_RATE[spec.samples] if spec.p is not None else frozenset()
        return _DEFAULTS[spec.samples] | more
    if spec.pattern == "strict":
        return frozenset({"dropout-linear-act"})
    names = (spec.pattern,) if isinstance(spec.pattern, str) else spec.pattern
    return frozenset(name for name in PATTERNS if name in names or spec.pattern == "all")


def _fit(block: Block, spec: ConversionSpec, wanted: frozenset[Pattern]) -> Chosen | str:
    """Returns the block as the solver takes it, or why it does not."""
    samples = spec.samples
    if samples not in block.convertible:
        return "; ".join(block.reasons)
    if spec.last is False and block.is_last:
        return "the classifier, and last=False"
    if block.prior is None and spec.nonprox == "skip":
        return f"nonprox='skip': {block.nonprox_reason}"
    fitted = _as_taken(block, samples)
    if fitted.pattern not in wanted and not (spec.last is True and block.is_last):
        return _not_wanted(block, fitted, samples, named=spec.pattern is not None)
    if samples == "nothing":
        return Chosen(fitted, None)
    dropout = fitted.dropout_for(samples)
    if spec.p is None and dropout is None:
        return "no dropout whose rate a sampling solver could take; give one with p="
    return Chosen(fitted, dropout.p if spec.p is None and dropout is not None else spec.p)


def _as_taken(block: Block, samples: Samples) -> Block:
    if block.prior is None:
        label = block.activation.label if block.activation is not None else "its activation"
        return block.without_activation(
            f"{label} is not a proximal map and stays behind the block, which ends before it"
        )
    if block.pattern == "linear-dropout-act" and samples != "outputs":
        return block.without_activation("the dropout behind the layer stays, so the block ends before it")
    return block


def _not_wanted(block: Block, fitted: Block, samples: Samples, named: bool) -> str:
    what = f"pattern {fitted.pattern!r} is"
    if block.prior is None:
        what = f"{block.nonprox_reason} What is left, pattern {fitted.pattern!r}, is"
    if named:
        return f"{what} not among the patterns asked for"
    what = f"{what} not converted by {CALLED[samples]} solvers by default"
    if fitted.pattern in _DEFAULTS_WITH_RATE[samples]:
        where = "behind" if samples == "outputs" else "before"
        return f"{what}, as it has no dropout {where} it; give a rate with p={_aside(block)}"
    rate = samples == "nothing" or fitted.dropout_for(samples) is not None
    return f"{what}; ask for it with pattern={fitted.pattern!r}{'' if rate else ' and p='}{_aside(block)}"


def _aside(block: Block) -> str:
    """Returns why no longer pattern matched. Names are relative to the layer, so that similar layers share a reason."""
    if block.activation is not None or not block.notes:
        return ""
    text = "; ".join(block.notes)
    scope = block.name
    while "." in scope:
        scope = scope.rpartition(".")[0]
        # What is left must be a name, not the number of a neighbour.
        text = re.sub(rf"'{re.escape(scope)}\.(?=[^\d'][^']*')", "'", text).replace(f" in '{scope}'", "")
    return f" ({text})"
