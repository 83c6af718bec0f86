"""Where the package meets timm and transformers: models by name, saving, loading, and their own ways of doing so.

Nothing here imports a host until it is needed.
"""

from solver_plugins.integrations.errors import LoadingError, SavingError
from solver_plugins.integrations.saving import load, save

__all__ = ["LoadingError", "SavingError", "load", "save"]
