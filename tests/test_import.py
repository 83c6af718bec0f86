"""What `import solver_plugins` brings, and what it leaves until it is asked for."""

import subprocess
import sys

import pytest

import solver_plugins

HEAVY = (
    "timm", "transformers", "accelerate", "datasets", "peft", "scipy", "sklearn", "matplotlib", "rich", "typer",
    "solver_plugins.dropblock", "solver_plugins.equilibrium", "solver_plugins.proxprop", "solver_plugins.train",
    "solver_plugins.studies", "solver_plugins.cli",
)  # fmt: skip


def test_nothing_heavy_is_imported_before_it_is_asked_for():
    code = f"import sys, solver_plugins; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", solver_plugins.__all__)
def test_every_public_name_is_there(name):
    assert getattr(solver_plugins, name).__name__ == name
    assert name in dir(solver_plugins)


def test_other_names_are_not():
    with pytest.raises(AttributeError, match="'solver_plugins' has no attribute 'convert_modle'"):
        _ = solver_plugins.convert_modle
    with pytest.raises(AttributeError, match=r"'solver_plugins\.integrations' has no attribute 'lod'"):
        _ = solver_plugins.integrations.lod
