"""Which layers a run trains: all of them, some of them, or more and more of them."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from solver_plugins.errors import did_you_mean
from solver_plugins.surgery.errors import TargetError
from solver_plugins.surgery.targets import read_targets
from solver_plugins.train.config import FinetuneConfig


class Trainable:
    """The layers of a model that a config trains, epoch by epoch."""

    def __init__(self, config: FinetuneConfig, model: nn.Module):
        self.model = model
        everything = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        if config.peft is not None:
            # The adapters have said what is trained.
            everything = {name for name, one in model.named_parameters(remove_duplicate=False) if one.requires_grad}
        first = everything if config.train is None else self._parameters(config.train, "train")
        if config.freeze is not None:
            first = first - self._parameters(config.freeze, "freeze")
        self.later = {
            epoch: self._parameters(names, f"unfreeze.{epoch}") for epoch, names in (config.unfreeze or {}).items()
        }
        self.first = first
        if not self.at(1):
            raise TargetError(
                "Expected at least one layer to be trained in the first epoch; train and freeze leave none."
            )

    @property
    def is_everything(self) -> bool:
        """Whether all layers are trained from the start."""
        return len(self.first) == len(list(self.model.named_parameters(remove_duplicate=False)))

    def at(self, epoch: int) -> set[str]:
        """Returns the names of the Parameters that an epoch trains; the first epoch is 1."""
        return self.first.union(*(names for start, names in self.later.items() if start <= epoch))

    def start(self, epoch: int) -> None:
        """Makes the model train what an epoch trains. Norms without a trained Parameter keep their statistics."""
        trained = self.at(epoch)
        # A Parameter with several names is trained if any of them is.
        objects = {id(one) for name, one in self.model.named_parameters(remove_duplicate=False) if name in trained}
        for parameter in self.model.parameters():
            parameter.requires_grad_(id(parameter) in objects)
            if not parameter.requires_grad:
                parameter.grad = None
        for module in self.model.modules():
            own = list(module.parameters(recurse=False))
            if isinstance(module, _NormBase) and own and not any(one.requires_grad for one in own):
                module.eval()

    def describe(self) -> str | None:
        """Returns a sentence for the dry run; None if everything is trained."""
        if self.is_everything:
            return None
        sizes = {name: one.numel() for name, one in self.model.named_parameters(remove_duplicate=False)}
        told = f"trained: {sum(sizes[name] for name in self.first):,} parameters in {len(self.first)} tensors"
        steps = [f"{sum(sizes[name] for name in self.at(epoch)):,} from epoch {epoch}" for epoch in sorted(self.later)]
        return ", ".join([told, *steps])

    def _parameters(self, given: Any, option: str) -> set[str]:
        """Returns the Parameters in the layers that the names mean, or that they name themselves."""
        modules = dict(self.model.named_modules())
        found: set[str] = set()
        for target in read_targets(given, option).targets:
            layers = [name for name, module in modules.items() if name and target.matches(name, module)]
            met = {
                name
                for name, _ in self.model.named_parameters(remove_duplicate=False)
                if target.matches(name, self.model) or any(name.startswith(f"{layer}.") for layer in layers)
            }
            if not met:
                near = _near(target.text, modules)
                raise TargetError(f"{option}: {target.label} matches no layer with weights.{near}")
            found |= met
        return found


def _near(text: str | None, names: Iterable[str]) -> str:
    ends = {name.rpartition(".")[2] for name in names if name and not name.rpartition(".")[2].isdigit()}
    return did_you_mean(text or "", ends)


def prepare_memory(config: FinetuneConfig, model: Any) -> None:
    """Sets what a config says about memory: gradient checkpointing, and the layout of images."""
    if config.channels_last:
        model.to(memory_format=torch.channels_last)
    if not config.gradient_checkpointing:
        return
    enable = getattr(model, "gradient_checkpointing_enable", None) or getattr(model, "set_grad_checkpointing", None)
    try:
        if enable is None:
            raise ValueError("it has no such method")
        enable()
    except (ValueError, AssertionError, NotImplementedError) as error:
        raise TargetError(
            f"gradient_checkpointing is not available for a {type(model).__name__} ({error}); leave it out."
        ) from None
