"""``solver-plugins inspect``: the dry run of a conversion, or how a converted model is."""

import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from tqdm.auto import tqdm

from solver_plugins.cli.figures import check_figure, draw_report
from solver_plugins.errors import OptionError
from solver_plugins.integrations.models import load_model, read_value
from solver_plugins.registry import SOLVERS

_SOLVER = "A registered solver."
_TARGETS = "Layers to convert: a name or its end, repeatable, or one regular expression for whole names."


def inspect(
    model: Annotated[str, typer.Argument(help="timm/NAME, hf/FOLDER, hf/ID, or the folder of a converted model.")],
    solver: Annotated[str, typer.Option(help=_SOLVER)] = "proxsg",
    iters: Annotated[int, typer.Option(help="How many proximal steps each block takes.")] = 10,
    pattern: Annotated[
        list[str] | None, typer.Option(help="A pattern (repeatable), 'strict' or 'all'; the solver's own by default.")
    ] = None,
    targets: Annotated[list[str] | None, typer.Option(help=_TARGETS)] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Layers to leave alone, in the same forms.")] = None,
    p: Annotated[float | None, typer.Option(help="A dropout rate for a solver that samples.")] = None,
    nonprox: Annotated[
        str, typer.Option(help="Activations that are no proximal map: 'keep' behind a block with g = 0, or 'skip'.")
    ] = "keep",
    last: Annotated[
        bool | None, typer.Option("--last/--no-last", help="Always, or never, convert the classifier.")
    ] = None,
    option: Annotated[list[str] | None, typer.Option(help="A solver's option as key=value (repeatable).")] = None,
    model_arg: Annotated[
        list[str] | None,
        typer.Option(help="An argument of the model as key=value, such as drop_rate=0.5 (repeatable)."),
    ] = None,
    pretrained: Annotated[bool, typer.Option("--pretrained", help="Load pretrained weights.")] = False,
    lipschitz: Annotated[
        bool, typer.Option("--lipschitz/--no-lipschitz", help="Compute the certified constants.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, to standard output.")] = False,
    figure: Annotated[
        Path | None, typer.Option(help="Draw the blocks along the depth of the network (.png, .pdf, .svg).")
    ] = None,
) -> None:
    """Shows what a conversion would do to a model: every layer, its pattern, L and cost, or why not.

    For the folder of a converted model it shows how its blocks are.
    """
    if figure is not None:
        check_figure(figure)
        if not lipschitz:
            raise OptionError("--figure draws the certified constants, which --no-lipschitz leaves out; drop one.")
    # Mistakes in options are told before a large model is built.
    options = _pairs(option, "--option")
    SOLVERS.get(solver).from_options(iters=iters, **options)
    made = load_model(model, pretrained, **_pairs(model_arg, "--model-arg"))

    from solver_plugins.blocks import blocks_of
    from solver_plugins.surgery import inspect_model, solver_report

    if blocks_of(made):
        if figure is not None:
            raise OptionError("--figure draws the dry run of a conversion, and this model is converted already.")
        _show(solver_report(made), as_json)
        return
    report = inspect_model(
        made,
        solver,
        iters,
        lipschitz=lipschitz,
        # A bar needs a terminal, which inspect_model asks for; beside JSON in a pipe it would only be noise.
        progress=not as_json or sys.stdout.isatty(),
        pattern=_one_or_all(pattern),
        targets=_names(targets),
        exclude=_names(exclude),
        p=p,
        nonprox=nonprox,
        last=last,
        **options,
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


def _pairs(given: list[str] | None, option: str) -> dict[str, Any]:
    """Reads ``key=value`` texts."""
    pairs: dict[str, Any] = {}
    for text in given or ():
        key, equals, value = text.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key.isidentifier():
            raise OptionError(f"Expected {option} as key=value; found {text!r}.")
        if key in pairs:
            raise OptionError(f"Expected {option} {key} once; found it twice.")
        pairs[key] = read_value(value.strip())
    return pairs


def _one_or_all(patterns: list[str] | None) -> str | list[str] | None:
    if not patterns:
        return None
    words = [word for word in ("strict", "all") if word in patterns]
    if words and len(patterns) > 1:
        raise OptionError(f"Expected --pattern {words[0]} alone; found it beside {len(patterns) - 1} more.")
    return patterns[0] if len(patterns) == 1 else patterns


def _names(given: list[str] | None) -> str | list[str] | None:
    """Returns a list of names, or one regular expression: a single text with a character that no name has."""
    if not given:
        return None
    if len(given) == 1 and re.search(r"[^\w.\-]|\.\*|\.\+", given[0]):
        return given[0]
    return list(given)
