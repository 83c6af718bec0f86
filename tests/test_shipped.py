"""Files beside the package are found wherever an installer put them."""

import importlib.metadata
import shutil
from pathlib import Path

import pytest

from solver_plugins import shipped
from solver_plugins.errors import OptionError
from solver_plugins.train.reading import read_config

ROOT = Path(shipped.__file__).parents[1]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that is not in its source tree, in an environment without data."""
    (tmp_path / "lib" / "solver_plugins").mkdir(parents=True)
    monkeypatch.setattr(shipped, "__file__", str(tmp_path / "lib" / "solver_plugins" / "shipped.py"))
    monkeypatch.setattr(shipped.sysconfig, "get_path", lambda name: str(tmp_path / "prefix"))
    monkeypatch.setattr(importlib.metadata, "files", lambda name: None)
    return tmp_path


def test_the_source_tree_has_them_all():
    for kind in ("studies", "recipes", "accelerate"):
        assert shipped.shipped_folders(kind)[0] == ROOT / "configs" / kind
        assert shipped.shipped_names(kind, ".yaml")
    assert shipped.shipped_names("patches", ".patch")


@pytest.mark.parametrize("place", ["lib", "prefix"])
def test_beside_the_package_or_in_the_environment(elsewhere: Path, place: str):
    assert shipped.shipped_file("recipes", "quickstart.yaml") is None
    folder = elsewhere / place / "share" / "solver_plugins" / "recipes"
    shutil.copytree(ROOT / "configs" / "recipes", folder)
    assert shipped.shipped_file("recipes", "quickstart.yaml") == folder / "quickstart.yaml"


def test_where_the_record_says(elsewhere: Path, monkeypatch: pytest.MonkeyPatch):
    folder = elsewhere / "home" / "share" / "solver_plugins" / "studies"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").touch()
    path = importlib.metadata.PackagePath("../home/share/solver_plugins/studies/mine.yaml")
    path.dist = importlib.metadata.PathDistribution(elsewhere / "lib" / "solver_plugins.dist-info")
    monkeypatch.setattr(importlib.metadata, "files", lambda name: [path])
    assert shipped.shipped_file("studies", "mine.yaml") == folder / "mine.yaml"


def test_a_recipe_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert read_config("quickstart") == read_config(ROOT / "configs" / "recipes" / "quickstart.yaml")
    with pytest.raises(OptionError, match=r"or the name of a recipe; found 'quickstrat'\. Did you mean 'quickstart'"):
        read_config("quickstrat")
    # A file is a file, whatever it is called.
    with pytest.raises(OptionError, match=r"Cannot read the config 'quickstart\.yaml'"):
        read_config("quickstart.yaml")
