"""``solver-plugins inspect``: the dry run of a conversion, or how a converted model is."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from tqdm.auto import tqdm

from solver_plugins.blocks import blocks_of
from solver_plugins.cli.fields import read_pairs, takes_fields
from solver_plugins.cli.figures import check_figure, draw_report
from solver_plugins.errors import OptionError
from solver_plugins.integrations.models import load_model
from solver_plugins.surgery import ConversionSpec, inspect_model, solver_report, speaking


@takes_fields(ConversionSpec, "conversion", {"args": "--option"})
def inspect(
    model: Annotated[str, typer.Argument(help="timm/NAME, hf/FOLDER, hf/ID, or the folder of a converted model.")],
    conversion: dict[str, Any],
    model_arg: Annotated[
        list[str] | None,
        typer.Option(help="An argument of the model as key=value, such as drop_rate=0.5 (repeatable)."),
    ] = None,
    pretrained: Annotated[bool, typer.Option("--pretrained", help="Load pretrained weights.")] = False,
    lipschitz: Annotated[
        bool, typer.Option("--lipschitz/--no-lipschitz", help="Compute the certified constants.")
    ] = True,
    suggest: Annotated[
        bool,
        typer.Option("--suggest", help="List layers worth converting, their cost, and whether they can be merged."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, to standard output.")] = False,
    figure: Annotated[
        Path | None, typer.Option(help="Draw the blocks along the depth of the network (.png, .pdf, .svg).")
    ] = None,
) -> None:
    """Shows what a conversion would do to a model: every layer, its pattern, L and cost, or why not.

    For the folder of a converted model, it shows the state of its blocks.
    """
    with speaking("command line"):
        if figure is not None:
            check_figure(figure)
            if not lipschitz:
                raise OptionError("--figure draws the certified constants, which --no-lipschitz leaves out; drop one.")
        # Mistakes in options are told before a large model is built.
        spec = ConversionSpec.parse(conversion, owner="inspect")
        made = load_model(model, pretrained, **read_pairs(model_arg, "--model-arg"))
        if blocks_of(made):
            if figure is not None:
                raise OptionError("--figure draws the dry run of a conversion, and this model is converted already.")
            _show(solver_report(made), as_json)
            return
        # A bar needs a terminal, which inspect_model asks for; beside JSON in a pipe it would only be noise.
        report = inspect_model(
            made, spec, lipschitz=lipschitz, progress=not as_json or sys.stdout.isatty(), suggest=suggest
        )
        _show(report, as_json)
        if figure is not None:
            draw_report(report, figure, model)
            tqdm.write(f"Figure: {figure}", file=sys.stderr)


def _show(report: Any, as_json: bool) -> None:
    if as_json:
        print(report.to_json())
    elif sys.stdout.isatty():
        Console().print(report)
    else:
        print(report)
