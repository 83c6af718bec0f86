"""Where the package meets timm and transformers: models by name, saving and loading, and the Trainer's callbacks.

Importing this package imports neither library, nor the packages that only saving and loading need.
"""

from typing import TYPE_CHECKING, Any

from solver_plugins.integrations.errors import LoadingError, SavingError

if TYPE_CHECKING:
    from solver_plugins.integrations.saving import load, save

__all__ = ["LoadingError", "SavingError", "load", "save"]


def __getattr__(name: str) -> Any:
    if name not in ("load", "save"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from solver_plugins.integrations import saving

    return getattr(saving, name)
