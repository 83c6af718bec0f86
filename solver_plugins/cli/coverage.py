"""``solver-plugins coverage``: every model of timm and every classifier of transformers, checked."""

import fnmatch
import pathlib
from typing import Annotated

import typer

from solver_plugins.errors import OptionError


def coverage(
    use_timm: Annotated[bool, typer.Option("--timm", help="Models of timm; both libraries by default.")] = False,
    use_transformers: Annotated[bool, typer.Option("--transformers", help="Classes of transformers.")] = False,
    filter: Annotated[str | None, typer.Option(help="Only names like this, e.g. 'resnet*'.")] = None,
    sample: Annotated[str | None, typer.Option(help="A fixed sample instead of all: 'ci'.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes; each uses one thread.")] = 1,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for one model.")] = 1800.0,
    memory: Annotated[float, typer.Option(min=0.5, help="Gigabytes of one process.")] = 9.0,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Check failures again.")] = False,
    output: Annotated[pathlib.Path, typer.Option(help="Results; a run goes on where the last one stopped.")] = (
        pathlib.Path("coverage.jsonl")
    ),
    table: Annotated[pathlib.Path | None, typer.Option(help="Also write a Markdown page.")] = None,
    only_table: Annotated[bool, typer.Option("--only-table", help="Check nothing, only write the page.")] = False,
) -> None:
    """Walks, converts, checks and reverts every model of timm and every classifier of transformers."""
    from solver_plugins.integrations.coverage import run
    from solver_plugins.integrations.coverage import sample as samples
    from solver_plugins.integrations.coverage import table as pages

    if sample not in (None, "ci"):
        raise OptionError(f"Expected --sample ci; found {sample!r}.")
    if only_table and table is None:
        raise OptionError("--only-table writes a page: say where, with --table PATH.")
    libraries = [name for name, used in (("timm", use_timm), ("transformers", use_transformers)) if used]
    tasks = samples.tasks(libraries or ["timm", "transformers"], sample)
    if filter is not None:
        tasks = [task for task in tasks if fnmatch.fnmatch(task.name, filter)]
        if not tasks:
            raise OptionError(f"No model is called like {filter!r}.")
    if not only_table:
        output.parent.mkdir(parents=True, exist_ok=True)
        left = run.still_to_do(tasks, output, retry_failed)
        typer.echo(f"{len(tasks) - len(left)} of {len(tasks)} models are in {output} already.", err=True)
        run.run(left, output, workers, run.Limits(timeout, int(memory * 2**30)))
    rows = run.done(output)
    found = [rows[task.library, task.name] for task in tasks if (task.library, task.name) in rows]
    text = pages.page(found, *run.when_and_with_what(found))
    if table is None:
        typer.echo(text.partition("\n## timm by family")[0].partition("\n## transformers by family")[0])
    else:
        run.write_text(table, text)
        typer.echo(f"{len(found)} models in {table}.", err=True)
    bad = [row["name"] for row in found if row["failures"]]
    if bad:
        typer.echo(f"{len(bad)} fail: {', '.join(bad[:10])}{', ...' if len(bad) > 10 else ''}", err=True)
        raise SystemExit(1)
