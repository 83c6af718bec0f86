"""Loads merged models into their plain library, in a process that cannot import this package.

    python -P tests/coverage/elsewhere.py FOLDER...

Each folder is one that :func:`tests.coverage.merging.write` has written. Prints, as JSON, how far the outputs of each
lie from those of the solvers. Nothing of this repository is imported here.
"""

import json
import pathlib
import sys
from typing import Any

import torch


def tensors_of(output: Any) -> list[torch.Tensor]:
    """Returns the floating-point tensors of a model's output, in order."""
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    items = output.values() if hasattr(output, "values") else output if isinstance(output, list | tuple) else ()
    return [tensor for item in items for tensor in tensors_of(item)]


def built(folder: pathlib.Path) -> torch.nn.Module:
    """Builds and loads a model as its library's users do."""
    about = json.loads((folder / "about.json").read_text())
    model: torch.nn.Module
    if about["library"] == "timm":
        import timm

        model = timm.create_model(about["name"], checkpoint_path=str(folder / "model.safetensors"), **about["options"])
    else:
        import transformers

        model = getattr(transformers, about["name"]).from_pretrained(folder)
    return model.eval()


def main() -> None:
    """Loads and compares."""
    # Importing it fails from here on; the libraries are imported below.
    sys.modules["solver_plugins"] = None  # type: ignore[assignment]
    found = {}
    for name in sys.argv[1:]:
        folder = pathlib.Path(name)
        kept = torch.load(folder / "expected.pt", weights_only=False)
        model = built(folder)
        torch.manual_seed(kept["seed"])
        with torch.no_grad():
            outputs = tensors_of(model(*kept["args"], **kept["kwargs"]))
        pairs = zip(outputs, kept["expected"], strict=True)
        found[folder.name] = max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in pairs)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
