"""transformers: conversions that ``save_pretrained`` writes and ``from_pretrained`` does again.

``convert_model`` puts the conversion into ``config.quantization_config``; the quantizer registered here reads it. It is
registered by ``import solver_plugins`` or ``import solver_plugins.integrations.transformers``, before or after
``import transformers``. Without it transformers logs an unknown quantization type, whose name says what to import, and
loads the plain network.
"""

from pathlib import Path
from typing import Any

import torch
from accelerate.hooks import remove_hook_from_module
from torch import nn
from transformers.integrations.accelerate import accelerate_dispatch
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from solver_plugins.blocks import TrackedStep
from solver_plugins.equilibrium import DeepOptEq
from solver_plugins.errors import SolverPluginsWarning, warn
from solver_plugins.integrations.errors import LoadingError
from solver_plugins.integrations.heads import HeadRecord, attach_again, head_of
from solver_plugins.integrations.replay import read_conversion, replay
from solver_plugins.integrations.tensors import write_weights
from solver_plugins.surgery import Conversion
from solver_plugins.surgery.conversion import note_conversion
from solver_plugins.surgery.model_config import QUANT_METHOD, remove_from_config
from solver_plugins.wrappers import HOOKED, wrapper_of


@register_quantization_config(QUANT_METHOD)
class SolverPluginsConfig(QuantizationConfigMixin):
    """What ``config.json`` holds of a conversion; also an argument of ``from_pretrained`` for plain weights.

    Args:
        conversion: The conversion, or its plain data.
        quant_method: Always the same.
    """

    def __init__(self, conversion: Conversion | dict[str, Any], quant_method: str = QUANT_METHOD):
        data = conversion.options() if isinstance(conversion, Conversion) else conversion
        read_conversion(data, "the config")
        self.quant_method: Any = quant_method
        self.conversion = data

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Reads it from a config; a damaged one raises LoadingError."""
        unknown = sorted(config_dict.keys() - {"quant_method", "conversion"})
        if unknown or "conversion" not in config_dict:
            found = f"found {', '.join(unknown)}" if unknown else "found none"
            raise LoadingError(f"Expected the quantization_config of solver_plugins to hold a conversion; {found}.")
        return super().from_dict(config_dict, return_unused_kwargs, **kwargs)


@register_quantizer(QUANT_METHOD)
class SolverPluginsQuantizer(HfQuantizer):
    """Converts a model that transformers has loaded.

    Not before the weights come, as quantizers do: keys and shapes are the plain ones anyway, and buffers that are made
    on the meta device would hold whatever is in memory afterwards.
    """

    requires_calibration = False

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        conversion = read_conversion(self.quantization_config.to_dict()["conversion"], "the config")
        _remove_marks(model)
        _initialise_mismatched(model, self._shapes)
        hooked = any(wrapper_of(module) is HOOKED for module in model.modules())
        if hooked:
            _take_off_hooks(model)
        # Entered again for this very model: names may have changed with the head.
        remove_from_config(model)
        _replay(model, conversion)
        if any(isinstance(module, TrackedStep) for module in model.modules()):
            note_conversion(model)
        if hooked:
            accelerate_dispatch(model, None, model.hf_device_map, None, None, False)
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """Returns True: weights and config are plain."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether the model can be trained: yes."""
        return True


def save_model(model: Any, folder: Path) -> None:
    """Saves a converted model by its own ``save_pretrained``, with the conversion as it is now."""
    if head_of(model) is not None:
        # ``from_pretrained`` knows no head, and would draw a classifier instead: such a folder is for ``load``.
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        write_weights(model, folder)
        return
    note_conversion(model)
    model.save_pretrained(folder)


def load_model(folder: Path, config: dict[str, Any]) -> nn.Module:
    """Loads a converted model by the class that its config names."""
    model: nn.Module = _class_of(folder, config).from_pretrained(folder)
    return model


def load_with_head(folder: Path, config: dict[str, Any], head: HeadRecord) -> nn.Module:
    """Loads a model that ``save_pretrained`` has written with a head, without its conversion.

    By ``from_pretrained``: files of some models have other names for tensors, even for those of what is attached.

    Raises:
        LoadingError: If the file lacks weights, or has others.
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
            # Not saved, and made on the meta device: it would hold whatever is in memory.
            module.residual = torch.zeros_like(module.residual)
    return model


def build_plain(folder: Path, config: dict[str, Any]) -> nn.Module:
    """Builds the plain model of a folder's config, with new weights."""
    made = _class_of(folder, config)
    model: nn.Module = made._from_config(_plain_settings(made, folder))
    return model


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
    """Gives new weights to layers that are of another size in the checkpoint (a head for other classes), and warns.

    Behind a quantizer transformers takes over weights of any size, as theirs are packed, and does not hand on
    ``ignore_mismatched_sizes``.
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
    """Converts a model, or the part of it that was saved: a backbone under a new head, or without its old one."""
    modules = dict(model.named_modules())
    names = _names(conversion)
    prefix = getattr(model, "base_model_prefix", "")
    inner = getattr(model, prefix, None) if prefix else None
    if names <= modules.keys() or not prefix:
        replay(model, conversion, "the config")
    elif isinstance(inner, nn.Module) and inner is not model and names <= dict(inner.named_modules()).keys():
        replay(inner, conversion, "the config")
    elif inner is None and any(name.startswith(f"{prefix}.") for name in names):
        # The saved model had this one inside, and a head that is not wanted now.
        outer = nn.Module()
        outer.add_module(prefix, model)
        kept = [block for block in conversion.blocks if _inside(prefix, block.layer, block.host)]
        passed, routed = (
            tuple(name for name in names if _inside(prefix, name))
            for names in (conversion.passed_over, conversion.routed)
        )
        left = [block.layer for block in conversion.blocks if block not in kept]
        if left:
            warn(
                f"{type(model).__name__} has no {', '.join(left)}: those solvers of the saved model are left out, as "
                "their weights are.",
                SolverPluginsWarning,
            )
        if kept:
            part = conversion.model_copy(update={"blocks": tuple(kept), "passed_over": passed, "routed": routed})
            replay(outer, part, "the config")
    else:
        replay(model, conversion, "the config")


def _names(conversion: Conversion) -> set[str]:
    parts = [(block.layer, block.host, block.norm, block.partner) for block in conversion.blocks]
    named = {name for part in parts for name in part if name is not None}
    return named | {*conversion.passed_over, *conversion.routed}


def _inside(prefix: str, *names: str) -> bool:
    return all(name.startswith(f"{prefix}.") for name in names)


def _take_off_hooks(model: Any) -> None:
    """Removes the hooks of a device map, under which a solver would never run; LoadingError where weights are away."""
    away = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if away:
        raise LoadingError(
            f"The weights {', '.join(away[:3])} are offloaded, and a solver needs them where it runs: choose a "
            "device_map without 'disk', and with 'cpu' only for the whole model."
        )
    remove_hook_from_module(model, recurse=True)
    for module in model.modules():
        # accelerate leaves the old forward on the instance, where it would hide a solver as the hook did.
        left = vars(module).get("forward")
        if getattr(left, "__self__", None) is module:
            del vars(module)["forward"]


def _remove_marks(model: Any) -> None:
    """Takes off what says "quantized": the weights are plain, and can be cast, trained and saved as such."""
    for name in ("hf_quantizer", "quantization_method", "is_quantized"):
        vars(model).pop(name, None)
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and "_is_quantized" in vars(config):
            del config._is_quantized
