"""``solver-plugins study``: repeats the papers' experiments."""

import json
import re
import shlex
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Annotated

import typer
import yaml

from solver_plugins.errors import SolverPluginsError, UnknownNameError, did_you_mean

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="Repeat the experiments of the papers: table, figure and metrics.json from one command.",
)


@app.command("list")
def list_(
    filter: Annotated[str | None, typer.Argument(help="A glob on the name, or a tag, such as dropblock.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, to standard output.")] = False,
) -> None:
    """Lists every study and what it repeats."""
    from solver_plugins.studies import list_studies, study_info

    names = list_studies(filter)
    if filter is not None and not names and not as_json:
        known = {*list_studies(), *(tag for name in list_studies() for tag in study_info(name).tags)}
        raise UnknownNameError(
            f"No study matches {filter!r}: expected a glob on the name, or a tag.{did_you_mean(filter, known)}"
        )
    infos = [study_info(name) for name in names]
    if as_json:
        rows = [
            {
                "name": info.name,
                "description": info.description,
                "reference": info.target.reference,
                "tags": sorted(info.tags),
                "source": info.source,
            }
            for info in infos
        ]
        print(json.dumps(rows, indent=2))
        return
    papers: dict[str, list[str]] = {}
    for info in infos:
        # "Table 2 of *Title* (Authors, Year), remarks": the title is a heading.
        split = re.fullmatch(r"(.*?),? of \*(.+?)\* (\(.+?\))(.*)", info.target.reference)
        paper = f"{split[2]} {split[3]}" if split else "Other"
        where = f"{split[1]}{split[4]}" if split else info.target.reference
        papers.setdefault(paper, []).append(f"{_wrapped(f'{info.name}: {where}', 2)}\n{_wrapped(info.description, 6)}")
    print("\n\n".join("\n".join([_wrapped(paper, 0), *rows]) for paper, rows in papers.items()))


def _wrapped(text: str, indent: int) -> str:
    width = min(shutil.get_terminal_size().columns, 100)
    first, others = " " * indent, " " * max(indent, 4)
    return textwrap.fill(text, width, initial_indent=first, subsequent_indent=others, break_on_hyphens=False)


def _studies(incomplete: str) -> list[str]:
    """Returns the studies that a shell may complete."""
    from solver_plugins.shipped import shipped_names

    return [name for name in shipped_names("studies", ".yaml") if name.startswith(incomplete)]


@app.command()
def run(
    name: Annotated[
        str,
        typer.Argument(help="A study of `solver-plugins study list`.", show_default=False, autocompletion=_studies),
    ],
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Changes to its settings, such as seeds=[0,1,2]."),
    ] = None,
    scale: Annotated[
        str, typer.Option(help="smoke (seconds), short (minutes on two cores), or paper (the paper's own sizes).")
    ] = "short",
    output: Annotated[
        Path | None,
        typer.Option(help="The output folder; a run in it is continued.", show_default="runs/studies/NAME-SCALE"),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a run in the output folder.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the settings and the cells; run nothing.")] = False,
) -> None:
    """Runs a study, or continues it. With accelerate launch several processes share the work."""
    from solver_plugins.studies import STUDIES, read_study_config, run_study
    from solver_plugins.train.launch import first_process

    talks = first_process()
    try:
        config = read_study_config(name, scale, changes or ())
        if dry_run:
            cells = STUDIES.get(name)(config).cells()
            if talks:
                print(yaml.safe_dump(config.options(), sort_keys=False))
                print(f"{len(cells)} cells:", *(cell.name for cell in cells), sep="\n  ")
            return
        place = output or Path("runs") / "studies" / f"{name}-{scale}"
        command = shlex.join(["solver-plugins", "study", "run", name, *(changes or ()), "--scale", scale])
        outcome = run_study(name, config, place, scale=scale, overwrite=overwrite, command=command)
    except SolverPluginsError:
        if talks:
            raise
        # One message is enough; the exit code is that of the first process.
        sys.exit(2)
    if talks:
        for table in outcome.tables:
            print(table.markdown())
        print(f"Report: {outcome.folder / 'table.md'}, {outcome.folder / 'figure.png'}")
