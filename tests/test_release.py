"""What a release would hold, and that it works where it is installed."""

import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_release_works_when_installed(tmp_path: Path):
    """Builds sdist and wheel and uses the wheel in a fresh environment: ``make release-check``."""
    # One test for all that needs a release: processes that share out the tests would each make one.
    release, target = tmp_path / "release", tmp_path / "target"
    run([sys.executable, str(ROOT / ".ci" / "release_check.py"), "--output", str(release)])
    assert sorted(path.name for path in release.iterdir()) == [
        f"solver_plugins-{VERSION}-py3-none-any.whl",
        f"solver_plugins-{VERSION}.tar.gz",
    ]
    with tarfile.open(next(release.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "configs/recipes/quickstart.yaml"} <= names

    # Beside the package is where solver_plugins.shipped looks for its files; see tests/test_shipped.py.
    options = ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", "--target", str(target)]
    run([sys.executable, "-m", "pip", "install", *options, str(next(release.glob("*.whl")))])
    assert (target / "solver_plugins" / "py.typed").is_file()
    for kind in ("studies", "recipes", "accelerate"):
        shared = {path.name for path in (target / "share" / "solver_plugins" / kind).iterdir()}
        assert shared == {path.name for path in (ROOT / "configs" / kind).glob("*.yaml")}


def test_citation_names_the_library_and_the_papers():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == VERSION and citation["license"] == "Apache-2.0"
    titles = [reference["title"] for reference in citation["references"]]
    readable = (ROOT / "docs" / "errata.md").read_text()
    assert len(titles) == 4 and all(f"*{title}*" in readable for title in titles)


def test_changelog_has_this_version():
    assert f"## [{VERSION}]" in (ROOT / "CHANGELOG.md").read_text()
