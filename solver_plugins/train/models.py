"""The networks of a run: built for the data's classes, given weights from a file where asked, and with a head."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from solver_plugins.integrations.heads import attach_opteq_head
from solver_plugins.integrations.models import ModelError, load_model
from solver_plugins.integrations.weights import load_in_order, read_weights
from solver_plugins.train.config import FinetuneConfig, HeadSection, ModelSection
from solver_plugins.train.data import Splits
from solver_plugins.train.errors import summary_of
from solver_plugins.train.problems import SINGLE

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def build_model(config: FinetuneConfig, splits: Splits) -> nn.Module:
    """Builds the plain model of a run, in its dtype."""
    section, classes = config.model, len(splits.classes)
    asked = section.args.get("num_classes", section.args.get("num_labels"))
    if asked is not None and asked != classes:
        raise ModelError(
            f"model.args asks for {asked} classes; the data has {classes} ({', '.join(splits.classes[:5])}, ...). "
            "Leave the number out: it is taken from the data."
        )
    args = {key: value for key, value in section.args.items() if key not in ("num_classes", "num_labels")}
    if section.spec.startswith("timm/"):
        model = build_timm(section, args, classes)
    elif section.spec.startswith("hf/"):
        model = _transformers(section, args, splits)
    else:
        model = load_model(section.spec, section.pretrained, **args)
        _load_own(model, section)
    _check_classes(model, classes)
    published = getattr(model, "pretrained_cfg", {}).get("num_classes")
    if section.pretrained and section.spec.startswith("timm/") and published != classes:
        set_head(_head_layers(model), section.head_init)
    return model.to(DTYPES[section.dtype])


def set_head(layers: Iterable[nn.Module], how: str) -> None:
    """Draws the weights of a new classifier's layers: 'reset' small and random, 'zero', or 'library' to keep them.

    timm draws the classifier of some families ten times as large as ``reset_classifier`` does, which costs a short
    finetune many points.
    """
    for layer in layers if how != "library" else ():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            layer.reset_parameters()
            for parameter in layer.parameters(recurse=False) if how == "zero" else ():
                nn.init.zeros_(parameter)


def _head_layers(model: Any) -> list[nn.Module]:
    """Returns the layers of a timm model's classifier; distilled models have two of them."""
    heads = model.get_classifier()
    return [layer for head in (heads if isinstance(heads, (tuple, list)) else (heads,)) for layer in head.modules()]


def build_timm(section: ModelSection, args: dict[str, Any], classes: int) -> nn.Module:
    """Builds a timm model for these classes, whatever its weights were trained for; raises as :func:`build_model`."""
    if section.weights is None:
        return load_model(section.spec, section.pretrained, num_classes=classes, **args)
    state = read_weights(section.weights)
    # The file's classifier may have other classes: build it as in the file, then replace it.
    plain = load_model(section.spec, num_classes=classes, **args)
    rows = _rows_of_classifier(state, plain)
    if rows is None or rows == classes:
        return _load(plain, state, section)
    model: Any = _load(load_model(section.spec, num_classes=rows, **args), state, section)
    model.reset_classifier(classes)
    for layer, drawn in zip(_head_layers(model), _head_layers(plain), strict=True):
        # As the library draws it for these classes; not all families reset it to that.
        layer.load_state_dict(drawn.state_dict())
    set_head(_head_layers(model), section.head_init)
    return model


def _rows_of_classifier(state: dict[str, Tensor], model: Any) -> int | None:
    """Returns the number of classes of a state dict: from its classifier, else from its last matrix."""
    name = getattr(model, "pretrained_cfg", {}).get("classifier")
    if isinstance(name, str) and f"{name}.weight" in state:
        return state[f"{name}.weight"].shape[0]
    matrices = [value for value in state.values() if value.dim() >= 2]
    return matrices[-1].shape[0] if matrices else None


def _load_own(model: nn.Module, section: ModelSection) -> nn.Module:
    return model if section.weights is None else _load(model, read_weights(section.weights), section)


def _load(model: nn.Module, state: dict[str, Tensor], section: ModelSection) -> nn.Module:
    if section.in_order:
        return load_in_order(model, state)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ModelError(
            f"The weights in {section.weights!r} are not those of {section.spec!r}: {' '.join(lines[:3])[:600]} If "
            "only the names differ, model.in_order=true matches them in order."
        ) from None
    return model


def _transformers(section: ModelSection, args: dict[str, Any], splits: Splits) -> nn.Module:
    from transformers import AutoConfig, AutoModelForImageClassification, AutoModelForSequenceClassification

    place = Path(section.spec.removeprefix("hf/")).expanduser()
    source = str(place) if place.is_dir() else section.spec.removeprefix("hf/")
    auto: Any = AutoModelForSequenceClassification if splits.is_text else AutoModelForImageClassification
    names = dict(enumerate(splits.classes))
    # A classifier of single labels is what transformers takes for granted.
    kind = {} if splits.problem_type == SINGLE else {"problem_type": splits.problem_type}
    local = any(place.glob("*.safetensors")) or any(place.glob("pytorch_model*.bin"))
    try:
        settings = AutoConfig.from_pretrained(
            source, id2label=names, label2id={name: number for number, name in names.items()}, **kind, **args
        )
        unknown = [key for key in args if key not in settings.to_dict()]
        if unknown:
            raise ModelError(f"{type(settings).__name__} has no setting {unknown[0]!r} (model.args).")
        if local or (section.pretrained and not place.is_dir()):
            model, info = auto.from_pretrained(
                source, config=settings, ignore_mismatched_sizes=True, output_loading_info=True
            )
            set_head(_new_layers(model, info)[-1:], section.head_init)
        else:
            model = auto.from_config(settings)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"{auto.__name__} of {source!r} cannot be built: {summary_of(error)} Looked for the folder "
            f"{source!r}, in the cache of Hugging Face, and on its hub. Options without a network: a folder that was "
            "downloaded elsewhere (hf/FOLDER), or HF_HOME set to a filled cache, with HF_HUB_OFFLINE=1."
        ) from error
    return _load_own(model, section)


def _new_layers(model: nn.Module, info: Mapping[str, Any]) -> list[nn.Module]:
    """Returns the linear layers that a checkpoint of transformers has not filled, in order: a new classifier's."""
    mismatched = [key if isinstance(key, str) else key[0] for key in info["mismatched_keys"]]
    new = {*info["missing_keys"], *mismatched}
    return [
        module for name, module in model.named_modules() if isinstance(module, nn.Linear) and f"{name}.weight" in new
    ]


def _check_classes(model: Any, classes: int) -> None:
    found = getattr(model, "num_classes", None) or getattr(getattr(model, "config", None), "num_labels", None)
    if isinstance(found, int) and found != classes:
        raise ModelError(f"The model has {found} classes; the data has {classes}. Expected the same number.")


def attach_head(model: nn.Module, section: HeadSection) -> nn.Module:
    """Puts an equilibrium in the place of the last layer; raises as ``attach_opteq_head`` does."""
    options = section.options()
    del options["name"]
    return attach_opteq_head(model, **options)
