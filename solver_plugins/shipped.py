"""Finds the files that ship beside the package: patches, and the settings of studies and finetunes.

They stand in the source tree for people to read and change. A wheel carries them as data files, which an installer puts
under ``share/solver_plugins`` of the environment.
"""

import importlib.metadata
import sysconfig
from pathlib import Path
from typing import Literal

Kind = Literal["patches", "studies", "recipes", "accelerate"]

_IN_SOURCE: dict[Kind, str] = {
    "patches": "patches",
    "studies": "configs/studies",
    "recipes": "configs/recipes",
    "accelerate": "configs/accelerate",
}


def shipped_folders(kind: Kind) -> list[Path]:
    """Returns the folders that may hold files of a kind, the source tree first; some may not exist."""
    root = Path(__file__).parents[1]
    shared = Path("share", "solver_plugins", kind)
    places = [root / _IN_SOURCE[kind]] if (root / "pyproject.toml").is_file() else []
    # `pip install --target` puts them beside the package, although its record says otherwise.
    places.append(root / shared)
    places.extend(_recorded(shared))
    places.append(Path(sysconfig.get_path("data")) / shared)
    return list(dict.fromkeys(places))


def shipped_file(kind: Kind, name: str) -> Path | None:
    """Returns the path of a file, or None if there is no such file."""
    files = (folder / name for folder in shipped_folders(kind))
    return next((file for file in files if file.is_file()), None)


def shipped_names(kind: Kind, ending: str) -> list[str]:
    """Returns the names of the files of a kind, without their ending, in order."""
    return sorted({path.stem for folder in shipped_folders(kind) for path in folder.glob(f"*{ending}")})


def _recorded(shared: Path) -> list[Path]:
    """Returns the folder that the installer recorded, for `--user`, `--prefix` or any other scheme."""
    try:
        files = importlib.metadata.files("solver-plugins") or []
    except importlib.metadata.PackageNotFoundError:  # A source tree that was never installed.
        return []
    size = len(shared.parts)
    found = (file for file in files if file.parent.parts[-size:] == shared.parts)
    return [Path(str(file.locate())).resolve().parent for file in found][:1]
