"""Models by name: ``timm/vgg16``, ``hf/PATH_OR_ID``, or the folder of a saved model."""

import json
import re
import sys
from pathlib import Path
from typing import Any

from torch import nn

from solver_plugins.errors import SolverPluginsError, did_you_mean

FORMS = (
    "'timm/NAME' (such as timm/vgg16), 'hf/FOLDER' or 'hf/ID' (such as hf/google-bert/bert-base-uncased), or a folder"
)
_WEIGHTS = tuple(
    f"{name}{index}" for name in ("model.safetensors", "pytorch_model.bin") for index in ("", ".index.json")
)
_OFFLINE = (
    "Options without a network: a folder that was downloaded elsewhere ({folder}), HF_HOME set to a filled cache, and "
    "HF_HUB_OFFLINE=1 to look nowhere else{more}."
)
_OFFLINE_HF = _OFFLINE.format(folder="hf/FOLDER", more="")
_OFFLINE_TIMM = _OFFLINE.format(folder="timm/local-dir:FOLDER", more="; or random weights, without pretrained")


class ModelError(SolverPluginsError, ValueError):
    """A model cannot be built from its specification."""


def load_model(spec: str, pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Builds a model from its specification.

    Args:
        spec: "timm/NAME"; "hf/FOLDER" or "hf/ID"; or the folder of a converted model.
        pretrained: Whether to load pretrained weights of timm, or of the Hugging Face hub. Weights in a folder are
            always loaded.
        **kwargs: Arguments of ``timm.create_model``, or settings of the transformers config.
    """
    if not isinstance(spec, str) or not spec.strip():
        raise ModelError(f"Expected a model as {FORMS}; found {spec!r}.")
    library, _, name = spec.partition("/")
    if library == "timm" and name:
        return _timm(name, pretrained, kwargs)
    if library == "hf" and name:
        return _transformers(name, pretrained, kwargs)
    if Path(spec).is_dir():
        return _saved(Path(spec), pretrained, kwargs)
    near = _near_timm(spec.rpartition("/")[2])
    raise ModelError(f"Expected a model as {FORMS}; found {spec!r}, which is none of these.{near}")


def _near_timm(name: str) -> str:
    import timm

    return f" Did you mean 'timm/{name}'?" if timm.is_model(name.partition(".")[0]) else ""


def _timm(name: str, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    import timm

    if not name.startswith(("hf-hub:", "hf_hub:", "local-dir:")) and not timm.is_model(name.partition(".")[0]):
        # The list of all options, over a thousand names, would help nobody.
        near = did_you_mean(name, timm.list_models()).partition(" Options:")[0]
        letters = re.match("[A-Za-z]*", name)
        kind = letters.group() if letters else ""
        raise ModelError(f"timm has no model {name!r}.{near} timm.list_models('{kind}*') lists the models of a kind.")
    try:
        model: nn.Module = timm.create_model(name, pretrained=pretrained, **kwargs)
    except Exception as error:
        what = (
            f"timm.create_model({name!r}, pretrained={pretrained}{''.join(f', {k}={v!r}' for k, v in kwargs.items())})"
        )
        hint = f" {_OFFLINE_TIMM}" if pretrained and not isinstance(error, TypeError) else ""
        raise ModelError(f"{what} failed with {type(error).__name__}: {_first_line(error)}{hint}") from error
    return model


def _transformers(name: str, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    import transformers

    place = Path(name).expanduser()
    local = place.is_dir()
    if not local and (place.is_absolute() or name.startswith((".", "~"))):
        raise ModelError(f"Expected the folder of a transformers model; there is none at {str(place)!r}.")
    if local and not (place / "config.json").is_file():
        raise ModelError(f"Expected the folder of a transformers model; {str(place)!r} has no config.json.")
    if local and _is_converted(place):
        return _saved(place, pretrained, kwargs)
    source = str(place) if local else name
    try:
        config, unused = transformers.AutoConfig.from_pretrained(source, return_unused_kwargs=True, **kwargs)
    except Exception as error:
        looked = f" Looked for the folder {name!r}, in the cache of Hugging Face, and on its hub. {_OFFLINE_HF}"
        raise ModelError(
            f"No config of a transformers model in {source!r}: {type(error).__name__}: {_first_line(error)}"
            f"{'' if local else looked}"
        ) from error
    if unused:
        names = [key for key in config.to_dict() if not key.startswith("_")]
        unknown = sorted(unused)[0]
        raise ModelError(
            f"{type(config).__name__} has no setting {unknown!r}."
            f"{did_you_mean(unknown, names).partition(' Options:')[0]} It has: {', '.join(sorted(names)[:40])} ..."
        )
    made = _class_for(config, source)
    weights = any((place / file).is_file() for file in _WEIGHTS) if local else pretrained
    try:
        if weights:
            return made.from_pretrained(source, config=config)
        why = f"{source!r} holds no weights" if local else "pretrained weights were not asked for"
        print(f"{why}: {made.__name__} starts from random ones.", file=sys.stderr)
        return made._from_config(config)
    except Exception as error:
        hint = "" if local else f" {_OFFLINE_HF}"
        raise ModelError(
            f"{made.__name__} of {source!r} cannot be built: {type(error).__name__}: {_first_line(error)}{hint}"
        ) from error


def _class_for(config: Any, source: str) -> Any:
    """Returns the class that the config names, or the plain model of its family."""
    import transformers

    named = list(config.architectures or ())
    made = next((found for name in named if (found := getattr(transformers, name, None)) is not None), None)
    if made is None and named:
        raise ModelError(
            f"transformers {transformers.__version__} has no class {named[0]!r}, which {source!r} names: a newer "
            "version, or code of the model's own, which is not run here."
        )
    mapping = transformers.AutoModel._model_mapping
    if made is None and type(config) not in mapping:
        raise ModelError(
            f"{source!r} names no class under 'architectures', and there is none for {type(config).__name__}."
        )
    made = mapping[type(config)] if made is None else made
    return made[0] if isinstance(made, (list, tuple)) else made


def _saved(place: Path, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    """Loads a converted model with ``solver_plugins.load``."""
    from solver_plugins.integrations.saving import load

    if kwargs:
        raise ModelError(
            f"{str(place)!r} is the folder of a saved model, which is built as it was: leave out {', '.join(kwargs)}."
        )
    return load(place)


def _is_converted(place: Path) -> bool:
    """Whether a folder's config mentions a conversion."""
    try:
        return "solver_plugins" in (place / "config.json").read_text()
    except (OSError, UnicodeDecodeError):
        return False


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else ""


def read_value(text: str) -> Any:
    """Reads a value of the command line: a number, true, false, null or a list; anything else is text."""
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except json.JSONDecodeError:
        return text
