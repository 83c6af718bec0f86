"""Reads saved conversions and heads, and applies them again: no model is returned without a solver that it needs."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from solver_plugins.errors import SolverPluginsError, UnknownNameError
from solver_plugins.integrations.errors import LoadingError
from solver_plugins.integrations.heads import HeadRecord
from solver_plugins.prox import PRIORS
from solver_plugins.registry import SOLVERS
from solver_plugins.surgery import Conversion, apply_conversion


def read_conversion(data: Any, source: str) -> Conversion:
    """Reads a conversion from plain data.

    Args:
        data: The content of the JSON file.
        source: The file's name, for messages.

    Raises:
        LoadingError: If the data is damaged, has another format, or needs a solver or prior that is not registered.
    """
    if isinstance(data, dict) and "unwritable" in data:
        raise LoadingError(
            f"The model in {source} was saved with a conversion that has no written form: {data['unwritable']}"
        )
    try:
        conversion = Conversion.parse(data, owner=f"The conversion in {source}")
    except UnknownNameError as error:
        raise LoadingError(f"{source}: {error} {_remedy(SOLVERS)}") from error
    except SolverPluginsError as error:
        raise LoadingError(f"{error} The file is damaged, or of another version of solver_plugins.") from error
    # The registries look for plugins first, so a name that is missing now is not installed or not imported.
    _need("solver", (block.solver for block in conversion.blocks), SOLVERS, source)
    _need("prior", (str(block.prior) for block in conversion.blocks if block.partner is None), PRIORS, source)
    return conversion


def written_additions(conversion: Conversion | None, head: HeadRecord | None) -> dict[str, Any]:
    """Returns a conversion and a head as plain data, for :func:`read_additions`."""
    parts = {"conversion": conversion, "head": head}
    return {name: part.options() for name, part in parts.items() if part is not None}


def read_additions(data: Any, source: str) -> tuple[Conversion | None, HeadRecord | None]:
    """Reads a conversion, a head, or both from plain data.

    Raises:
        LoadingError: If the data holds neither, is damaged, or needs something that is not registered.
    """
    data = data if isinstance(data, dict) else {}
    head = None
    if data.get("head") is not None:
        try:
            head = HeadRecord.parse(data["head"], owner=f"The head in {source}")
        except SolverPluginsError as error:
            raise LoadingError(f"{error} The file is damaged, or of another version of solver_plugins.") from error
    if head is not None and data.get("conversion") is None:
        return None, head
    return read_conversion(data.get("conversion"), source), head


def replay(model: nn.Module, conversion: Conversion, source: str) -> nn.Module:
    """Converts a plain model as the saved one was.

    Raises:
        LoadingError: If the conversion does not fit the model.
    """
    try:
        return apply_conversion(model, conversion)
    except SolverPluginsError as error:
        raise LoadingError(f"The conversion in {source} does not fit this model: {error}") from error


def _need(kind: str, names: Iterable[str], registry: Any, source: str) -> None:
    missing = sorted({name for name in names if name not in registry})
    if missing:
        found = ", ".join(map(repr, missing))
        raise LoadingError(f"{source} needs the {kind} {found}, which is not registered. {_remedy(registry)}")


def _remedy(registry: Any) -> str:
    return (
        "Import the module that registers it, or install its package (one that offers it through the entry-point group "
        f"{registry.entry_point_group!r}), then load again."
    )
