"""Blocks as lines of text, so that a table of expected blocks can be read beside a model's source."""

import re

from torch import nn

from solver_plugins.surgery import Block, match, record


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
    if block.host != "linear":
        words.append(f"host={block.host}")
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


def table(model: nn.Module) -> list[str]:
    """Returns name and line of every block; equal lines of layers that differ by number are one row with a count."""
    counts: dict[str, int] = {}
    for block in match(record(model), model):
        row = f"{starred(block.name)}: {starred(line(block))}"
        counts[row] = counts.get(row, 0) + 1
    return [f"{count}x {row}" for row, count in counts.items()]
