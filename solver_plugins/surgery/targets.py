"""Layers named as in PEFT: by ends of names, by one regular expression, or by a function."""

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from solver_plugins.errors import did_you_mean
from solver_plugins.surgery.errors import TargetError
from solver_plugins.surgery.kinds import linear_like
from solver_plugins.surgery.parts import Block

Targets = str | Iterable[str] | Callable[[str, nn.Module], bool]
"""Layers as users name them."""


@dataclass(frozen=True)
class Target:
    """One way to name layers: ``label`` is its name in messages, ``matches`` tells by name and module what it means.

    ``text`` is the name, its end, or the regular expression (None for a function), which then means ``whole`` names.
    """

    label: str
    text: str | None
    matches: Callable[[str, nn.Module], bool]
    whole: bool = False


@dataclass(frozen=True)
class TargetList:
    """All targets of one option."""

    option: str
    targets: tuple[Target, ...]

    def matches(self, name: str, module: nn.Module) -> bool:
        return any(target.matches(name, module) for target in self.targets)

    def meets(self, block: Block) -> bool:
        return any(_meets(target, block) for target in self.targets)

    def check(
        self, chosen: Sequence[Block], blocks: Sequence[Block], rejected: dict[str, str], model: nn.Module | None
    ) -> None:
        """Raises TargetError if no block was chosen for some target."""
        problems = [
            _miss(target, blocks, rejected, model)
            for target in self.targets
            if not any(_meets(target, block) for block in chosen)
        ]
        if problems:
            raise TargetError(f"Targets that convert nothing:{''.join(problems)}")

    def check_met(self, blocks: Sequence[Block], model: nn.Module | None) -> None:
        """Raises TargetError if a target matches neither a block nor a module: probably a typing error."""
        modules = {} if model is None else dict(model.named_modules())
        for target in self.targets:
            if any(_meets(target, block) for block in blocks):
                continue
            if target.text is None or any(target.matches(name, module) for name, module in modules.items()):
                continue
            names = {block.name for block in blocks} | {name for name in modules if name}
            raise TargetError(f"{self.option}: {target.label} matches no layer.{_near(target, names)}")


def read_targets(given: Any, option: str) -> TargetList:
    """Reads targets as users give them; TargetError if they are of another kind, empty, or no regular expression."""
    if isinstance(given, str):
        try:
            expression = re.compile(given)
        except re.error as error:
            raise TargetError(f"{option}: {given!r} is not a regular expression: {error}.") from error
        return TargetList(option, (Target(f"the regular expression {given!r}", given, _whole(expression), whole=True),))
    if callable(given):
        return TargetList(option, (Target(f"the function {getattr(given, '__name__', given)!r}", None, given),))
    if not isinstance(given, Iterable):
        raise TargetError(
            f"Expected {option} to be a list of names, a regular expression or a function of name and module; "
            f"found {given!r}."
        )
    names = list(given)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise TargetError(f"Expected {option} to be a list of names that are not empty; found {names!r}.")
    return TargetList(option, tuple(Target(repr(name), name, _end(name)) for name in names))


def _whole(expression: re.Pattern[str]) -> Callable[[str, nn.Module], bool]:
    return lambda name, module: expression.fullmatch(name) is not None


def _end(end: str) -> Callable[[str, nn.Module], bool]:
    return lambda name, module: name == end or name.endswith(f".{end}")


def _meets(target: Target, block: Block) -> bool:
    return any(target.matches(name, block.module) for name in (block.name, *block.aliases))


def _miss(target: Target, blocks: Sequence[Block], rejected: dict[str, str], model: nn.Module | None) -> str:
    """Says what a target matched instead of a block that can be converted."""
    lines = [f"{block.name}: {rejected[block.name]}" for block in blocks if _meets(target, block)]
    modules = {} if model is None else {name: module for name, module in model.named_modules() if name}
    if not lines:
        lines = [
            f"{name}: a {type(module).__name__}, not a linear layer"
            for name, module in modules.items()
            if not linear_like(module) and target.matches(name, module)
        ]
    if not lines:
        names = {block.name for block in blocks} | {name for name, module in modules.items() if linear_like(module)}
        return f"\n  {target.label} matches no layer.{_near(target, names)}"
    shown = "".join(f"\n    - {line}" for line in lines[:5])
    more = f"\n    - and {len(lines) - 5} more" if len(lines) > 5 else ""
    return f"\n  {target.label} matches, but nothing that can be converted:{shown}{more}"


def _near(target: Target, names: Iterable[str]) -> str:
    text = target.text or ""
    full = sorted(name for name in names if name)
    if target.whole or "." in text:
        return _near_whole(text.replace("\\", ""), full)
    # Ends of names are what users type; all names of a large model would fill the screen.
    ends = {name.rpartition(".")[2] for name in full if not name.rpartition(".")[2].isdigit()}
    return did_you_mean(text, {*ends, *full} if len(full) <= 20 else ends or set(full[:20]))


def _near_whole(text: str, full: list[str]) -> str:
    """Returns near names for a text that means whole names, as an end alone would mean many more layers."""
    near = difflib.get_close_matches(text, full, n=3, cutoff=0.6)
    question = f" Did you mean {' or '.join(repr(name) for name in near)}?" if near else ""
    shown = full if len(full) <= 20 else full[:5]
    more = f" and {len(full) - len(shown)} more" if len(shown) < len(full) else ""
    return f"{question} Whole names are {', '.join(shown) or 'none'}{more}."
