"""Builds the sdist and, from it, the wheel, looks into both, and uses the wheel in a fresh environment.

    python .ci/release_check.py [--output dist] [--tour] [--with-dependencies]

Needs no network: the fresh environment borrows its dependencies from the Python that runs this script. With
--with-dependencies it installs them from the package index instead, which takes minutes and about 6 GB. With --tour it
also runs the code of docs/notebooks/tour.ipynb there.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# All that a release is made of. A copy of these is built, so that nothing old or unfinished gets in, and no build
# products are left in the tree.
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "NOTICE", "solver_plugins", "configs", "patches")
SHARED = {
    "patches": "patches/*.patch",
    "studies": "configs/studies/*.yaml",
    "recipes": "configs/recipes/*.yaml",
    "accelerate": "configs/accelerate/*.yaml",
}

SMOKE = """
import sys, timm, torch
from pathlib import Path
import solver_plugins
from solver_plugins import convert_model, load, revert_model, save
from solver_plugins.integrations.patching import list_patches
from solver_plugins.studies import list_studies, read_study_config
from solver_plugins.train.reading import read_config

place = Path(solver_plugins.__file__).parent
assert place.is_relative_to(sys.prefix), place
assert (place / "py.typed").is_file()
assert solver_plugins.__version__ == sys.argv[1], solver_plugins.__version__
for name in list_studies():
    read_study_config(name, "smoke")
read_config("quickstart")
assert list_patches()

model = timm.create_model("solver_lenet", num_classes=10).eval()
images = torch.randn(2, 3, 32, 32)
plain = model(images)
convert_model(model, "proxgd", iters=1)
assert torch.allclose(model(images), plain, atol=1e-6)
convert_model(revert_model(model), "proxgd", iters=5)
save(model, "converted")
assert torch.allclose(load("converted").eval()(images), model(images), atol=1e-6)
print("solver_plugins", solver_plugins.__version__, "works from", place)
"""


def main() -> None:
    """Runs all checks; the first that fails ends it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="where the sdist and the wheel are put")
    parser.add_argument("--tour", action="store_true", help="run the five-minute tour from the wheel, too")
    parser.add_argument("--with-dependencies", action="store_true", help="install them from the package index")
    arguments = parser.parse_args()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        sdist, wheel = build(work)
        check_wheel(wheel, version)
        python = use(wheel, version, work, arguments.with_dependencies)
        if arguments.tour:
            run([python, "-c", tour()], work / "elsewhere")
            print("The tour runs.")
        arguments.output.mkdir(parents=True, exist_ok=True)
        for made in (sdist, wheel):
            shutil.copy2(made, arguments.output)
            print(arguments.output / made.name)


def build(work: Path) -> tuple[Path, Path]:
    """Returns the sdist, and the wheel that was built from it, as ``python -m build`` does."""
    tree = work / "tree"
    tree.mkdir()
    for source in SOURCES:
        place = ROOT / source
        if place.is_dir():
            shutil.copytree(place, tree / source, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(place, tree)
    sdist = _hook("build_sdist", tree, work)
    with tarfile.open(sdist) as archive:
        archive.extractall(work, filter="data")
    return sdist, _hook("build_wheel", work / sdist.name.removesuffix(".tar.gz"), work)


def _hook(name: str, tree: Path, output: Path) -> Path:
    code = f"import sys; from setuptools import build_meta; print(build_meta.{name}(sys.argv[1]))"
    return output / run([sys.executable, "-c", code, str(output)], tree).splitlines()[-1]


def check_wheel(wheel: Path, version: str) -> None:
    """Checks that the wheel holds the package and its files, and nothing else."""
    stem = f"solver_plugins-{version}"
    expected = {f"{stem}.dist-info/licenses/{name}" for name in ("LICENSE", "NOTICE")}
    expected |= {"solver_plugins/py.typed", "solver_plugins/train/digits.npz"}
    expected |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "solver_plugins").rglob("*.py")}
    for kind, pattern in SHARED.items():
        expected |= {f"{stem}.data/data/share/solver_plugins/{kind}/{path.name}" for path in ROOT.glob(pattern)}
    # Recipes name it as the file beside their folder.
    expected.add(f"{stem}.data/data/share/solver_plugins/finetune.schema.json")
    for file in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt"):
        expected.add(f"{stem}.dist-info/{file}")
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if not name.endswith("/")}
    if found != expected:
        sys.exit(f"The wheel lacks {sorted(expected - found)} and should not have {sorted(found - expected)}.")


def use(wheel: Path, version: str, work: Path, with_dependencies: bool) -> str:
    """Installs the wheel into a fresh environment, and runs the command and a conversion from another folder.

    Returns the Python of that environment.
    """
    environment, elsewhere = work / "environment", work / "elsewhere"
    elsewhere.mkdir()
    venv.create(environment, symlinks=True)
    paths = {"base": str(environment), "platbase": str(environment)}
    scripts = Path(sysconfig.get_path("scripts", "venv", paths))
    options = ["--quiet", "--disable-pip-version-check"]
    if not with_dependencies:
        options += ["--no-deps", "--no-index"]
        # Only the folder: its .pth files, and with them an editable solver_plugins, are not read.
        borrowed = Path(sysconfig.get_path("purelib", "venv", paths)) / "borrowed.pth"
        borrowed.write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    python = str(scripts / "python")
    run([sys.executable, "-m", "pip", "--python", python, "install", *options, str(wheel)], elsewhere)
    listed = run([str(scripts / "solver-plugins"), "study", "list"], elsewhere)
    if "proxprop-stability" not in listed:
        sys.exit(f"Expected the studies; `solver-plugins study list` printed:\n{listed}")
    print(run([python, "-c", SMOKE, version], elsewhere), end="")
    return python


def tour() -> str:
    """Returns the code of the tour as one script."""
    book = json.loads((ROOT / "docs" / "notebooks" / "tour.ipynb").read_text(encoding="utf-8"))
    return "\n".join("".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code")


def run(command: list[str], folder: Path) -> str:
    """Returns what a command prints; ends with its messages where it fails."""
    # Neither the tree nor what a developer's shell points to may help out.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{command[0]} {command[1]} failed in {folder}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
