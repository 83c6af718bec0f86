"""``solver-plugins env``: what a bug report needs to know."""

import importlib.metadata
import json
import platform
from typing import Annotated

import typer

LIBRARIES = [
    "torch",
    "timm",
    "transformers",
    "accelerate",
    "datasets",
    "safetensors",
    "numpy",
    "pydantic",
    "torchvision",
    "peft",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "tensorboard",
]
"""Those that change what this package computes or can do, the optional ones last."""


def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, to standard output.")] = False,
) -> None:
    """Prints versions, devices and plug-ins, to paste into a bug report. It names no files or folders."""
    found = environment()
    if as_json:
        print(json.dumps(found, indent=2))
        return
    width = max(map(len, found))
    for name, text in found.items():
        print(f"{name:{width}}  {text}")


def environment() -> dict[str, str]:
    """Returns the versions, devices and plug-ins, as texts."""
    import torch

    from solver_plugins import __version__

    found = {
        "solver-plugins": __version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": platform.platform(),
    }
    found |= {name: _version(name) for name in LIBRARIES}
    found["torch"] = torch.__version__  # With its build, such as +cpu.
    found["devices"] = ", ".join(_devices())
    found["CUDA or ROCm"] = torch.version.cuda or torch.version.hip or "not in this build of torch"
    every = importlib.metadata.entry_points()
    groups = [group for group in every.groups if group.startswith("solver_plugins.")]
    plugins = sorted(f"{point.name} ({point.value})" for group in groups for point in every.select(group=group))
    found["plug-ins"] = ", ".join(plugins) or "none"
    return found


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> list[str]:
    import torch

    cards = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    apple = ["mps"] if torch.backends.mps.is_available() else []
    return [*cards, *apple, f"cpu with {torch.get_num_threads()} threads"]
