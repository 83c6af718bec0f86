"""Solvers of a distribution that pip has built and installed."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import solver_plugins

PLUGIN = '''
    """A solver from elsewhere."""

    from solver_plugins.config import StrictConfig

    class DummyConfig(StrictConfig):
        """Options of the dummy."""

        iters: int = 3

    class Dummy:
        """Does nothing, politely.

        More about that.
        """

        name = "dummy_plugin"
        Config = DummyConfig
        tags = ("deterministic", "third_party")

    class Impostor(Dummy):
        """Claims the name of a built-in solver."""

        name = "proxgd"

    class Misnamed(Dummy):
        """Its name is not that of its entry point."""

        name = "something_else"
'''

PROJECTS = {
    "polite-plugin": {
        "module": "polite_plugin",
        "source": PLUGIN,
        "entry_points": {"dummy_plugin": "polite_plugin:Dummy"},
    },
    "rude-plugin": {
        "module": "rude_plugin",
        "source": PLUGIN,
        "entry_points": {"proxgd": "rude_plugin:Impostor", "misnamed": "rude_plugin:Misnamed"},
    },
    "broken-plugin": {
        "module": "broken_plugin",
        "source": "import a_module_that_was_never_written",
        "entry_points": {"broken": "broken_plugin:Broken"},
    },
}

SCRIPT = """
    import json
    import warnings

    import solver_plugins
    from solver_plugins.config import StrictConfig
    from solver_plugins.errors import DuplicateNameError, UnknownNameError
    from solver_plugins.registry import SOLVERS, list_solvers, register_solver, solver_info

    class StandIn:
        name, Config, tags = "proxgd", StrictConfig, ()

    try:
        register_solver(StandIn)
    except DuplicateNameError:
        pass  # The real one is there.

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        names = list_solvers()
        list_solvers()

    def miss(name):
        try:
            solver_info(name)
        except UnknownNameError as error:
            return str(error)

    info = solver_info("dummy_plugin")
    print(json.dumps({
        "names": names,
        "tagged": list_solvers("third_party"),
        "description": info.description,
        "source": info.source,
        "tags": sorted(info.tags),
        "default": info.target.Config.parse({}).options(),
        "proxgd": solver_info("proxgd").source,
        "warnings": [[warning.category.__name__, str(warning.message)] for warning in caught],
        "broken": miss("broken"),
        "misnamed": miss("misnamed"),
    }))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> dict:
    """Builds and installs the projects with pip, and returns what a fresh interpreter sees of them."""
    root = tmp_path_factory.mktemp("plugins")
    for name, project in PROJECTS.items():
        folder = root / name
        folder.mkdir()
        (folder / f"{project['module']}.py").write_text(textwrap.dedent(project["source"]))
        points = "\n".join(f'{point} = "{value}"' for point, value in project["entry_points"].items())
        (folder / "pyproject.toml").write_text(
            '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
            f'[project]\nname = "{name}"\nversion = "1.0"\n'
            f'[project.entry-points."solver_plugins.solvers"]\n{points}\n'
            f'[tool.setuptools]\npy-modules = ["{project["module"]}"]\n'
        )
    site = root / "site"
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    run([sys.executable, "-m", "pip", "install", *options, "--target", str(site), *(str(root / n) for n in PROJECTS)])
    assert len(list(site.glob("*.dist-info"))) == len(PROJECTS)
    package = Path(solver_plugins.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(package)])}
    return json.loads(run([sys.executable, "-c", textwrap.dedent(SCRIPT)], cwd=root, env=environment))


def run(command: list[str], **kwargs) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, **kwargs)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_installed_plugin_is_listed(installed):
    assert "dummy_plugin" in installed["names"]
    assert installed["tagged"] == ["dummy_plugin"]


def test_an_installed_plugin_is_described(installed):
    assert installed["description"] == "Does nothing, politely."
    assert installed["source"] == "polite_plugin"
    assert installed["tags"] == ["deterministic", "third_party"]
    assert installed["default"] == {"iters": 3}


def test_each_installed_plugin_that_cannot_be_used_is_warned_of_once(installed):
    assert [category for category, _ in installed["warnings"]] == ["PluginWarning"] * 3
    broken, misnamed, collision = (text for _, text in installed["warnings"])
    assert "plugin 'broken' of 'broken-plugin' could not be loaded" in broken
    assert "ModuleNotFoundError: No module named 'a_module_that_was_never_written'" in broken
    assert "Upgrade or uninstall 'broken-plugin'" in broken
    assert "Misnamed.name is 'something_else'" in misnamed
    assert "plugin 'proxgd' of 'rude-plugin'" in collision
    assert "DuplicateNameError: solver 'proxgd' is registered already" in collision


def test_an_installed_plugin_that_failed_is_named_when_asked_for(installed):
    assert "Unknown solver 'broken'. A plugin offers it but failed to load: ModuleNotFoundError" in installed["broken"]
    assert "failed to load: RegistrationError" in installed["misnamed"]
    assert "dummy_plugin" in installed["broken"]


def test_the_built_in_solver_stays(installed):
    assert "proxgd" in installed["names"]
    assert installed["proxgd"].startswith(("solver_plugins", "__main__"))
