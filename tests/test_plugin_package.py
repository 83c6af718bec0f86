"""The package of docs/plugins.md: built and installed by pip, then used by a fresh interpreter in another folder."""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import solver_plugins

PACKAGE = Path(__file__).parent / "plugin_package"
PAGE = Path(__file__).parents[1] / "docs" / "plugins.md"

# One process for all: what takes time is importing the hosts.
SCRIPT = """
    import contextlib, io, json, sys
    from pathlib import Path

    from solver_plugins.cli import main

    def command(*arguments):
        out, err, code = io.StringIO(), io.StringIO(), 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main(arguments)
            except SystemExit as exit:
                code = exit.code or 0
        return {"code": code, "out": out.getvalue(), "err": err.getvalue()}

    # The commands first: they have to find the plugin by themselves, before anything imports it.
    found = {
        "list": command("study", "list", "third_party", "--json"),
        "inspect": command("inspect", "timm/solver_lenet", "--solver", "heavy_ball", "--option", "momentum=0.3"),
        "mistake": command("inspect", "timm/solver_lenet", "--solver", "heavy_ball", "--option", "momentum=0.7"),
        "run": command("study", "run", "heavy-ball-race", "--scale", "smoke", "--output", "race"),
    }
    names = {}
    for example in json.loads(sys.argv[1]):
        exec(compile(example, "docs/plugins.md", "exec"), names)

    from solver_plugins import prox_for, solver_info

    found["solver"] = solver_info("heavy_ball").source
    found["prior"] = repr(prox_for("sparse_relu", threshold=0.3))
    found["of module"] = repr(prox_for(names["SparseReLU"](0.4)))
    print(json.dumps(found))
"""


def blocks_of_files() -> dict[str, str]:
    """Returns the blocks of the page that are files of the package, by name."""
    return dict(re.findall(r"^`([\w/.-]+)`:\n\n```\w+\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE))


def other_examples() -> list[str]:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return [block for block in blocks if block not in blocks_of_files().values()]


def test_the_page_prints_the_package():
    files = {
        path for path in PACKAGE.rglob("*") if path.suffix in {".py", ".toml", ".yaml"} and "build" not in path.parts
    }
    assert blocks_of_files() == {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in files}
    assert len(files) == 6 and len(other_examples()) == 1


def use_installed(root: Path) -> dict:
    """Installs the package, and returns what a fresh interpreter in another folder does with it."""
    # Built from a copy: a build leaves files beside its source.
    shutil.copytree(PACKAGE, root / "source", ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    site = root / "site"
    run([sys.executable, "-m", "pip", "install", *options, "--target", str(site), str(root / "source")])
    library = Path(solver_plugins.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(library)])}
    elsewhere = root / "elsewhere"
    elsewhere.mkdir()
    script = [sys.executable, "-W", "error", "-c", textwrap.dedent(SCRIPT), json.dumps(other_examples())]
    printed = run(script, cwd=elsewhere, env=environment)
    found = json.loads(printed.splitlines()[-1])
    found["metrics"] = json.loads((elsewhere / "race" / "metrics.json").read_text())
    return found


def run(command: list[str], **kwargs) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, **kwargs)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_installed_package(tmp_path: Path):
    # One test: processes that share out the tests would each install it.
    found = use_installed(tmp_path)

    # The solver, by name; its options are checked.
    assert found["solver"] == "heavy_ball.solver"
    assert found["inspect"]["code"] == 0, found["inspect"]["err"]
    assert "4 of 5 layers become heavy_ball" in found["inspect"]["out"]
    assert found["mistake"]["code"] == 2
    assert "momentum" in found["mistake"]["err"] and "0.5" in found["mistake"]["err"]

    # The prior, by name and by module.
    assert found["prior"] == "SparseReluPrior(threshold=0.3)"
    assert found["of module"] == "SparseReluPrior(threshold=0.4)"

    # The study: momentum helps, and no solver rises above its first iterate.
    (study,) = json.loads(found["list"]["out"])
    assert (study["name"], study["source"]) == ("heavy-ball-race", "heavy_ball.study")
    assert found["run"]["code"] == 0, found["run"]["err"]
    gaps = {cell["arm"]: cell["gap"] for cell in found["metrics"]["cells"]}
    assert 0 <= gaps["heavy_ball"] < gaps["proxgd"] < 1
