"""transformers: conversions that ``save_pretrained`` writes and ``from_pretrained`` applies again.

``convert_model`` puts the conversion into ``config.quantization_config``, and the quantizer that this module registers
reads it. ``import solver_plugins`` registers it, before or after ``import transformers``. Without it transformers logs
an unknown quantization type, whose name says what to import, and loads the plain network.
"""

import json
from pathlib import Path
from typing import Any

import torch
from accelerate.hooks import remove_hook_from_module
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.integrations.accelerate import accelerate_dispatch
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.hub import cached_file
from transformers.utils.quantization_config import QuantizationConfigMixin

from solver_plugins.blocks import blocks_of, gates_of
from solver_plugins.blocks.gate import GATE
from solver_plugins.equilibrium import DeepOptEq
from solver_plugins.errors import SolverPluginsWarning, warn
from solver_plugins.integrations.errors import LoadingError
from solver_plugins.integrations.heads import HeadRecord, attach_again, head_of
from solver_plugins.integrations.replay import TENSORS, read_conversion, replay, with_tensors
from solver_plugins.integrations.weights import save_weights
from solver_plugins.surgery import Conversion
from solver_plugins.surgery.apply import note_conversion
from solver_plugins.surgery.model_config import QUANT_METHOD, remove_from_config
from solver_plugins.wrappers import HOOKED, wrapper_of


@register_quantization_config(QUANT_METHOD)
class SolverPluginsConfig(QuantizationConfigMixin):
    """The conversion in ``config.json``; pass one to ``from_pretrained`` to convert plain weights.

    ``tensors`` names what was calibrated, where that is in a file beside the config.
    """

    def __init__(
        self,
        conversion: Conversion | dict[str, Any],
        quant_method: str = QUANT_METHOD,
        tensors: list[str] | None = None,
    ):
        data = conversion.options() if isinstance(conversion, Conversion) else conversion
        read_conversion(data, "the config")
        self.quant_method: Any = quant_method
        self.conversion = data
        self.tensors = tensors

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Reads the conversion from a config; raises LoadingError if it is damaged."""
        unknown = sorted(config_dict.keys() - {"quant_method", "conversion", "tensors"})
        if unknown or "conversion" not in config_dict:
            found = f"found {', '.join(unknown)}" if unknown else "found none"
            raise LoadingError(f"Expected the quantization_config of solver_plugins to hold a conversion; {found}.")
        return super().from_dict(config_dict, return_unused_kwargs, **kwargs)


@register_quantizer(QUANT_METHOD)
class SolverPluginsQuantizer(HfQuantizer):
    """Converts a model that transformers has loaded.

    Quantizers convert before the weights are loaded. This one converts afterwards: keys and shapes do not change, and
    buffers that are made on the meta device would hold whatever is in memory.
    """

    requires_calibration = False

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self._source = (model.config._name_or_path, getattr(model.config, "_commit_hash", None))
        # save_pretrained writes gates with the weights; the conversion, which comes later, holds them, too.
        known, gates = model._keys_to_ignore_on_load_unexpected, rf"(^|\.){GATE}$"
        # A set since transformers 5.1 or later, a list or None before.
        merged: Any = known | {gates} if isinstance(known, set) else [*(known or ()), gates]
        model._keys_to_ignore_on_load_unexpected = merged
        return model

    def _tensors(self) -> dict[str, Tensor]:
        source, revision = self._source
        found = cached_file(source, TENSORS, revision=revision)
        assert found is not None  # It raises where there is none.
        return load_file(found)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        data = self.quantization_config.to_dict()
        data = with_tensors({key: data[key] for key in data if key != "quant_method"}, "the config", self._tensors)
        conversion = read_conversion(data["conversion"], "the config")
        _remove_marks(model)
        _initialise_mismatched(model, self._shapes)
        hooked = any(wrapper_of(module) is HOOKED for module in model.modules())
        if hooked:
            _take_off_hooks(model)
        # It is entered again for this model, in which another head may have changed names.
        remove_from_config(model)
        _replay(model, conversion)
        if blocks_of(model):
            note_conversion(model)
        if hooked:
            accelerate_dispatch(model, None, model.hf_device_map, None, None, False)
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True


def save_model(model: Any, folder: Path, additions: dict[str, Any]) -> None:
    """Saves a model by its own ``save_pretrained``, with its conversion as plain data."""
    if head_of(model) is not None:
        # ``from_pretrained`` does not know heads and would draw a new classifier: this folder is for ``load``.
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        save_weights(model, folder)
        return
    if additions:
        note_conversion(model)
    gates = gates_of(model)
    # The weights are those of the plain model; gates are part of the conversion.
    weights = {name: value for name, value in model.state_dict().items() if name not in gates} if gates else None
    model.save_pretrained(folder, state_dict=weights)
    if "tensors" in additions:
        # save_pretrained has one file for numbers, the config; ours are written beside it.
        place = folder / "config.json"
        config = json.loads(place.read_text(encoding="utf-8"))
        config["quantization_config"] = {"quant_method": QUANT_METHOD, **additions}
        place.write_text(json.dumps(config, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def load_saved(folder: Path, config: dict[str, Any]) -> nn.Module:
    """Loads a model, converted or plain, by the class that its config names."""
    return _class_of(folder, config).from_pretrained(folder)


def load_with_head(folder: Path, config: dict[str, Any], head: HeadRecord) -> nn.Module:
    """Loads a model with a head that ``save_pretrained`` has written, without its conversion.

    ``from_pretrained`` does it, because files of some models have other names for tensors, those of a head included.
    LoadingError if weights are missing in the file, or it holds others.
    """
    made = _class_of(folder, config)

    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        made.__init__(self, *args, **kwargs)
        attach_again(self, head)

    with_head: Any = type(made.__name__, (made,), {"__init__": build, "__module__": made.__module__})
    model, found = with_head.from_pretrained(folder, config=_plain_settings(made, folder), output_loading_info=True)
    wrong = [
        f"{kind.replace('_', ' ')} {sorted(names)[:5]}" for kind, names in found.items() if names and "keys" in kind
    ]
    if wrong:
        raise LoadingError(f"The weights in {str(folder)!r} are not those of the model with its head: {wrong}.")
    model.__class__ = made
    for module in model.modules():
        if isinstance(module, DeepOptEq):
            # It is not saved, and was made on the meta device: it holds whatever is in memory.
            module.residual = torch.zeros_like(module.residual)
    return model


def build_plain(folder: Path, config: dict[str, Any]) -> nn.Module:
    """Builds the plain model of a folder's config, with new weights."""
    made = _class_of(folder, config)
    return made._from_config(_plain_settings(made, folder))


def _plain_settings(made: Any, folder: Path) -> Any:
    settings = made.config_class.from_pretrained(folder)
    if hasattr(settings, "quantization_config"):
        del settings.quantization_config
    return settings


def _class_of(folder: Path, config: dict[str, Any]) -> Any:
    import transformers

    names = config.get("architectures") or []
    made = getattr(transformers, names[0], None) if names else None
    if made is None:
        raise LoadingError(
            f"transformers has no class {', '.join(names) or 'named in the config'}: load {str(folder)!r} with the "
            "class's own from_pretrained, after import solver_plugins."
        )
    return made


def _initialise_mismatched(model: Any, shapes: dict[str, torch.Size]) -> None:
    """Gives new weights to layers that have another size in the checkpoint (a head for other classes), and warns.

    With a quantizer, whose weights may be packed, transformers accepts weights of any size and does not pass
    ``ignore_mismatched_sizes`` on.
    """
    found = {name: p for name, p in model.named_parameters() if name in shapes and p.shape != shapes[name]}
    if not found:
        return
    for name, parameter in found.items():
        owner, _, own = name.rpartition(".")
        made = nn.Parameter(torch.empty(shapes[name], dtype=parameter.dtype, device=parameter.device))
        setattr(model.get_submodule(owner), own, made)
    with torch.no_grad():
        for owner in dict.fromkeys(name.rpartition(".")[0] for name in found):
            module = model.get_submodule(owner)
            kept = {own: p.clone() for own, p in module.named_parameters(owner, recurse=False) if own not in found}
            model._init_weights(module)
            for own, value in kept.items():
                model.get_parameter(own).copy_(value)
    model.tie_weights()
    lines = [f"{name} ({tuple(p.shape)} in the checkpoint, {tuple(shapes[name])} here)" for name, p in found.items()]
    warn(f"Of another size, and initialised anew: {', '.join(lines)}.", SolverPluginsWarning)


def _replay(model: Any, conversion: Conversion) -> None:
    """Converts a model, or the part of it that was saved: a backbone under a new head, or without its old head."""
    modules = dict(model.named_modules())
    names = conversion.names
    prefix = getattr(model, "base_model_prefix", "")
    inner = getattr(model, prefix, None) if prefix else None
    if names <= modules.keys() or not prefix:
        replay(model, conversion, "the config")
    elif isinstance(inner, nn.Module) and inner is not model and names <= dict(inner.named_modules()).keys():
        replay(inner, conversion, "the config")
    elif inner is None and any(name.startswith(f"{prefix}.") for name in names):
        # The saved model contained this one, under a head that is not wanted now.
        outer = nn.Module()
        outer.add_module(prefix, model)
        kept = [block for block in conversion.blocks if _inside(prefix, block.layer, block.outlet)]
        dropouts = {
            kind: tuple(name for name in getattr(conversion, kind) if _inside(prefix, name))
            for kind in ("passed_over", "routed")
        }
        left = [block.layer for block in conversion.blocks if block not in kept]
        if left:
            warn(
                f"{type(model).__name__} has no {', '.join(left)}: those solvers of the saved model are left out, as "
                "their weights are.",
                SolverPluginsWarning,
            )
        if kept:
            replay(outer, conversion.model_copy(update={"blocks": tuple(kept), **dropouts}), "the config")
    else:
        replay(model, conversion, "the config")


def _inside(prefix: str, *names: str) -> bool:
    return all(name.startswith(f"{prefix}.") for name in names)


def _take_off_hooks(model: Any) -> None:
    """Removes the hooks of a device map, under which a solver would never run; refuses offloaded weights."""
    away = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if away:
        raise LoadingError(
            f"The weights {', '.join(away[:3])} are offloaded, and a solver needs them where it runs: choose a "
            "device_map without 'disk', and with 'cpu' only for the whole model."
        )
    remove_hook_from_module(model, recurse=True)
    for module in model.modules():
        # accelerate leaves the old forward on the instance, where it would hide a solver just like the hook.
        left = vars(module).get("forward")
        if getattr(left, "__self__", None) is module:
            del vars(module)["forward"]


def _remove_marks(model: Any) -> None:
    """Removes what marks a model as quantized: its weights are plain, and can be cast, trained and saved."""
    for name in ("hf_quantizer", "quantization_method", "is_quantized"):
        vars(model).pop(name, None)
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and "_is_quantized" in vars(config):
            del config._is_quantized
