"""Registers with timm, transformers and PEFT as soon as both they and this package are imported, in either order.

None of them looks for plugins by itself, and importing them takes seconds, which someone who uses none should not
pay. So a finder joins Python's import system. It finds nothing, but it sees the import of the module that holds a
registry.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from solver_plugins.errors import PluginWarning, warn

LIBRARIES = {
    "timm.models": "solver_plugins.integrations.timm",
    "transformers.quantizers.auto": "solver_plugins.integrations.transformers",
    "peft.tuners.tuners_utils": "solver_plugins.integrations.peft",
}
"""The module with a library's registry -> our module that registers on import."""


class _Watcher(MetaPathFinder):
    """Lets other finders find a library's module, and imports ours after it."""

    def __init__(self) -> None:
        self.waiting = dict(LIBRARIES)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # Taken out before the others are asked: they come back here.
        ours = self.waiting.pop(fullname, None)
        if ours is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            self.waiting[fullname] = ours
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            del loader.exec_module  # The loader is as it was from now on.
            try:
                execute(module)
            except BaseException:
                self.waiting[fullname] = ours  # It may be imported again.
                raise
            _register(ours)

        loader.exec_module = execute_and_register
        return spec


def register_with_libraries() -> None:
    """Registers with the libraries that are imported, and with the others once they are; a second call does nothing."""
    if any(isinstance(finder, _Watcher) for finder in sys.meta_path):
        return
    watcher = _Watcher()
    for module, ours in LIBRARIES.items():
        if module in sys.modules:
            del watcher.waiting[module]
            _register(ours)
    sys.meta_path.insert(0, watcher)


def _register(name: str) -> None:
    try:
        importlib.import_module(name)
    except Exception as error:
        # Someone's import of timm or transformers must not fail because of us.
        library = name.rpartition(".")[2]
        warn(
            f"solver_plugins could not register with this version of {library} ({type(error).__name__}: {error}): "
            f"converted models are not loaded by {library} itself.",
            PluginWarning,
        )
