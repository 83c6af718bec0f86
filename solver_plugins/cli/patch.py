"""``solver-plugins patch``: adds ``--solver-config`` to training scripts of timm and transformers, or removes it."""

import json
import sys
from importlib.metadata import PackageNotFoundError, version
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
    """Lists every patch with the file that it is for."""
    patches = list_patches()
    if as_json:
        print(json.dumps([_plain(patch) for patch in patches], indent=2))
        return
    for patch in patches:
        lines = sum(len(hunk.lines) for hunk in patch.hunks)
        print(patch.name)
        print(f"  for {patch.label}")
        print(f"  sha256 {patch.sha256}")
        print(f"  inserts {lines} lines in {len(patch.hunks)} places")


@app.command()
def apply(file: _FILE) -> None:
    """Inserts the patch for FILE; refuses a file that no patch was made for."""
    patch = apply_patch(file)
    print(f"Patched {file}: {patch.label} now takes --solver-config FILE. Undo: solver-plugins patch revert {file}")
    installed = _installed(patch.package)
    if installed is not None and installed not in patch.versions:
        print(f"Note: {patch.package} {installed} is installed; the script is of another version.", file=sys.stderr)


@app.command()
def revert(file: _FILE) -> None:
    """Removes the patch from FILE, which is then byte for byte what it was before."""
    patch = revert_patch(file)
    print(f"Reverted {file}: {patch.label}, as it was published.")


def _plain(patch: Patch) -> dict[str, object]:
    return {
        "name": patch.name,
        "package": patch.package,
        "versions": list(patch.versions),
        "target": patch.target,
        "sha256": patch.sha256,
        "patched_sha256": patch.patched_sha256,
    }


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
