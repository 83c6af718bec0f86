"""Prints constraints for pip: the oldest allowed version of all that users install (`make test-oldest`)."""

import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
for requirement in [*project["dependencies"], *extras["export"], *extras["peft"], *extras["tensorboard"]]:
    print(requirement.replace(">=", "=="))
