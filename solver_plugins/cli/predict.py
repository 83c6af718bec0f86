"""``solver-plugins predict``: what a saved classifier says of images or texts."""

import json
from dataclasses import asdict
from typing import Annotated

import typer


def predict(
    folder: Annotated[str, typer.Argument(help="A saved model, such as RUN/solver/model.", show_default=False)],
    inputs: Annotated[
        list[str], typer.Argument(help="Images, folders of images, or texts for a text model.", show_default=False)
    ],
    top: Annotated[
        int | None,
        typer.Option("--top", min=1, help="How many classes to print; by default one, or all likely ones."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, to standard output.")] = False,
) -> None:
    """Predicts the class, labels or numbers of images or texts, prepared as in its evaluation."""
    from solver_plugins.train.predict import predict as run

    found = run(folder, inputs, top=top)
    if as_json:
        print(json.dumps([asdict(one) for one in found], indent=1))
        return
    for one in found:
        print(f"{one.source}: {', '.join(f'{name} {value:.3f}' for name, value in one.likeliest) or 'nothing'}")
