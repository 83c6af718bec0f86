"""Files that come with the package without being part of it: patches, and the settings of studies and finetunes.

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
    """Returns where files of a kind may be, the source tree first; not every place has to exist."""
    root = Path(__file__).parents[1]
    shared = Path("share", "solver_plugins", kind)
    places = [root / _IN_SOURCE[kind]] if (root / "pyproject.toml").is_file() else []
    # `pip install --target` puts them beside the package, and its record still says otherwise.
    places.append(root / shared)
    places.extend(_recorded(shared))
    places.append(Path(sysconfig.get_path("data")) / shared)
    return list(dict.fromkeys(places))


def shipped_file(kind: Kind, name: str) -> Path | None:
    """Returns a file by its name, or None where there is none."""
    files = (folder / name for folder in shipped_folders(kind))
    return next((file for file in files if file.is_file()), None)


def shipped_names(kind: Kind, ending: str) -> list[str]:
    """Lists the files of a kind, without their ending, in order."""
    return sorted({path.stem for folder in shipped_folders(kind) for path in folder.glob(f"*{ending}")})


def _recorded(shared: Path) -> list[Path]:
    """Returns the folder that the installer wrote down: that of `--user`, `--prefix` or any other scheme."""
    try:
        files = importlib.metadata.files("solver-plugins") or []
    except importlib.metadata.PackageNotFoundError:  # A source tree that was never installed.
        return []
    size = len(shared.parts)
    found = (file for file in files if file.parent.parts[-size:] == shared.parts)
    return [Path(str(file.locate())).resolve().parent for file in found][:1]
