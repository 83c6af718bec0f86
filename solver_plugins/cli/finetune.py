"""``solver-plugins finetune``: finetunes, evaluates and saves a model and its plain baseline, as a config says."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from solver_plugins.errors import SolverPluginsError
from solver_plugins.train.reading import given_options, read_config


def _recipes(incomplete: str) -> list[str]:
    """Returns the recipes that a shell may complete; with none it completes files."""
    from solver_plugins.shipped import shipped_names

    return [name for name in shipped_names("recipes", ".yaml") if name.startswith(incomplete)]


def _keys(incomplete: str) -> list[str]:
    """Returns the options of a config that a shell may complete."""
    from solver_plugins.train.options import option_names

    return [f"{name}=" for name in option_names() if name.startswith(incomplete)]


def finetune(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="A YAML or JSON file, or a recipe's name, such as quickstart.",
            show_default=False,
            autocompletion=_recipes,
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Changes to the config, such as optimizer.lr=1e-4.",
            autocompletion=_keys,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan, the blocks and their cost; train nothing.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in the output folder, or start one.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in the output folder.")] = False,
    options: Annotated[
        bool, typer.Option("--options", help="Print every option of a config, with its default and meaning.")
    ] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of a config, for editors.")] = False,
) -> None:
    """Finetunes a model with solver blocks and its plain baseline, on one process or many (accelerate launch)."""
    if options:
        from solver_plugins.train.options import list_options

        print(list_options(), end="")
        return
    if schema:
        from solver_plugins.train.options import json_schema

        print(json_schema(), end="")
        return
    if config is None:
        raise typer.BadParameter(
            "expected a YAML or JSON file, or a recipe's name, such as quickstart; see --options", param_hint="CONFIG"
        )
    settings = read_config(config, changes or ())

    # Imported here: a mistake in the config is told at once.
    from solver_plugins.train.launch import first_process

    talks = first_process()
    try:
        if dry_run:
            from solver_plugins.train.plan import plan_run

            plan = plan_run(settings)
            if talks:
                for line in plan.lines:
                    print(line)
                if plan.blocks is not None:
                    print(f"\n{plan.blocks}")
                print(f"\nThe config; every other option has its default (see --options):\n{given_options(settings)}")
            return
        if settings.seeds is None:
            from solver_plugins.train.comparison import result_table as table
            from solver_plugins.train.finetune import finetune as run
        else:
            from solver_plugins.train.seeds import finetune_seeds as run
            from solver_plugins.train.seeds import seeds_table as table
        results = run(settings, resume=resume, overwrite=overwrite)
    except SolverPluginsError:
        if talks:
            raise
        # One message is enough; the exit code is that of the first process.
        sys.exit(2)
    except KeyboardInterrupt:
        if talks:
            print(
                "\nStopped. Run the same command with --resume to continue from the last checkpoint, if there is one.",
                file=sys.stderr,
            )
        # As a shell reports a program that Ctrl-C ended.
        sys.exit(130)
    if talks:
        # A pipe or a log has no width of its own.
        Console(width=None if sys.stdout.isatty() else 100).print(table(settings, results))
        print(f"Report: {Path(settings.output) / 'report.html'}")
