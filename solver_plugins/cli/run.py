"""``solver-plugins run``: runs a training script of another library, with its model converted."""

from typing import Annotated

import typer

from solver_plugins.errors import OptionError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_OPTION = "--solver-config"


@app.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run(
    script: Annotated[str, typer.Argument(help="The training script, such as timm's train.py.", show_default=False)],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ARGUMENTS]...", help="The arguments of the script, and --solver-config FILE."),
    ] = None,
    solver_config: Annotated[
        str | None, typer.Option(_OPTION, help="A solver file: how to convert the first model that the script makes.")
    ] = None,
) -> None:
    """Runs SCRIPT unchanged. With --solver-config the first model it makes with timm or transformers is converted."""
    own, rest = _taken(arguments or [])
    if own is not None and solver_config is not None:
        raise OptionError(f"Expected {_OPTION} once; found it twice.")
    from solver_plugins.integrations.scripts import run_script

    run_script(script, rest, own or solver_config)


def _taken(arguments: list[str]) -> tuple[str | None, list[str]]:
    """Takes our option out of a script's arguments."""
    found: str | None = None
    rest: list[str] = []
    given = iter(arguments)
    for text in given:
        name, equals, value = text.partition("=")
        if name != _OPTION:
            rest.append(text)
            continue
        if found is not None:
            raise OptionError(f"Expected {_OPTION} once; found it twice.")
        found = value if equals else next(given, "")
        if not found:
            raise OptionError(f"Expected a file after {_OPTION}.")
    return found, rest
