"""The call that a newcomer types, on every family of timm and every classifier of transformers.

    python -m tests.coverage.newcomer --output runs/newcomer.jsonl

``convert_model(model, solver="proxsg", iters=10)``: which layers it converts, at which rate, and where that is from. A
model of timm is tried as ``timm.create_model(name)`` makes it, and with ``drop_rate=0.5``. Like the other checks it
continues where it stopped; ``python -m tests.coverage --first-call RESULTS --table PAGE`` puts the results on its page.
"""

import argparse
import datetime
import fnmatch
import pathlib
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import timm
from torch import nn
from tqdm import tqdm

from tests.coverage import run, timm_models, transformers_models
from tests.coverage.result import NotBuiltError, NotFedError, told
from tests.coverage.run import Task
from tests.surgery.literal import literal_call

RESULTS = pathlib.Path("runs/newcomer.jsonl")
RATE = 0.5
"""The rate of the second try of timm's models."""
_CLASSIFIERS = ("sequence classification", "image classification", "for image classification")
_SHOWN = 2
"""How many layers a cell names."""


def tasks() -> list[Task]:
    """Returns the model of each family of timm that looks smallest, and every classifier of transformers."""
    small = [Task("timm", names[0], family) for family, names in timm_models.families().items()]
    kinds = transformers_models.tasks()
    own = [name for name, (_, heads) in kinds.items() if any(head in _CLASSIFIERS for head in heads)]
    return small + [Task("transformers", name, kinds[name][0]) for name in sorted(own)]


def tried(task: Task) -> dict[str, Any]:
    """Makes the call on one model; never raises."""
    row: dict[str, Any] = {**task._asdict(), "date": datetime.date.today().isoformat(), "versions": run.versions()}
    if task.library == "timm":
        row["made"] = _tried(lambda: timm.create_model(task.name))
        row["dropping"] = _tried(lambda: timm.create_model(task.name, drop_rate=RATE))
        return row
    try:
        case = transformers_models.case(task.name, task.family)
    except (NotBuiltError, NotFedError, ImportError) as error:
        return {**row, "foreign": told(error)}
    assert case.model is not None
    model, example = case.model, {"example_inputs": case.inputs} if case.given else {}
    return {**row, "made": _tried(lambda: model, example)}


def _tried(build: Callable[[], nn.Module], example: Mapping[str, Any] | None = None) -> dict[str, Any]:
    try:
        model = build()
    except TypeError as error:
        return {"refused": told(error)}
    try:
        done = literal_call(model, "proxsg", **(example or {}))
    except Exception as error:
        return {"error": told(error)}
    return {"rates": done.rates, "source": done.source, "attributes": list(done.attributes), "warning": done.warning}


def section(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Returns the results as lines of Markdown."""
    rows = sorted(rows, key=lambda row: (row["library"], row["family"], row["name"]))
    if not rows:
        return []
    lines = [
        "## The first call",
        "",
        '`convert_model(model, solver="proxsg", iters=10)` on one model of every family of timm (as '
        f"`timm.create_model(name)` makes it, and with `drop_rate={RATE}`) and on every classifier of transformers, "
        "with a small config. Each cell: the layers, their rate, and where it is from: a dropout module, a rate that "
        "functional dropouts read (named), or the head, where no dropout is live before a linear layer. After each "
        "call `revert_model` gave every class and every number back. `python -m tests.coverage.newcomer` repeats it.",
        "",
    ]
    versions, span = run.when_and_with_what(rows)
    lines += [f"{span}; " + ", ".join(f"{name} {version}" for name, version in versions.items()) + ".", ""]
    ran = [row for row in rows if "foreign" not in row]
    asked = [row[key] for row in ran for key in ("made", "dropping") if "refused" not in row.get(key, {"refused": ""})]
    good = sum("rates" in one for one in asked)
    lines += [f"Of {len(asked)} calls {good} converted.", ""]
    timms, others = ([row for row in ran if row["library"] == name] for name in ("timm", "transformers"))
    if timms:
        lines += ["| family | model | as it is made | with `drop_rate=0.5` |", "| --- | --- | --- | --- |"]
        lines += [f"| {r['family']} | {r['name']} | {_cell(r['made'])} | {_cell(r['dropping'])} |" for r in timms]
        lines += [""]
    if others:
        lines += ["| class | with a small config |", "| --- | --- |"]
        lines += [f"| {row['name']} | {_cell(row['made'])} |" for row in others] + [""]
    return lines


def _cell(one: Mapping[str, Any]) -> str:
    if "rates" not in one:
        text = "takes no `drop_rate`" if "refused" in one else f"**{one['error']}**"
        return text.replace("|", "\\|")
    layers = [f"`{name}`" for name in one["rates"]]
    names = ", ".join(layers[:_SHOWN]) + (f" and {len(layers) - _SHOWN} more" if len(layers) > _SHOWN else "")
    rates = ", ".join(dict.fromkeys(f"{rate:.3g}" for rate in one["rates"].values()))
    attributes = [f"`{name}`" for name in one["attributes"]]
    more = " and others" if len(attributes) > 1 else ""
    source = {"head": "the head", "dropouts": "modules"}.get(one["source"], f"{', '.join(attributes[:1])}{more}")
    return f"{names}: {rates}, {source}"


def done(path: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the results that a file holds, the latest of each model."""
    return list(run.done(path).values())


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes the calls that a file does not hold yet, prints the section, and returns 1 if one failed."""
    parser = argparse.ArgumentParser("python -m tests.coverage.newcomer", description=__doc__.partition("\n")[0])
    parser.add_argument("--filter", metavar="GLOB", default="*", help="only names like this")
    parser.add_argument("--retry-failed", action="store_true", help="call again where it failed")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS, help="results (%(default)s)")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    known = {row["name"]: row for row in done(options.output)}
    for task in tqdm([task for task in tasks() if fnmatch.fnmatch(task.name, options.filter)], unit="model"):
        if task.name not in known or (options.retry_failed and not _good(known[task.name])):
            run.append(options.output, tried(task))
    rows = [row for row in done(options.output) if fnmatch.fnmatch(row["name"], options.filter)]
    print("\n".join(section(rows)))
    bad = [row["name"] for row in rows if not _good(row)]
    print(f"{len(bad)} to look at: {', '.join(bad)}", file=sys.stderr)
    return 1 if any("error" in row.get(key, {}) for row in rows for key in ("made", "dropping")) else 0


def _good(row: Mapping[str, Any]) -> bool:
    return "foreign" not in row and not any("error" in row.get(key, {}) for key in ("made", "dropping"))


if __name__ == "__main__":
    sys.exit(main())
