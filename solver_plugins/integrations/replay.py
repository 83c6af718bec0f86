"""Reads saved conversions and heads, and applies them again: no model is returned without a solver that it needs."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import safetensors
import torch
from torch import Tensor, nn

from solver_plugins.errors import SolverPluginsError, UnknownNameError
from solver_plugins.integrations.errors import LoadingError
from solver_plugins.integrations.heads import HeadRecord
from solver_plugins.prox import PRIORS
from solver_plugins.registry import SOLVERS
from solver_plugins.surgery import Conversion, apply_conversion
from solver_plugins.surgery.conversion import ROWS

TENSORS = "solver_plugins.safetensors"
"""The file with what was calibrated, beside the conversion."""


def read_conversion(data: Any, source: str) -> Conversion:
    """Reads a conversion from plain data; ``source`` is the file's name, for messages.

    LoadingError if the data is damaged, has another format, or needs a solver or prior that is not registered.
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


def written_additions(
    conversion: Conversion | None, head: HeadRecord | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns a conversion and a head as plain data, for :func:`read_additions`, and the tensors beside them."""
    parts = {"conversion": conversion, "head": head}
    data = {name: part.options() for name, part in parts.items() if part is not None}
    tensors = take_tensors(data["conversion"]) if conversion is not None else {}
    return ({**data, "tensors": sorted(tensors)} if tensors else data), tensors


def take_tensors(conversion: dict[str, Any]) -> dict[str, Tensor]:
    """Takes gains, shifts and gates out of a written conversion, and returns them as tensors by layer."""
    tensors: dict[str, Tensor] = {}
    for block in conversion.get("blocks", ()):
        for name in ROWS:
            row = block.pop(name, None)
            if row is not None:
                exact = torch.tensor(row, dtype=torch.float64)
                tensors[f"{block['layer']}.{name}"] = exact.float() if exact.equal(exact.float().double()) else exact
    return tensors


def with_tensors(data: Any, source: str, read: Callable[[], dict[str, Tensor]]) -> Any:
    """Returns written data with the gains, shifts and gates that were taken out of it, which ``read`` reads."""
    names = data.get("tensors") if isinstance(data, dict) else None
    if not names:
        return data
    data = {key: copy.deepcopy(value) for key, value in data.items() if key != "tensors"}
    try:
        tensors = read()
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise LoadingError(f"{source} needs {TENSORS}, which cannot be read: {error}.") from error
    if sorted(tensors) != sorted(map(str, names)):
        raise LoadingError(f"{TENSORS} is not the one that {source} was saved with: it holds other tensors.")
    blocks = data["conversion"]["blocks"] if isinstance(data.get("conversion"), dict) else []
    for block in blocks if isinstance(blocks, list) else []:
        for name in ROWS:
            row = tensors.get(f"{block.get('layer')}.{name}") if isinstance(block, dict) else None
            if row is not None:
                block[name] = row.tolist()
    return data


def read_additions(
    data: Any, source: str, read: Callable[[], dict[str, Tensor]]
) -> tuple[Conversion | None, HeadRecord | None]:
    """Reads a conversion, a head, or both from plain data; ``read`` reads the tensors that were saved beside it."""
    data = with_tensors(data if isinstance(data, dict) else {}, source, read)
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
    """Converts a plain model as the saved one was; LoadingError if the conversion does not fit the model."""
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
