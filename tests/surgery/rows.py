"""Blocks as lines of text, so that a table of expected blocks can be read beside a model's source."""

import re

from torch import nn

from solver_plugins.surgery import Block, ConversionSpec, match, plan_conversion, record


def line(block: Block) -> str:
    """Everything that the matcher says of a block, in one line; names of its own scope are shortened."""
    words = [block.pattern]
    if block.dropout is not None:
        kind = block.dropout.name or "functional"
        words.append(f"drop={kind}:{block.dropout.ownership}:{block.dropout.p:.0%}")
    if block.norm is not None:
        words.append(f"norm={block.norm.name}:{block.norm.kind}")
    if block.skip is not None:
        words.append(f"skip={block.skip.operand}:{block.skip.source}")
    if block.activation is not None:
        prior = block.prior.name if block.prior is not None else "nonprox"
        words.append(f"act={block.activation.name or 'functional'}:{block.activation.label}:{prior}")
    if block.outlet != "linear":
        words.append(f"outlet={block.outlet}")
    if block.is_last:
        words.append("last")
    if len(block.convertible) < 3:
        words.append("only=" + (",".join(sorted(block.convertible)) or "none"))
    words.extend(f"[{reason}]" for reason in block.reasons)
    words.extend(f"({note})" for note in block.notes)
    scope = block.name.rpartition(".")[0]
    text = " ".join(words)
    return text.replace(f"{scope}.", "~.") if scope else text


def starred(text: str) -> str:
    """Numbers inside of names become stars."""
    return re.sub(r"(?<=\.)\d+(?=[.'\s:)]|$)", "*", text)


def read_sections(text: str) -> dict[str, list[str]]:
    """Returns the rows under each ``== heading``; a row ``$word = text`` is put in for that word from there on."""
    sections: dict[str, list[str]] = {}
    words: dict[str, str] = {}
    rows: list[str] = []
    for row in text.splitlines():
        if row.startswith("== "):
            rows = sections[row[3:]] = []
        elif row.startswith("$"):
            word, _, meaning = row.partition(" = ")
            words[word] = meaning
        elif row and not row.startswith("#"):
            rows.append(re.sub(r"\$\w+", lambda found: words[found.group()], row))
    return sections


def table(model: nn.Module) -> list[str]:
    """Returns name and line of every block; equal lines of layers that differ by number are one row with a count."""
    counts: dict[str, int] = {}
    for block in match(record(model), model):
        row = f"{starred(block.name)}: {starred(line(block))}"
        counts[row] = counts.get(row, 0) + 1
    return [f"{count}x {row}" for row, count in counts.items()]


KINDS = {"deterministic": "proxgd", "sampling": "proxsg", "coordinate": "rcd"}
"""A solver of each kind."""


def selection_table(model: nn.Module) -> list[str]:
    """Returns what solvers of each kind take of a model by default, and what they leave, for which reason.

    Layers of one pattern, or one reason, are one row. Why a pattern is no longer stands in :func:`table`.
    """
    rows: list[str] = []
    for kind, solver in KINDS.items():
        plan = plan_conversion(model, ConversionSpec(solver=solver, iters=2))
        taken: dict[str, dict[str, int]] = {}
        for one in plan.selection.chosen:
            rate = "" if one.p is None else f" at {one.p:.0%}"
            _count(taken, f"{one.block.pattern}{rate}", one.block.name)
        left: dict[str, dict[str, int]] = {}
        for name, reason in plan.selection.rejected.items():
            reason = reason.partition(" (")[0] if reason.startswith("pattern ") else reason
            _count(left, re.sub(r"'[^']*'", lambda found: starred(found.group()), reason), name)
        for verb, groups in (("takes", taken), ("leaves", left)):
            for why, names in groups.items():
                listed = ", ".join(f"{count}x {name}" for name, count in names.items())
                rows.append(f"{kind} {verb} {listed}: {why}")
    return rows


def _count(groups: dict[str, dict[str, int]], group: str, name: str) -> None:
    names = groups.setdefault(group, {})
    names[starred(name)] = names.get(starred(name), 0) + 1
