"""Converts, checks and reverts every model of timm and every class of transformers' auto mappings.

    python -m tests.coverage --transformers --workers 2 --table docs/coverage.md --first-call runs/newcomer.jsonl
    python -m tests.coverage --timm --filter 'resnet*'

A run continues where the last one stopped: results are lines of the file --output, and models that are in it already
are left out. Without --table the totals are printed. The exit code is 1 if a check of some model fails.
"""

import argparse
import fnmatch
import pathlib
import sys
from collections.abc import Sequence

from tests.arguments import at_least
from tests.coverage import newcomer, run, sample, table

LIBRARIES = ("timm", "transformers")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the checks, writes the page and returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.sample not in (None, "ci"):
        parser.error(f"Expected --sample ci; found {options.sample!r}.")
    if options.only_table and options.table is None:
        parser.error("--only-table writes a page: say where, with --table PATH.")
    tasks = sample.tasks(options.libraries or LIBRARIES, options.sample)
    if options.filter is not None:
        tasks = [task for task in tasks if fnmatch.fnmatch(task.name, options.filter)]
        if not tasks:
            parser.error(f"No model is called like {options.filter!r}.")
    if not options.only_table:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        left = run.still_to_do(tasks, options.output, options.retry_failed)
        print(f"{len(tasks) - len(left)} of {len(tasks)} models are in {options.output} already.", file=sys.stderr)
        run.run(left, options.output, options.workers, run.Limits(options.timeout, int(options.memory * 2**30)))
    rows = run.done(options.output)
    found = [
        rows[task.library, task.name] | {"tasks": sample.heads(task)}
        for task in tasks
        if (task.library, task.name) in rows
    ]
    first = [] if options.first_call is None else newcomer.section(newcomer.done(options.first_call))
    text = table.page(found, *run.when_and_with_what(found), first)
    if options.table is None:
        print(text.partition("\n## timm by family")[0].partition("\n## Layers that")[0])
    else:
        run.write_text(options.table, text)
        print(f"{len(found)} models in {options.table}.", file=sys.stderr)
    bad = [row["name"] for row in found if row["failures"]]
    if bad:
        print(f"{len(bad)} fail: {', '.join(bad[:10])}{', ...' if len(bad) > 10 else ''}", file=sys.stderr)
    return 1 if bad else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m tests.coverage", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for library, what in (("timm", "models of timm"), ("transformers", "classes of transformers")):
        what += "; both libraries by default"
        parser.add_argument(f"--{library}", dest="libraries", action="append_const", const=library, help=what)
    parser.add_argument("--filter", metavar="GLOB", help="only names like this, such as 'resnet*'")
    parser.add_argument("--sample", help="a fixed sample instead of all models: ci")
    parser.add_argument("--workers", type=at_least(1), default=1, help="processes, of one thread each")
    parser.add_argument("--timeout", type=at_least(1, float), default=1800.0, help="seconds for one model")
    parser.add_argument("--memory", type=at_least(0.5, float), default=9.0, help="gigabytes of one process")
    parser.add_argument("--retry-failed", action="store_true", help="check models again whose checks failed")
    parser.add_argument(
        "--output", type=pathlib.Path, default=pathlib.Path("runs/coverage.jsonl"), help="results (%(default)s)"
    )
    parser.add_argument("--table", type=pathlib.Path, help="also write a Markdown page")
    parser.add_argument(
        "--first-call", type=pathlib.Path, metavar="RESULTS", help="put results of tests.coverage.newcomer on that page"
    )
    parser.add_argument("--only-table", action="store_true", help="check nothing, only write the page")
    return parser


if __name__ == "__main__":
    sys.exit(main())
