"""``solver-plugins patch``: adds ``--solver-config`` to training scripts of timm and transformers, or removes it."""

import json
from pathlib import Path
from typing import Annotated

import typer

from solver_plugins.integrations.patching import Patch, apply_patch, list_patches, revert_patch

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="Add solver conversion (--solver-config FILE) to training scripts of timm and transformers.",
)

_FILE = Annotated[Path, typer.Argument(help="The training script.", show_default=False)]


@app.command("list")
def list_(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, to standard output.")] = False,
) -> None:
    """Lists every patch and the script it is for."""
    patches = list_patches()
    if as_json:
        print(json.dumps([_plain(patch) for patch in patches], indent=2))
        return
    for patch in patches:
        print(patch.name)
        print(f"  for {patch.label}, {patch.target}")
        print(f"  tried with {', '.join(patch.tested.values())}")
        print(f"  inserts {patch.count} lines in {len(patch.hunks)} places")


@app.command()
def apply(file: _FILE) -> None:
    """Inserts the patch that fits FILE, or says which lines FILE lacks."""
    done = apply_patch(file)
    known = f"version {done.version}" if done.version else "a version that the patch was not tried with; it compiles"
    print(f"Patched {file} ({known}): it now takes --solver-config FILE. Undo: solver-plugins patch revert {file}")


@app.command()
def revert(file: _FILE) -> None:
    """Removes the patch from FILE and restores it exactly."""
    done = revert_patch(file)
    print(f"Reverted {file}: the lines of {done.patch.name} are gone.")


def _plain(patch: Patch) -> dict[str, object]:
    return {
        "name": patch.name,
        "package": patch.package,
        "target": patch.target,
        "tested": {version: digest for digest, version in patch.tested.items()},
    }
