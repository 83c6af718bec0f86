"""The results of many models as a Markdown page."""

import statistics
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from solver_plugins.surgery.parts import PATTERNS
from tests.coverage.result import CHECKS, ITERS, TOLERANCE

Result = Mapping[str, Any]
WIDTH = 100
"""Of a line of text."""
_STEPS = ("built", "fed", "ran")
_PACKAGE = "needs a package that is not installed"
_REACHED = (
    "Built: a small config was found. Fed: the plain model runs with some inputs; they are automatic if they are made "
    "from what the class says. Ran: its passes in both modes are finite. Generate: of the classes whose plain model "
    "generates, those whose scores and tokens are the same at one iteration."
)
_LIBRARIES = ("timm", "transformers")
_WHAT = {
    "timm": "every model of `timm.list_models()`",
    "transformers": "every class of transformers' auto mappings with a small config",
}
_MEANING = {
    "walked": "the forward pass is recorded and its blocks are found",
    "converted": '`convert_model(model, solver="proxgd", iters=1, pattern="all")` converts',
    "keys": "state-dict keys, shapes and dtypes, the Parameter objects and the classes are the same",
    "eval": "one iteration gives the plain model's output in evaluation mode",
    "train": "and in training mode, with dropout off",
    "gradients": "and its gradients, of every Parameter",
    "statistics": "and the norms' statistics after a training pass",
    "reference": f"at {ITERS} iterations every block agrees with a reference that knows only the plain modules",
    "backward": f"gradients at {ITERS} iterations are finite",
    "saved": "weights as safetensors and the conversion as JSON give the same network again",
    "generated": "`generate` of one iteration gives the plain model's scores and tokens, with its cache",
    "reverted": "after `revert_model` classes and attributes are the old ones, and the output is the same bit for bit",
}


def page(rows: Iterable[Result], versions: Mapping[str, str], date: str, first: Sequence[str] = ()) -> str:
    """Returns the page.

    Args:
        rows: Results, one per model.
        versions: Of the libraries.
        date: When the results were made.
        first: Lines of the section about a newcomer's call.
    """
    rows = sorted(rows, key=lambda row: (row["library"], row["family"], row["name"]))
    libraries = {row["library"] for row in rows}
    what = " and ".join(_WHAT[name] for name in _LIBRARIES if name in libraries)
    name = "" if len(libraries) != 1 else f" of {libraries.pop()}"
    parts = [
        f"# Coverage{name}",
        "",
        f"{what[:1].upper()}{what[1:]}. Written by `python -m tests.coverage`; do not edit.",
        "",
        f"{date}; " + ", ".join(f"{name} {version}" for name, version in versions.items()) + ".",
        "",
        *_totals(rows),
        *_tasks(rows),
        *first,
        *_families(rows),
        *_left(rows),
        *_reduced(rows),
        *_same(rows),
        *_without(rows),
        *_failures(rows),
        *_foreign(rows),
        *_silent(rows),
    ]
    return "\n".join(wrapped for line in parts for wrapped in _wrapped(line)).rstrip() + "\n"


def _wrapped(line: str) -> list[str]:
    """Returns a line of text as lines that are not too long; those of tables stay as they are."""
    if line.startswith("|") or len(line) <= WIDTH:
        return [line]
    indent = "  " if line.startswith("- ") else ""
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _table(heading: Sequence[str], lines: Iterable[Sequence[Any]], right: int = 1) -> list[str]:
    rule = ["---"] * right + ["---:"] * (len(heading) - right)
    rows = [heading, rule, *lines]
    return [f"| {' | '.join(str(cell) for cell in row)} |" for row in rows] + [""]


def _eligible(rows: Sequence[Result], check: str) -> list[Result]:
    """Returns the rows that a check is asked of: those with a block, and for walking all that run here."""
    ours = [row for row in rows if not row["foreign"]]
    return ours if check == "walked" else [row for row in ours if row["blocks"] or "walked" not in row["passed"]]


def _totals(rows: Sequence[Result]) -> list[str]:
    lines, groups = [], {library: [row for row in rows if row["library"] == library] for library in _LIBRARIES}
    groups = {library: members for library, members in groups.items() if members}
    for check in CHECKS:
        cells = []
        for members in groups.values():
            asked = _eligible(members, check)
            passed = sum(check in row["passed"] for row in asked)
            # Without a norm that keeps statistics there is nothing to compare, and the check holds.
            errors = [row["errors"][check] for row in asked if check in row["errors"]]
            cells += [f"{passed}/{len(asked)}", f"{max(errors):.1e}" if errors else ""]
        lines.append([f"**{check}**: {_MEANING[check]}", *cells])
    heading = ["check", *(cell for library in groups for cell in (library, "largest error"))]
    counts = [
        f"{library}: {len(members)} models, of which {sum(bool(row['blocks']) for row in members)} have a convertible "
        f"block ({sum(sum(row['blocks'].values()) for row in members)} blocks in all) and "
        f"{sum(bool(row['foreign']) for row in members)} do not run here by themselves; walking takes "
        f"{statistics.mean([row['walk_seconds'] or 0 for row in members]):.2f} s on average, all checks "
        f"{statistics.mean([row['seconds'] for row in members]):.1f} s (of one core)."
        for library, members in groups.items()
    ]
    about = (
        f"Errors are in float32, relative to the scale of what is compared; the tolerance is {TOLERANCE:g}. Weights "
        "are random, with no scale at zero. Step sizes are estimates here: certificates have tests of their own."
    )
    return ["## Totals", "", *(f"- {count}" for count in counts), "", *_table(heading, lines), about, ""]


def _tasks(rows: Sequence[Result]) -> list[str]:
    """Returns how far transformers' classes come, by the tasks of its auto mappings; a class may have several."""
    groups: dict[str, list[Result]] = defaultdict(list)
    for row in rows:
        for task in row.get("tasks") or ():
            groups[task].append(row)
    if not groups:
        return []
    everything = [row for row in rows if row.get("tasks")]
    lines = [
        _reached(task, members) for task, members in (*sorted(groups.items()), ("all, each class once", everything))
    ]
    heading = ["task", "classes", "built", "fed", "inputs automatic", "ran", "all checks", "generate", "why not"]
    possible = [row for row in everything if _kind_of(row) != _PACKAGE]
    ran = sum(row.get("missing") is None and "worker" not in row["failures"] for row in possible)
    share = (
        f"Of the {len(possible)} classes whose packages are installed, {ran} ran ({ran / max(1, len(possible)):.1%})."
    )
    return ["## transformers by task", "", f"{share} {_REACHED}", "", *_table(heading, lines)]


def _reached(task: str, rows: Sequence[Result]) -> list[Any]:
    told = [row for row in rows if "worker" not in row["failures"]]
    at_least = {step: [row for row in told if row.get("missing") not in _STEPS[: place + 1]]
                for place, step in enumerate(_STEPS)}  # fmt: skip
    ran = at_least["ran"]
    good = sum(not row["failures"] for row in ran)
    generate = [row for row in ran if row.get("generates") == "yes"]
    wrote = f"{sum('generated' in row['passed'] for row in generate)}/{len(generate)}" if generate else ""
    why = Counter(_kind_of(row) for row in rows if row["foreign"] or row["failures"])
    reasons = ", ".join(f"{count} {reason}" for reason, count in why.most_common())
    automatic = sum(bool(row.get("automatic", True)) for row in at_least["fed"])
    return [task, len(rows), *(len(at_least[name]) for name in ("built", "fed")), automatic, len(ran),
            f"{good}/{len(ran)}", wrote, reasons]  # fmt: skip


def _kind_of(row: Result) -> str:
    """Returns in a few words why a class did not pass; nothing for one that did."""
    if "worker" in row["failures"]:
        return "too slow or large for this run"
    if row["failures"]:
        return "a check fails"
    if row["foreign"] is None:
        return ""
    if "ImportError" in row["foreign"]:
        return _PACKAGE
    return {"built": "no small config", "fed": "no inputs"}.get(row["missing"], "the plain model's pass fails")


def _families(rows: Sequence[Result]) -> list[str]:
    used = [pattern for pattern in PATTERNS if any(pattern in row["blocks"] for row in rows)]
    groups: dict[str, list[Result]] = defaultdict(list)
    for row in rows:
        if row["library"] == "timm":
            groups[row["family"]].append(row)
    lines = []
    for family, members in groups.items():
        blocks: Counter[str] = Counter()
        for row in members:
            blocks.update(row["blocks"])
        ours = [row for row in members if not row["foreign"]]
        good = sum(not row["failures"] for row in ours)
        layers = sum(row["layers"] for row in members)
        times = f"{statistics.median([row['seconds'] for row in members]):.1f}"
        result = f"{good}/{len(ours)}" if ours else "not ours"
        lines.append([family, len(members), layers, *(blocks[p] or "" for p in used), result, times])
    heading = ["family", "models", "layers", *used, "all checks", "median s"]
    return ["## timm by family", "", *_table(heading, lines)] if lines else []


def _left(rows: Sequence[Result]) -> list[str]:
    layers: Counter[str] = Counter()
    models: Counter[str] = Counter()
    for row in rows:
        kinds: Counter[str] = Counter()
        for reason, count in row["left"].items():
            kinds[_general(reason)] += count
        layers.update(kinds)
        models.update(kinds.keys())
    lines = [[reason, models[reason], count] for reason, count in layers.most_common()]
    if not lines:
        return []
    return ["## Layers that are left alone", "", *_table(["reason", "models", "layers"], lines)]


def _general(reason: str) -> str:
    """Returns a reason without the names of one model."""
    words = reason.split("; ")[0]
    quoted = words.split("'")
    return "'...'".join(quoted[::2]) if len(quoted) > 2 else words


def _reduced(rows: Sequence[Result]) -> list[str]:
    lines = [[row["name"], row["reduced"]] for row in rows if row["reduced"]]
    return ["## Checked with reduced depth", "", *_table(["model", "how"], lines, 2)] if lines else []


def _same(rows: Sequence[Result]) -> list[str]:
    lines = [[row["name"], row["same_as"]] for row in rows if row.get("same_as")]
    if not lines:
        return []
    about = (
        "At the size of these checks these models are other models' networks under another name (the same modules, "
        "options, shapes and buffers; pretrained weights or image sizes differ). Each was walked at its own size; the "
        "other checks are those of the model beside it."
    )
    return ["## The same network as another model", "", about, "", *_table(["model", "checked as"], lines, 2)]


def _without(rows: Sequence[Result]) -> list[str]:
    lines = [
        [row["name"], "; ".join(f"{count}x {reason}" for reason, count in row["left"].items()) or "no linear layer"]
        for row in rows
        if not row["blocks"] and "walked" in row["passed"]
    ]
    return ["## Without a convertible block", "", *_table(["model", "why"], lines, 2)] if lines else []


def _failures(rows: Sequence[Result]) -> list[str]:
    lines = [
        [row["name"], check, reason.replace("|", "\\|")] for row in rows for check, reason in row["failures"].items()
    ]
    table = _table(["model", "check", "reason"], lines, 3) if lines else ["None.", ""]
    return ["## Failures", "", *table]


def _silent(rows: Sequence[Result]) -> list[str]:
    lines = [
        [row["name"], why.replace("|", "\\|")] for row in rows if (why := row.get("generates")) not in (None, "yes")
    ]
    if not lines:
        return []
    about = "The plain model's `generate` raises with these small configs; its forward pass was checked all the same."
    return ["## Does not generate by itself", "", about, "", *_table(["model", "its error"], lines, 2)]


def _foreign(rows: Sequence[Result]) -> list[str]:
    lines = [[row["name"], row["foreign"].replace("|", "\\|")] for row in rows if row["foreign"]]
    if not lines:
        return []
    about = "The plain model's own construction or forward pass raises; nothing of this package was reached."
    return ["## Does not run here by itself", "", about, "", *_table(["model", "its error"], lines, 2)]
