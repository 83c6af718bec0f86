"""The command ``solver-plugins``: its list of subcommands, and how it reports errors.

A user's mistake (every :class:`~solver_plugins.errors.SolverPluginsError`) is one message on standard error and exit
code 2. Anything else is a defect of this package and keeps its traceback.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click
import typer
from click.shell_completion import CompletionItem

from solver_plugins.errors import SolverPluginsError, did_you_mean

COMMANDS: dict[str, str] = {
    "inspect": "Show what a conversion would do to a model, block by block.",
    "run": "Run a training script of timm or transformers unchanged, with its model converted.",
    "patch": "Add --solver-config to training scripts of timm and transformers.",
    "finetune": "Finetune a model with solvers, and its plain baseline, from one config file.",
    "export": "Write a saved model as ONNX or a torch.export program, and check it.",
    "predict": "Say which class images or texts belong to, with a saved model.",
    "study": "Repeat an experiment of the papers: table, figure and metrics.",
}
"""Each subcommand with its one-line help. The command ``NAME`` is the function ``NAME`` of ``solver_plugins.cli.NAME``,
with underscores for dashes. A group of commands is a ``typer.Typer`` called ``app`` in that module."""


class _LazyGroup(click.Group):
    """Imports a subcommand's module only when that subcommand is used: ``--help`` stays fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        attribute = cmd_name.replace("-", "_")
        module = importlib.import_module(f"solver_plugins.cli.{attribute}")
        app = getattr(module, "app", None)
        if app is None:
            app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            app.command(cmd_name)(getattr(module, attribute))
        inner: Any = typer.main.get_command(app)

        # typer may come with a click of its own, whose exceptions and exits this one does not know: the subcommand
        # reads its arguments, shows its help and ends by itself.
        def run(arguments: tuple[str, ...]) -> None:
            inner.main(list(arguments), prog_name=f"{ctx.command_path} {cmd_name}")

        return _Subcommand(cmd_name, inner, run)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            ctx.fail(f"No such command {args[0]!r}.{did_you_mean(args[0], list(COMMANDS))}")

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


class _Subcommand(click.Command):
    """A subcommand whose arguments are read by ``inner``; shells complete its options, names and keys."""

    def __init__(self, name: str, inner: Any, run: Callable[[tuple[str, ...]], None]):
        settings = {"ignore_unknown_options": True, "help_option_names": []}
        rest = click.Argument(
            ["arguments"], nargs=-1, type=click.UNPROCESSED,
            shell_complete=lambda ctx, parameter, incomplete: self.shell_complete(ctx, incomplete),
        )  # fmt: skip
        super().__init__(name, callback=run, params=[rest], context_settings=settings)
        self.inner = inner

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        inner = self.inner
        commands = list(getattr(inner, "commands", {}))
        options = [text for one in inner.params for text in getattr(one, "opts", ()) if text.startswith("--")]
        words = options if incomplete.startswith("-") else [*commands, *_words(str(self.name), incomplete)]
        return [CompletionItem(word) for word in words if word.startswith(incomplete)]


def _words(command: str, incomplete: str) -> list[str]:
    """Returns the names that may stand in a command: recipes and keys of a config, studies, models."""
    if command == "study":
        from solver_plugins.shipped import shipped_names

        return shipped_names("studies", ".yaml")
    if command != "finetune":
        return []
    from solver_plugins.shipped import shipped_names
    from solver_plugins.train.options import option_names

    # Keys take a moment to collect, so a recipe's name comes without them.
    recipes = shipped_names("recipes", ".yaml")
    return recipes if any(name.startswith(incomplete) for name in recipes) else [f"{key}=" for key in option_names()]


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command line and exits: with 0 for success, with 2 for a user's mistake."""
    from solver_plugins import __version__

    group = _LazyGroup("solver-plugins", help="Turns layers of timm and Hugging Face models into optimisation solvers.")
    group = click.version_option(__version__, prog_name="solver-plugins")(group)
    try:
        group.main(None if args is None else list(args), prog_name="solver-plugins")
    except SolverPluginsError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)
