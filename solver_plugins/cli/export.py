"""``solver-plugins export``: a saved model as a program that runs without this package."""

from pathlib import Path
from typing import Annotated

import typer

from solver_plugins.integrations.export import export_model
from solver_plugins.integrations.models import load_model


def export(
    folder: Annotated[str, typer.Argument(help="The folder of a saved model, hf/FOLDER, hf/ID, or timm/NAME.")],
    to: Annotated[str, typer.Option(help="onnx, pt2 (torch.export), or plain (a merged network).")] = "onnx",
    output: Annotated[
        Path | None, typer.Option(help="The file to write; FOLDER.onnx by default, or FOLDER.pt2.")
    ] = None,
    static_batch: Annotated[
        bool, typer.Option("--static-batch", help="Only accept batches of two samples (default: of any size).")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
) -> None:
    """Exports a model as a program, runs it, and compares its outputs with those of the model."""
    model = load_model(folder, pretrained=True)
    name = folder.rstrip("/").rpartition("/")[2]
    place = output or Path(f"{name}-plain" if to == "plain" else f"{name}.{to}")
    print(export_model(model, place, to, dynamic_batch=not static_batch, overwrite=overwrite))  # type: ignore[arg-type]
