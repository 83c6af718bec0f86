"""Which blocks a solver converts: its default patterns, and what the user asks for instead."""

import numbers
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from solver_plugins.errors import OptionError, did_you_mean
from solver_plugins.registry import SOLVERS
from solver_plugins.surgery.match import without_activation
from solver_plugins.surgery.parts import PATTERNS, Block, Pattern, Sampling
from solver_plugins.surgery.targets import Targets, read_targets

NonProx = Literal["keep", "skip"]

_KINDS: dict[str, Sampling] = {"nothing": "deterministic", "inputs": "sampling", "outputs": "coordinate"}
_DEFAULTS: dict[Sampling, frozenset[Pattern]] = {
    "deterministic": frozenset({"linear-act", "dropout-linear-act"}),
    "sampling": frozenset({"dropout-linear-act", "dropout-linear"}),
    "coordinate": frozenset({"linear-dropout-act"}),
}
_DEFAULTS_WITH_RATE: dict[Sampling, frozenset[Pattern]] = {
    "deterministic": frozenset(),
    "sampling": frozenset({"linear-act", "linear"}),
    "coordinate": frozenset({"linear-act", "dropout-linear-act"}),
}
"""What else is converted if the user gives a rate for layers without a dropout."""


@dataclass(frozen=True)
class Chosen:
    """A block to convert.

    Attributes:
        block: The block as it is converted: one that ends with the linear layer where its activation is no proximal
            map, or does not fit the solver.
        p: The rate to sample at: the user's, or that of the block's dropout; None for a solver that draws nothing.
    """

    block: Block
    p: float | None


@dataclass(frozen=True)
class Selection:
    """What a solver converts of a model.

    Attributes:
        chosen: The blocks to convert, in the order of the model.
        rejected: For the name of every other block, why not.
    """

    chosen: tuple[Chosen, ...]
    rejected: dict[str, str]

    @property
    def blocks(self) -> list[Block]:
        """The chosen blocks."""
        return [one.block for one in self.chosen]

    def explain(self, limit: int = 10) -> str:
        """Returns the reasons against the rejected blocks, blocks of the same reason together, for error messages."""
        groups: dict[str, list[str]] = {}
        for name, reason in self.rejected.items():
            groups.setdefault(reason, []).append(name)
        lines = []
        for reason, names in list(groups.items())[:limit]:
            more = f" and {len(names) - 2} more" if len(names) > 2 else ""
            lines.append(f"\n  - {', '.join(names[:2])}{more}: {reason}")
        left = f"\n  - and {len(groups) - limit} more reasons" if len(groups) > limit else ""
        return "".join(lines) + left


def select(
    blocks: Sequence[Block],
    solver: Any,
    pattern: str | Iterable[str] | None = None,
    p: float | None = None,
    nonprox: NonProx = "keep",
    last: bool | None = None,
    targets: Targets | None = None,
    exclude: Targets | None = None,
    *,
    model: nn.Module | None = None,
) -> Selection:
    """Chooses the blocks that a solver converts.

    Args:
        blocks: What :func:`~solver_plugins.surgery.match.match` found.
        solver: A solver, its class or its registered name, or what it draws: "nothing", "inputs" or "outputs".
        pattern: None for the solver's default patterns, "strict" for the paper's block alone, "all", or a list of
            patterns.
        p: A rate for a solver that samples: blocks without a dropout are converted, too, and all use this rate.
        nonprox: An activation that is no proximal map is left behind a block with ``g = 0`` ("keep"; that block has
            the pattern "linear" or "dropout-linear"), or its block is left alone ("skip").
        last: True also converts the classifier, False never does; None leaves it to the patterns.
        targets: Layers to convert: a list of names or their ends, one regular expression for the whole name, or a
            function of name and module. Each of them has to match.
        exclude: Layers to leave alone, in the same forms.
        model: The model; with it, a target that matches nothing is told what it met instead.

    Raises:
        UnknownNameError: For an unknown solver.
        OptionError: For an unknown pattern or option.
        TargetError: If a target converts nothing, with the reason for each layer that it met, or an exclusion meets
            nothing.
    """
    kind = _kind_of(solver)
    wanted = _wanted(kind, pattern, p)
    _check_options(kind, p, nonprox)
    wish = None if targets is None else read_targets(targets, "targets")
    ban = None if exclude is None else read_targets(exclude, "exclude")
    chosen: list[Chosen] = []
    rejected: dict[str, str] = {}
    for block in blocks:
        if wish is not None and not wish.meets(block):
            rejected[block.name] = "not among the targets"
        elif ban is not None and ban.meets(block):
            rejected[block.name] = "excluded"
        else:
            result = _fit(block, kind, wanted, p, nonprox, last, named=pattern is not None)
            if isinstance(result, str):
                rejected[block.name] = result
            else:
                chosen.append(result)
    if wish is not None:
        wish.check([one.block for one in chosen], blocks, rejected, model)
    if ban is not None:
        ban.check_met(blocks, model)
    return Selection(tuple(chosen), rejected)


def _kind_of(solver: Any) -> Sampling:
    if isinstance(solver, str) and solver not in _KINDS:
        solver = SOLVERS.get(solver)
    samples = solver if isinstance(solver, str) else getattr(solver, "samples", None)
    if samples not in _KINDS:
        raise OptionError(
            f"Expected a solver, or what it draws ({', '.join(repr(name) for name in _KINDS)}); found {solver!r}."
        )
    return _KINDS[samples]


def _wanted(kind: Sampling, pattern: str | Iterable[str] | None, p: float | None) -> frozenset[Pattern]:
    if pattern is None:
        return _DEFAULTS[kind] | (_DEFAULTS_WITH_RATE[kind] if p is not None else frozenset())
    if pattern == "strict":
        return frozenset({"dropout-linear-act"})
    if pattern == "all":
        return frozenset(PATTERNS)
    names = [pattern] if isinstance(pattern, str) else list(pattern)
    for name in names:
        if name not in PATTERNS:
            raise OptionError(f"Unknown pattern {name!r}.{did_you_mean(str(name), [*PATTERNS, 'strict', 'all'])}")
    return frozenset(name for name in PATTERNS if name in names)


def _check_options(kind: Sampling, p: float | None, nonprox: str) -> None:
    if nonprox not in ("keep", "skip"):
        raise OptionError(f"Expected nonprox to be 'keep' or 'skip'; found {nonprox!r}.")
    if p is not None and kind == "deterministic":
        raise OptionError("A deterministic solver draws nothing, so p= has no meaning for it; drop it.")
    if p is not None and (isinstance(p, bool) or not isinstance(p, numbers.Real) or not 0 <= p < 1):
        raise OptionError(f"Expected a rate p in [0, 1); found {p!r} ({type(p).__name__}).")


def _fit(
    block: Block,
    kind: Sampling,
    wanted: frozenset[Pattern],
    p: float | None,
    nonprox: NonProx,
    last: bool | None,
    named: bool,
) -> Chosen | str:
    """Returns the block as a solver of this kind takes it, or why it does not."""
    if kind not in block.convertible:
        return "; ".join(block.reasons)
    if last is False and block.is_last:
        return "the classifier, and last=False"
    if block.prior is None and nonprox == "skip":
        return f"nonprox='skip': {block.nonprox_reason}"
    fitted = _as_taken(block, kind)
    if fitted.pattern not in wanted and not (last is True and block.is_last):
        return _not_wanted(block, fitted, kind, named)
    if kind == "deterministic":
        return Chosen(fitted, None)
    own = fitted.dropout.p if fitted.dropout is not None and fitted.dropout.after == (kind == "coordinate") else None
    rate = own if p is None else p
    if rate is None:
        return "no dropout whose rate a sampling solver could take; give one with p="
    return Chosen(fitted, rate)


def _as_taken(block: Block, kind: Sampling) -> Block:
    if block.prior is None:
        label = block.activation.label if block.activation is not None else "its activation"
        return without_activation(block, f"{label} is no proximal map and stays behind the block, which ends before it")
    if block.pattern == "linear-dropout-act" and kind != "coordinate":
        return without_activation(block, "the dropout behind the layer stays, so the block ends before it")
    return block


def _not_wanted(block: Block, fitted: Block, kind: Sampling, named: bool) -> str:
    what = f"pattern {fitted.pattern!r} is"
    if block.prior is None:
        what = f"{block.nonprox_reason} What is left, pattern {fitted.pattern!r}, is"
    if named:
        return f"{what} not among the patterns asked for"
    what = f"{what} not converted by {kind} solvers by default"
    if fitted.pattern in _DEFAULTS_WITH_RATE[kind]:
        where = "behind" if kind == "coordinate" else "before"
        return f"{what}, as it has no dropout {where} it; give a rate with p={_aside(block)}"
    part = fitted.dropout
    rate = kind == "deterministic" or (part is not None and part.after == (kind == "coordinate"))
    return f"{what}; ask for it with pattern={fitted.pattern!r}{'' if rate else ' and p='}{_aside(block)}"


def _aside(block: Block) -> str:
    """Returns why the pattern is no longer; names are as seen from the layer, so that layers in like places agree."""
    if block.activation is not None or not block.notes:
        return ""
    text = "; ".join(block.notes)
    scope = block.name
    while "." in scope:
        scope = scope.rpartition(".")[0]
        # What is left of a name has to be one: not the number of a neighbour.
        text = re.sub(rf"'{re.escape(scope)}\.(?=[^\d'][^']*')", "'", text).replace(f" in '{scope}'", "")
    return f" ({text})"


__all__ = ["Chosen", "NonProx", "Selection", "select"]
