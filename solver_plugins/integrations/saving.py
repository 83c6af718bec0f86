"""One pair of functions for every model: ``save(model, folder)`` and ``load(folder)``."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
from torch import nn

from solver_plugins.blocks import blocks_of
from solver_plugins.integrations.card import push, write_card
from solver_plugins.integrations.errors import LoadingError, SavingError
from solver_plugins.integrations.folder import existing_folder, new_folder
from solver_plugins.integrations.heads import HEAD_ENTRY, attach_again, head_of, remove_opteq_head
from solver_plugins.integrations.preprocessing import save_preprocessing
from solver_plugins.integrations.replay import TENSORS, read_additions, replay, written_additions
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
    preprocessing: Any = None,
    metrics: Mapping[str, float] | None = None,
    push_to_hub: str | None = None,
    overwrite: bool = False,
) -> None:
    """Saves a model, converted, with an equilibrium head or plain: weights as safetensors, everything else as JSON.

    Weights have the names that they have in the plain model; what was calibrated is in a file of its own. The folder of
    a timm model is one for timm's ``local-dir:``. A transformers model is saved by its ``save_pretrained``, with the
    tokenizer and the image processor that it came with; one with a head can be loaded by :func:`load` only. Any other
    module is saved as weights and conversion, and you build it again yourself to load it. ``README.md`` says how to
    load it, with this package and without. The folder is written as a whole: an interrupted save leaves what was there
    before. In a run of several processes, call it in one of them.

    Args:
        model: The model.
        folder: Where to save it.
        model_args: The arguments that a timm model was created with (``{"drop_rate": 0.5}``), which timm does not
            remember. Usual ones are found without your help; a model that could not be built again is refused.
        kind: "timm", "transformers" or "torch" (weights and conversion only); None looks at the model.
        preprocessing: What goes with a transformers model: a tokenizer, a processor, or several of them. None copies
            the files of the folder or repository that the model was loaded from.
        metrics: Numbers for the README, such as ``{"accuracy": 0.91}``.
        push_to_hub: A repository of the Hugging Face Hub to upload the folder to, such as ``"me/vit-solvers"``.
        overwrite: Whether to replace a model that was saved there before.

    Raises:
        ConversionError: If its conversion cannot be written down.
        SavingError: If the folder is taken, the model could not be loaded again, or a tokenizer has no vocabulary.
    """
    _refuse_wrapped(model)
    head = head_of(model)
    conversion = conversion_of(model) if blocks_of(model) else None
    additions, tensors = written_additions(conversion, head)
    kind = kind or _kind_of(model)
    if kind not in ("timm", "transformers", "torch"):
        raise SavingError(f"Expected kind 'timm', 'transformers' or 'torch'; found {kind!r}.")
    if model_args is not None and kind != "timm":
        raise SavingError(f"model_args are for timm models; found a {type(model).__name__} to save as {kind!r}.")
    if kind == "timm":
        from solver_plugins.integrations.timm import config_for

        config = config_for(model, additions, model_args)
    elif preprocessing is not None and kind != "transformers":
        raise SavingError(f"preprocessing is for models of transformers; found a {type(model).__name__}.")
    with new_folder(folder, overwrite) as made:
        if kind == "transformers":
            from solver_plugins.integrations.transformers import save_model

            save_model(model, made, additions)
            save_preprocessing(model, made, preprocessing)
        else:
            save_weights(model, made)
        if tensors:
            safetensors.torch.save_file(tensors, made / TENSORS)
        if kind == "timm":
            _write_json(made / CONFIG, config)
        elif kind == "torch" or head is not None:
            label = f"{type(model).__module__}.{type(model).__qualname__}"
            _write_json(made / CONVERSION, {"model": label, **(additions or {"plain": True})})
        write_card(model, made, kind, conversion, head, metrics or {})
    if push_to_hub is not None:
        push(Path(folder), push_to_hub)


def load(folder: str | os.PathLike[str], model: nn.Module | None = None) -> nn.Module:
    """Loads a saved model, in evaluation mode; step sizes are computed from its weights.

    Args:
        folder: Where :func:`save`, or ``save_pretrained`` of a transformers model, has put it.
        model: A plain model to load into, for a folder that does not say how to build one.

    Returns:
        The model as it was saved, which is ``model`` if you passed one.

    Raises:
        LoadingError: If the folder holds no model, or a conversion that cannot be applied here: a converted model never
            comes back as a plain one. A model that you passed is as it was then.
    """
    place = existing_folder(folder)
    source = repr(str(folder))
    if (place / CONVERSION).is_file():
        data = _read_json(place / CONVERSION)
        if model is None and (place / CONFIG).is_file():
            from solver_plugins.integrations.transformers import build_plain as build_transformers

            model = build_transformers(place, _read_json(place / CONFIG))
        if model is None:
            label = data.get("model", "a module") if isinstance(data, dict) else "a module"
            raise LoadingError(f"{source} holds weights of {label}: build one and pass it, load(folder, model=...).")
        return _load_into(model, place, data, source)
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
    return _load_into(build_plain(config, source) if model is None else model, place, entry, source)


def _load_transformers(place: Path, config: dict[str, Any], model: nn.Module | None, source: str) -> nn.Module:
    entry = config.get("quantization_config")
    converted = isinstance(entry, dict) and entry.get("quant_method") == QUANT_METHOD
    if model is not None:
        raise LoadingError(f"{source} holds a transformers model, which is built from its config: leave out model=.")
    if HEAD_ENTRY in config:
        from solver_plugins.integrations.transformers import load_with_head

        written = entry.get("conversion") if isinstance(entry, dict) and converted else None
        data = {"head": config[HEAD_ENTRY], "conversion": written}
        conversion, head = read_additions(data, source, lambda: safetensors.torch.load_file(place / TENSORS))
        if head is None:
            raise LoadingError(f"Expected a head under {HEAD_ENTRY} in {CONFIG} in {source}; found none.")
        loaded = load_with_head(place, config, head)
        return (loaded if conversion is None else replay(loaded, conversion, source)).eval()
    from solver_plugins.integrations.transformers import load_saved

    return load_saved(place, config)


def _load_into(model: nn.Module, place: Path, data: Any, source: str) -> nn.Module:
    """Loads into a given model; after an error the model is as it was."""
    if not isinstance(model, nn.Module):
        raise LoadingError(f"Expected a torch.nn.Module to load into; found {type(model).__name__}.")
    conversion, head = None, None
    if data is not None and not (isinstance(data, dict) and data.get("plain") is True):
        conversion, head = read_additions(data, source, lambda: safetensors.torch.load_file(place / TENSORS))
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
    modules = [(module, module.training, dict(module._buffers)) for module in model.modules()]
    tensors = [(one, one.data, one.detach().clone()) for one in (*model.parameters(), *model.buffers())]

    def put_back() -> None:
        for one, data, value in tensors:
            # A cast gives Parameters new data, and modules new buffers.
            one.data = data.copy_(value)
        for module, mode, buffers in modules:
            module.training = mode
            module._buffers.update(buffers)

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
