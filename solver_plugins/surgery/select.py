"""Which blocks a solver converts: its default patterns, and what the user asks for instead."""

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from solver_plugins.solve import RateConfig
from solver_plugins.surgery.errors import listing, option
from solver_plugins.surgery.parts import CALLED, PATTERNS, SCALE_PATTERNS, Block, DropoutPart, Pattern, Samples
from solver_plugins.surgery.spec import ConversionSpec
from solver_plugins.surgery.targets import read_targets

HEAD_RATE = 0.5
"""The paper's rate, at which a head is sampled that has no dropout of its own."""
_DEFAULTS: dict[Samples, frozenset[Pattern]] = {
    "nothing": frozenset({"linear-act", "dropout-linear-act"}),
    "inputs": frozenset({"dropout-linear-act", "dropout-linear"}),
    "outputs": frozenset({"linear-dropout-act"}),
}
_TARGETS_WITH_RATE: dict[Samples, frozenset[Pattern]] = {
    "nothing": frozenset(),
    "inputs": frozenset({"linear-act", "linear"}),
    "outputs": frozenset({"linear-act", "dropout-linear-act"}),
}
"""What else is converted if the user names layers and gives a rate for those without a dropout."""
_LOOKED_FOR: dict[Samples, str] = {
    "nothing": "linear layer that an activation follows which is a proximal map",
    "inputs": "linear layer behind a dropout with a rate above zero",
    "outputs": "dropout with a rate above zero between a linear layer and its activation",
}
"""What the default patterns of a solver need, in a sentence."""
_HIDDEN: frozenset[Pattern] = frozenset({"linear-act", "dropout-linear-act"})


@dataclass(frozen=True)
class Chosen:
    """A block as it is converted: it ends with the linear layer if its activation does not fit the solver.

    ``p`` is the rate to sample at: the user's, or that of its dropout; None for a solver that draws nothing.
    """

    block: Block
    p: float | None


@dataclass(frozen=True)
class Selection:
    """What a solver converts of a model: ``chosen`` blocks in its order, and why each other one is ``rejected``.

    ``warning`` tells the user that the default patterns met nothing and the head is converted in their place.
    """

    chosen: tuple[Chosen, ...]
    rejected: dict[str, str]
    warning: str | None = None

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

    TargetError if a target converts nothing, with the reason for each layer that it matched, or an exclusion matches
    nothing. With the model, it says what the target matched instead.
    """
    wish = None if spec.targets is None else read_targets(spec.targets, "targets")
    ban = None if spec.exclude is None else read_targets(spec.exclude, "exclude")
    open_to, rejected = [], {}
    for block in blocks:
        if wish is not None and not wish.meets(block):
            rejected[block.name] = "not among the targets"
        elif ban is not None and ban.meets(block):
            rejected[block.name] = "excluded"
        else:
            open_to.append(block)
    wanted = _wanted(spec)
    fits = {block.name: _fit(block, spec, wanted) for block in open_to}
    selection = _selection(blocks, fits, rejected, spec.samples)
    if wish is not None:
        wish.check(selection.blocks, blocks, selection.rejected, model)
    if ban is not None:
        ban.check_met(blocks, model)
    if selection.chosen or not by_default(spec):
        return selection
    whole = any(block.is_last or block.feeds_last for block in blocks)
    found_head = _head(open_to, spec) if whole else _end(open_to, spec)
    head = {name: one for name, one in found_head.items() if not isinstance(one, str)}
    found = _selection(blocks, {**selection.rejected, **head}, rejected, spec.samples)
    return dataclasses.replace(found, warning=_warning(found, spec)) if found.chosen else selection


def by_default(spec: ConversionSpec) -> bool:
    """Whether a spec leaves it to the solver which layers are converted."""
    return spec.pattern is None and spec.targets is None


def nothing_by_default(blocks: Sequence[Block], spec: ConversionSpec, rejected: Mapping[str, str]) -> str:
    """Says in one line why a solver finds nothing to convert by itself, and which option helps.

    ``rejected`` says why each block was left.
    """
    why = {name: one for name, one in _head(blocks, spec).items() if isinstance(one, str)}
    lasts = [block for block in blocks if block.is_last]
    # The reason of one layer says more than none; a report has them all.
    near = next((f" ({name!r}: {reason})" for name, reason in rejected.items()), "")
    head = f"and no classifier that it could convert in its place{near}"
    if lasts:
        name = lasts[-1].name
        head = f"and its classifier {name!r} cannot be taken in its place: {why.get(name, 'excluded')}"
    rate = "" if spec.samples == "nothing" else f" and a rate with {option('p')}"
    return f" it has no {_LOOKED_FOR[spec.samples]}, {head}. Name layers with {option('targets')}{rate}; {listing()}."


def _selection(
    blocks: Sequence[Block], fits: dict[str, Chosen | str], rejected: dict[str, str], samples: Samples
) -> Selection:
    """Puts together what was chosen, without blocks that meet their shared dropout only through a view."""
    fits = {**rejected, **fits}
    chosen = [one for block in blocks if isinstance(one := fits[block.name], Chosen)]
    why = {block.name: one for block in blocks if isinstance(one := fits[block.name], str)}
    while short := [(one, part) for one, part in still_needed(chosen, samples) if part.name is None or not part.direct]:
        for one, part in short:
            why[one.block.name] = (
                f"its dropout {part.name!r} also serves a layer that is not converted, and shape operations stand "
                "between it and this layer; convert the other one too"
                if part.name is not None
                else f"{part.attribute!r} also steers the dropout of a layer that is not converted; convert that, too"
            )
            chosen.remove(one)
    return Selection(tuple(chosen), why)


def still_needed(chosen: Sequence[Chosen], samples: Samples) -> list[tuple[Chosen, DropoutPart]]:
    """Returns the blocks whose dropout also serves layers that are not converted."""
    parts = [(one, part) for one in chosen if (part := one.block.dropout_for(samples)) is not None]
    calls: dict[str | None, set[int]] = {}
    for _, part in parts:
        calls.setdefault(part.name or part.attribute, set()).update(part.calls)
    return [(one, part) for one, part in parts if len(calls[part.name or part.attribute]) < part.sites]


def _wanted(spec: ConversionSpec) -> frozenset[Pattern]:
    if spec.pattern is None:
        more = _TARGETS_WITH_RATE[spec.samples] if spec.p is not None and spec.targets is not None else frozenset()
        return _DEFAULTS[spec.samples] | more
    if spec.pattern == "strict":
        return frozenset({"dropout-linear-act"})
    names = (spec.pattern,) if isinstance(spec.pattern, str) else spec.pattern
    return frozenset(name for name in PATTERNS if name in names or spec.pattern == "all")


def _head(blocks: Sequence[Block], spec: ConversionSpec) -> dict[str, Chosen | str]:
    """Returns the classifier and a hidden linear -> activation of its head as a solver takes them, or why not.

    A coordinate solver takes the hidden layer alone, if there is one: it draws what an activation follows.
    """
    rated = _rated(spec)
    hidden: dict[str, Chosen | str] = {}
    last: dict[str, Chosen | str] = {}
    for block in blocks:
        if not (block.feeds_last or block.is_last):
            continue
        dropped = block.dropped.get(spec.samples)
        result = _fit(block, rated, _HIDDEN if block.feeds_last else frozenset(PATTERNS))
        if dropped is not None and not isinstance(result, str):
            result = f"{dropped} drops its {spec.samples} as well, and a solver could not take that over"
        (hidden if block.feeds_last else last)[block.name] = result
    alone = spec.samples == "outputs" and any(isinstance(one, Chosen) for one in hidden.values())
    return hidden if alone else hidden | last


def _end(blocks: Sequence[Block], spec: ConversionSpec) -> dict[str, Chosen | str]:
    """Returns the last layer that a solver can take in a backbone without a classifier; nothing if there is none."""
    patterns = frozenset(PATTERNS) - set(SCALE_PATTERNS)
    fits = ((block, _fit(block, _rated(spec), patterns)) for block in reversed(blocks))
    free = (pair for pair in fits if isinstance(pair[1], Chosen) and spec.samples not in pair[0].dropped)
    return {block.name: result for block, result in itertools.islice(free, 1)}


def _rated(spec: ConversionSpec) -> ConversionSpec:
    return spec if spec.samples == "nothing" or spec.p is not None else spec.model_copy(update={"p": HEAD_RATE})


def _warning(found: Selection, spec: ConversionSpec) -> str:
    names = " and ".join(repr(block.name) for block in found.blocks)
    what = "classifier" if all(block.is_last for block in found.blocks) else "head"
    if not any(block.is_last or block.feeds_last for block in found.blocks):
        what = "last layer (it has no classifier)"
    rate = ""
    choose = f"Choose layers with {option('targets')} or {option('pattern')}"
    if spec.samples != "nothing" and issubclass(spec.solver_class.Config, RateConfig):
        rate = f" at a rate of {found.chosen[0].p:g}"
        choose = f"Choose the rate with {option('p')}, layers with {option('targets')} or {option('pattern')}"
    return (
        f"This model has no {_LOOKED_FOR[spec.samples]}, so {spec.solver!r} converts its {what}, {names}"
        f"{rate}. {choose}; {listing()}."
    )


def _fit(block: Block, spec: ConversionSpec, wanted: frozenset[Pattern]) -> Chosen | str:
    """Returns the block as the solver takes it, or why it does not."""
    samples = spec.samples
    if samples not in block.convertible:
        return "; ".join(block.reasons)
    if spec.last is False and block.is_last:
        return f"the classifier, and {option('last', False)}"
    if block.prior is None and spec.nonprox == "skip":
        return f"{option('nonprox', 'skip')}: {block.nonprox_reason}"
    fitted = _as_taken(block, samples)
    if fitted.pattern not in wanted and not (spec.last is True and block.is_last):
        return _not_wanted(block, fitted, spec)
    if samples == "nothing":
        return Chosen(fitted, None)
    dropout = fitted.dropout_for(samples)
    if spec.p is None and dropout is None:
        return f"no dropout whose rate a sampling solver could take; give one with {option('p')}"
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


def _not_wanted(block: Block, fitted: Block, spec: ConversionSpec) -> str:
    samples = spec.samples
    what = f"pattern {fitted.pattern!r} is"
    if block.prior is None:
        what = f"{block.nonprox_reason} What is left, pattern {fitted.pattern!r}, is"
    if spec.pattern is not None:
        return f"{what} not among the patterns asked for"
    what = f"{what} not converted by {CALLED[samples]} solvers by default"
    if fitted.pattern in _TARGETS_WITH_RATE[samples]:
        where = "behind" if samples == "outputs" else "before"
        name = "" if spec.targets is not None else f"name it with {option('targets')} and "
        return f"{what}, as it has no dropout {where} it; {name}give a rate with {option('p')}{_aside(block)}"
    rate = samples == "nothing" or fitted.dropout_for(samples) is not None
    ask = f"ask for it with {option('pattern', fitted.pattern)}{'' if rate else ' and ' + option('p')}"
    return f"{what}; {ask}{_aside(block)}"


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
