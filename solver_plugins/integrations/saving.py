"""One pair of functions for every model: ``save(model, folder)`` and ``load(folder)``."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from torch import nn

from solver_plugins.blocks import blocks_of
from solver_plugins.integrations.errors import LoadingError, SavingError
from solver_plugins.integrations.folder import existing_folder, new_folder
from solver_plugins.integrations.heads import HEAD_ENTRY, attach_again, head_of, remove_opteq_head
from solver_plugins.integrations.replay import read_additions, replay, written_additions
from solver_plugins.integrations.weights import load_weights, save_weights
from solver_plugins.surgery import conversion_of
from solver_plugins.surgery.model_config import QUANT_METHOD, is_pretrained_model
from solver_plugins.wrappers import wrapper_of

Kind = Literal["timm", "transformers", "torch"]
CONFIG = "config.json"
CONVERSION = "solver_plugins.json"


def save(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    model_args: Mapping[str, Any] | None = None,
    kind: Kind | None = None,
    overwrite: bool = False,
) -> None:
    """Saves a converted model, or one with an equilibrium head: weights as safetensors, everything else as JSON.

    Weights have the names that they have in the plain model. The folder of a timm model is one for timm's
    ``local-dir:``. A transformers model is saved by its ``save_pretrained``; one with a head can be loaded by
    :func:`load` only. Any other module is saved as weights and conversion, and you build it again yourself to load it.
    The folder is written as a whole: an interrupted save leaves what was there before. In a run of several processes,
    call it in one of them.

    Args:
        model: The converted model.
        folder: Where to save it.
        model_args: The arguments that a timm model was created with (``{"drop_rate": 0.5}``), which timm does not
            remember. Usual ones are found without your help; a model that could not be built again is refused.
        kind: "timm", "transformers" or "torch" (weights and conversion only); None looks at the model.
        overwrite: Whether to replace a model that was saved there before.

    Raises:
        ConversionError: If the model is not converted, or its conversion cannot be written down.
        SavingError: If the folder is taken, or the model could not be loaded again.
    """
    _refuse_wrapped(model)
    head = head_of(model)
    # A model with a head need not be converted; without one, it raises if it is not.
    conversion = conversion_of(model) if head is None or blocks_of(model) else None
    kind = kind or _kind_of(model)
    if kind not in ("timm", "transformers", "torch"):
        raise SavingError(f"Expected kind 'timm', 'transformers' or 'torch'; found {kind!r}.")
    if model_args is not None and kind != "timm":
        raise SavingError(f"model_args are for timm models; found a {type(model).__name__} to save as {kind!r}.")
    if kind == "timm":
        from solver_plugins.integrations.timm import config_for

        config = config_for(model, conversion, head, model_args)
    with new_folder(folder, overwrite) as made:
        if kind == "transformers":
            from solver_plugins.integrations.transformers import save_model

            save_model(model, made)
            if head is None:
                return
        else:
            save_weights(model, made)
        if kind == "timm":
            _write_json(made / CONFIG, config)
        else:
            label = f"{type(model).__module__}.{type(model).__qualname__}"
            _write_json(made / CONVERSION, {"model": label, **written_additions(conversion, head)})


def load(folder: str | os.PathLike[str], model: nn.Module | None = None) -> nn.Module:
    """Loads a converted model, in evaluation mode; its step sizes are computed from its weights.

    Args:
        folder: Where :func:`save`, or ``save_pretrained`` of a transformers model, has put it.
        model: A plain model to load into, for a folder that does not say how to build one.

    Returns:
        The converted model, which is ``model`` if you passed one.

    Raises:
        LoadingError: If the folder holds no conversion, or one that cannot be applied here; a plain network is never
            returned. A model that you passed is as it was then.
    """
    place = existing_folder(folder)
    source = repr(str(folder))
    if (place / CONVERSION).is_file():
        if model is None and (place / CONFIG).is_file():
            from solver_plugins.integrations.transformers import build_plain as build_transformers

            model = build_transformers(place, _read_json(place / CONFIG))
            return _load_into(model, place, _read_json(place / CONVERSION), source)
        if model is None:
            data = _read_json(place / CONVERSION)
            label = data.get("model", "a module") if isinstance(data, dict) else "a module"
            raise LoadingError(f"{source} holds weights of {label}: build one and pass it, load(folder, model=...).")
        return _load_into(model, place, _read_json(place / CONVERSION), source)
    if not (place / CONFIG).is_file():
        raise LoadingError(f"{source} holds neither {CONFIG} nor {CONVERSION}: it is not the folder of a saved model.")
    config = _read_json(place / CONFIG)
    if not isinstance(config, dict):
        raise LoadingError(f"Expected a mapping in {CONFIG} in {source}; found {type(config).__name__}.")
    if "model_type" in config:
        return _load_transformers(place, config, model, source)
    if "architecture" not in config:
        raise LoadingError(f"{CONFIG} in {source} is neither one of timm nor one of transformers.")
    from solver_plugins.integrations.timm import build_plain, read_entry

    entry = read_entry(config, source)
    if model is not None:
        return _load_into(model, place, entry, source)
    return _load_into(build_plain(config, entry, source), place, entry, source)


def _load_transformers(place: Path, config: dict[str, Any], model: nn.Module | None, source: str) -> nn.Module:
    entry = config.get("quantization_config")
    converted = isinstance(entry, dict) and entry.get("quant_method") == QUANT_METHOD
    if model is not None:
        raise LoadingError(f"{source} holds a transformers model, which is built from its config: leave out model=.")
    if HEAD_ENTRY in config:
        from solver_plugins.integrations.transformers import load_with_head

        written = entry.get("conversion") if isinstance(entry, dict) and converted else None
        conversion, head = read_additions({"head": config[HEAD_ENTRY], "conversion": written}, source)
        if head is None:
            raise LoadingError(f"Expected a head under {HEAD_ENTRY} in {CONFIG} in {source}; found none.")
        loaded = load_with_head(place, config, head)
        return (loaded if conversion is None else replay(loaded, conversion, source)).eval()
    if not converted:
        raise LoadingError(
            f"{source} holds a transformers model without a conversion: load it with from_pretrained, then convert it."
        )
    from solver_plugins.integrations.transformers import load_converted

    return load_converted(place, config)


def _load_into(model: nn.Module, place: Path, data: Any, source: str) -> nn.Module:
    """Loads into a given model; after an error the model is as it was."""
    if not isinstance(model, nn.Module):
        raise LoadingError(f"Expected a torch.nn.Module to load into; found {type(model).__name__}.")
    conversion, head = read_additions(data, source)
    put_back = _snapshot(model)
    attached = False
    try:
        if head is not None:
            attach_again(model, head)
            attached = True
        load_weights(model, place)
        return (model if conversion is None else replay(model, conversion, source)).eval()
    except BaseException:
        if attached:
            remove_opteq_head(model)
        put_back()
        raise


def _snapshot(model: nn.Module) -> Callable[[], None]:
    """Returns a function that puts a model's tensors and modes back to what they are now."""
    parameters = [(parameter, parameter.data, parameter.detach().clone()) for parameter in model.parameters()]
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    training = [(module, module.training) for module in model.modules()]

    def put_back() -> None:
        for parameter, data, value in parameters:
            parameter.data = data.copy_(value)
        for module, name, buffer, copy in buffers:
            # A cast gives a module new buffers, and its Parameters new data.
            module._buffers[name] = buffer
            if buffer is not None and copy is not None:
                buffer.copy_(copy)
        for module, mode in training:
            module.training = mode

    return put_back


def _kind_of(model: nn.Module) -> Kind:
    if is_pretrained_model(model):
        return "transformers"
    found = getattr(model, "pretrained_cfg", None)
    return "timm" if isinstance(found, dict) and found.get("architecture") else "torch"


def _refuse_wrapped(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise SavingError(f"Expected a torch.nn.Module; found {type(model).__name__}.")
    wrapper = wrapper_of(model)
    if wrapper is not None and wrapper.inside is not None:
        raise SavingError(f"Expected a plain model; found {wrapper.label}: save model.{wrapper.inside}.")
    if hasattr(model, "peft_config") and hasattr(model, "merge_and_unload"):
        raise SavingError(
            "Expected a plain model; found one with PEFT adapters: save those with model.save_pretrained(folder), or "
            "save model.merge_and_unload()."
        )


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoadingError(f"Cannot read {str(path)!r}: {error}.") from error
