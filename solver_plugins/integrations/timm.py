"""timm: converted models as folders that ``timm.create_model("local-dir:...", pretrained=True)`` loads.

The config of such a folder names an architecture that this module registers. It builds the plain architecture, lets
timm load the weights, and applies the conversion again. If this module was not imported, timm refuses, and its error
says what to import. The plain network needs no import: ``timm.create_model(NAME, num_classes=..., checkpoint_path=
"folder/model.safetensors")``.

The conversion is among the ``model_args`` of ``config.json``, which timm passes to the architecture, and not in a file
of its own, so that a folder on the Hugging Face Hub (``hf-hub:``) works as well.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from safetensors.torch import load_file
from timm.models import create_model, is_model, load_pretrained, register_model
from torch import Tensor, nn

# Registers the papers' networks.
from solver_plugins.errors import SolverPluginsWarning, warn
from solver_plugins.integrations import architectures as architectures
from solver_plugins.integrations.errors import LoadingError, SavingError
from solver_plugins.integrations.heads import attach_again
from solver_plugins.integrations.rebuild import differences, guesses, plain_copy
from solver_plugins.integrations.replay import TENSORS, read_additions, replay

ARCHITECTURE = "solver_plugins.integrations.timm must be imported first"
"""timm looks up the part before the first dot, and prints the whole text if nobody has registered that."""
ENTRY = "converted"
_SOURCES = ("url", "file", "state_dict", "hf_hub_id", "hf_hub_filename", "source")
_ONLY_FOR_THE_ORIGINAL = ("label_offset", "custom_load")
"""Settings for the weights that timm published: timm would cut off a class of ours, or look for another format."""
ARGUMENTS = "solver_plugins_model_args"
"""Where a loaded model remembers what it was created with."""


def config_for(model: nn.Module, additions: dict[str, Any], model_args: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the content of ``config.json``; SavingError if timm would build another network from it."""
    found: Any = getattr(model, "pretrained_cfg", None)
    architecture = found.get("architecture") if isinstance(found, dict) else None
    if not architecture or not is_model(architecture):
        raise SavingError(
            f"Expected a model made by timm.create_model; found {type(model).__name__}, whose architecture "
            f"{architecture!r} timm does not know. Pass kind='torch' to save weights and conversion alone."
        )
    pretrained = {
        key: value
        for key, value in found.items()
        if key not in (*_SOURCES, *_ONLY_FOR_THE_ORIGINAL) and (value is not None or key in ("pool_size", "classifier"))
    }
    # Otherwise timm changes the weights of a first convolution that does not read three channels.
    pretrained["first_conv"] = None
    config: dict[str, Any] = {"architecture": ARCHITECTURE if additions else architecture}
    for key in ("num_classes", "num_features"):
        if isinstance(getattr(model, key, None), int):
            config[key] = getattr(model, key)
    if "num_classes" in config:
        pretrained["num_classes"] = config["num_classes"]
    config["pretrained_cfg"] = _plain(pretrained, "pretrained_cfg")
    args = _arguments(model, architecture, config, model_args)
    config["model_args"] = {**args, ENTRY: {"architecture": architecture, **additions}} if additions else args
    return config


def read_entry(config: dict[str, Any], source: str) -> dict[str, Any] | None:
    """Returns our entry in a config, or None for a plain model; raises LoadingError if it is missing."""
    args = config.get("model_args")
    entry = args.get(ENTRY) if isinstance(args, dict) else None
    if isinstance(entry, dict):
        return entry
    if entry is not None or config["architecture"] == ARCHITECTURE:
        raise LoadingError(f"{source} was a converted timm model, but its config does not hold the conversion.")
    return None


def build_plain(config: dict[str, Any], source: str) -> nn.Module:
    """Builds the plain model of a config, with new weights."""
    entry = read_entry(config, source)
    architecture = (config if entry is None else entry).get("architecture")
    if not isinstance(architecture, str) or not is_model(architecture):
        raise LoadingError(f"{source} needs the timm model {architecture!r}, which this version of timm does not have.")
    args = {key: value for key, value in (config.get("model_args") or {}).items() if key != ENTRY}
    try:
        model = _build(architecture, config, args)
    except (TypeError, RuntimeError, ValueError) as error:
        raise LoadingError(f"timm cannot build {architecture!r} with the arguments in {source}: {error}") from error
    vars(model)[ARGUMENTS] = args
    return model


@register_model
def solver_plugins(pretrained: bool = False, converted: Any = None, **kwargs: Any) -> nn.Module:
    """Builds a converted model; timm calls this for folders and repositories that solver_plugins has saved."""
    if not isinstance(converted, dict) or not isinstance(converted.get("architecture"), str):
        raise LoadingError(
            "The timm model 'solver_plugins' stands for saved converted models: expected 'local-dir:FOLDER' or "
            "'hf-hub:REPOSITORY'. To convert a model, use solver_plugins.convert_model(timm.create_model(NAME))."
        )
    given = kwargs.get("pretrained_cfg") or {}
    source = repr(given.get("file") or given.get("hf_hub_id") or "the config") if isinstance(given, dict) else "it"
    conversion, head = read_additions(converted, source, lambda: _tensors_beside(given))
    if not pretrained:
        warn(
            f"The converted network of {source} gets random weights, as every timm model without pretrained=True does; "
            "pass pretrained=True for the saved ones.",
            SolverPluginsWarning,
        )
    model = create_model(converted["architecture"], pretrained=pretrained and head is None, **kwargs)
    if head is not None:
        attach_again(model, head)
        if pretrained:
            # The weights in the folder are those of the model with its head.
            load_pretrained(model, num_classes=int(model.num_classes), strict=True)  # type: ignore[arg-type]
    own = ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")
    vars(model)[ARGUMENTS] = {key: value for key, value in kwargs.items() if key not in own}
    return model if conversion is None else replay(model, conversion, source)


def _tensors_beside(cfg: dict[str, Any]) -> dict[str, Tensor]:
    """Returns the tensors in the folder or repository that timm loads from."""
    if cfg.get("file"):
        # The folder, or with older versions of timm the file with the weights in it.
        place = Path(cfg["file"])
        return load_file((place if place.is_dir() else place.parent) / TENSORS)
    name, _, revision = str(cfg.get("hf_hub_id") or "").partition("@")
    if not name:
        raise FileNotFoundError("timm does not say which folder or repository it loads")
    return load_file(hf_hub_download(name, TENSORS, revision=revision or None))


def _arguments(
    model: nn.Module, architecture: str, config: dict[str, Any], given: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Returns arguments from which timm builds exactly this network: those given, or those found by trying."""
    args = _plain(dict(given if given is not None else vars(model).get(ARGUMENTS, {})), "model_args")
    if "num_classes" in config:
        args.pop("num_classes", None)  # It is in the config already, and the model's own number is the right one.
    plain = plain_copy(model)
    wrong = _tried(plain, architecture, config, args)
    if given is None and wrong:
        for name, value in guesses(plain).items():
            more = {**args, name: value}
            left = _tried(plain, architecture, config, more)
            if len(left) < len(wrong):
                args, wrong = more, left
            if not wrong:
                break
    if wrong:
        shown = "".join(f"\n  - {line}" for line in wrong[:5])
        more_lines = f"\n  - and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise SavingError(
            f"timm.create_model({architecture!r}, **{args}) does not build this model:{shown}{more_lines}\nPass what "
            "it was created with, save(model, folder, model_args={...}); or, if it was changed afterwards, save(model, "
            "folder, kind='torch') and load(folder, model=...)."
        )
    return args


def _tried(model: nn.Module, architecture: str, config: dict[str, Any], args: dict[str, Any]) -> list[str]:
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                made = _build(architecture, config, args)
        except Exception:
            # A few models compute with their tensors while they are built; wrong arguments fail here again.
            try:
                made = _build(architecture, config, args)
            except Exception as error:
                return [f"it fails with {type(error).__name__}: {error}"] * 10_000
    return differences(model, made)


def _build(architecture: str, config: dict[str, Any], args: dict[str, Any]) -> nn.Module:
    made: nn.Module = create_model(
        architecture, pretrained=False, pretrained_cfg=dict(config["pretrained_cfg"]), **args
    )
    return made


def _plain(data: dict[str, Any], owner: str) -> dict[str, Any]:
    """Returns data as it is after writing and reading it as JSON."""
    for key, value in data.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise SavingError(
                f"{owner}: {key}={value!r} cannot be written as JSON ({error}); give layers by their names ('relu')."
            ) from None
    result: dict[str, Any] = json.loads(json.dumps(data))
    return result
