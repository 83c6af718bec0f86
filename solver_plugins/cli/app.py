"""The command ``solver-plugins``: its list of subcommands, and how it reports errors.

A user's mistake (every :class:`~solver_plugins.errors.SolverPluginsError`) is one message on standard error and exit
code 2. Anything else is a defect of this package and keeps its traceback.
"""

import functools
import importlib
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from solver_plugins.errors import SolverPluginsError, did_you_mean

COMMANDS: dict[str, str] = {
    "inspect": "Show what a conversion would do to a model, block by block.",
    "finetune": "Finetune a model with solvers, and its plain baseline, from one config file.",
    "predict": "Predict the class, labels or numbers of images or texts.",
    "export": "Write a saved model as ONNX or a torch.export program, and check it.",
    "run": "Run a training script of timm or transformers unchanged, with its model converted.",
    "patch": "Add --solver-config to training scripts of timm and transformers.",
    "study": "Repeat the experiments of the papers, with tables and figures.",
    "env": "Print versions and devices, for a bug report.",
}
"""Each subcommand with its one-line help. The command ``NAME`` is the function ``NAME`` of ``solver_plugins.cli.NAME``,
with underscores for dashes. A group of commands is a ``typer.Typer`` called ``app`` in that module."""


class _LazyGroup(TyperGroup):
    """Imports a subcommand's module only when that subcommand is used: ``--help`` stays fast."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        attribute = cmd_name.replace("-", "_")
        module = importlib.import_module(f"solver_plugins.cli.{attribute}")
        app = getattr(module, "app", None)
        if app is None:
            app = typer.Typer(add_completion=False)
            app.command(cmd_name)(getattr(module, attribute))
        command = typer.main.get_command(app)
        command.name = cmd_name
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            ctx.fail(f"No such command {args[0]!r}.{did_you_mean(args[0], list(COMMANDS))}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        # The names alone: the one-line helps that completion shows would import every subcommand.
        item = vars(typer.core)["CompletionItem"]
        options = super().shell_complete(ctx, incomplete) if incomplete.startswith("-") else []
        return [*(item(name) for name in COMMANDS if name.startswith(incomplete)), *options]


# Plain help: coloured help asks every subcommand for its text, and would import all of them.
app = typer.Typer(
    cls=_LazyGroup,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Turns layers of timm and Hugging Face models into optimisation solvers.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from solver_plugins import __version__

        print(f"solver-plugins {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command line and exits: with 0 for success, with 2 for a user's mistake."""
    try:
        typer.main.get_command(app).main(None if args is None else list(args), prog_name="solver-plugins")
    except SolverPluginsError as error:
        print(_broken(f"Error: {error}"), file=sys.stderr)
        sys.exit(2)


def _broken(text: str) -> str:
    """Returns a message with lines that end at words: a terminal breaks them anywhere. Files get them whole."""
    if not sys.stderr.isatty():
        return text
    width = shutil.get_terminal_size().columns
    wrap = functools.partial(textwrap.fill, width=width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(wrap(line, subsequent_indent=" " * (len(line) - len(line.lstrip()))) for line in text.split("\n"))
