"""Adapters of PEFT: trained in place of the weights, beside solvers or instead of them, and exported."""

import dataclasses
import shutil
import warnings
from pathlib import Path
from typing import Any

from torch import nn

from solver_plugins.blocks import SolverBlock, blocks_of, gates_of
from solver_plugins.dropblock.classifier import find_classifier
from solver_plugins.errors import OptionError, did_you_mean
from solver_plugins.integrations.errors import LoadingError
from solver_plugins.integrations.saving import load
from solver_plugins.train.config import FinetuneConfig
from solver_plugins.train.errors import summary_of
from solver_plugins.train.outputs import BASE, MODEL
from solver_plugins.train.randomness import seeded
from solver_plugins.train.sections import PeftSection

_OWN = {"targets": "target_modules", "exclude": "exclude_modules", "train": "modules_to_save", "rank": "r",
        "alpha": "lora_alpha", "dropout": "lora_dropout"}  # fmt: skip
"""What an option may be called by mistake -> its name in PEFT."""
_FIXED = {"peft_type", "task_type", "inference_mode", "base_model_name_or_path", "revision", "auto_mapping",
          "peft_version", "runtime_config"}  # fmt: skip
"""Options of PEFT's configs that are not for users of a run."""
_READS_WEIGHTS = ("use_dora", "use_qalora", "use_bdlora", "arrow_config", "alora_invocation_tokens")
"""Options of LoRA with which it does more than to add to what its layer returns."""


class Adapters:
    """The adapters of a run's model.

    They change the model in place: it keeps its class and its forward pass, and only adapters, the modules of
    ``modules_to_save`` and the gates of solvers are trained from here on.
    """

    def __init__(self, config: FinetuneConfig, model: nn.Module):
        try:
            import peft
        except ImportError as error:
            raise OptionError(
                f"The section peft needs the package peft ({error}): pip install 'solver-plugins[peft]'."
            ) from None
        assert config.peft is not None
        section = self.section = config.peft
        self.saved = section.modules_to_save
        if self.saved is None:
            self.saved = _classifiers(model)
        kinds: Any = peft.PEFT_TYPE_TO_CONFIG_MAPPING
        made = _config(section, self.saved, kinds[section.name.upper()])
        before = {name for name, _ in model.named_modules()}
        for name in self.saved:
            # PEFT passes over a name that means nothing.
            if not any(one == name or one.endswith(f".{name}") for one in before):
                ends = {one.rpartition(".")[2] for one in before} - {""}
                raise OptionError(f"peft.modules_to_save: there is no module {name!r}.{did_you_mean(name, ends)}")
        try:
            # In the same way in each process and each model of the run, whatever was drawn before.
            with warnings.catch_warnings(), seeded(config.seed, "adapters"):
                # PEFT asks transformers by a name that it has given up.
                warnings.filterwarnings("ignore", category=FutureWarning)
                self.wrapped: Any = peft.get_peft_model(model, made)
        except (ValueError, TypeError, KeyError, AttributeError, NotImplementedError) as error:
            raise OptionError(f"PEFT cannot put {section.name} on this {type(model).__name__}: {summary_of(error)}"
                              f"{_near(section, before) if 'arget' in str(error) else ''}") from None  # fmt: skip
        weight = next(model.parameters())
        self.wrapped.to(weight.dtype)
        self.model = model
        self.names = [name for name, module in model.named_modules() if hasattr(module, "base_layer")]
        for gate in gates_of(model).values():
            gate.requires_grad_(True)
        self._check_solvers()
        self.wrapped.peft_config["default"].base_model_name_or_path = _source(config, model)

    def _check_solvers(self) -> None:
        """Raises OptionError where an adapter around a solver would not train, or not export, what it says."""
        modules = dict(self.model.named_modules())
        around = [
            name
            for name in self.names
            if isinstance(block := modules[f"{name}.base_layer"], SolverBlock)
            and (block.solver.config.iters > 1 or not block.computes_its_layer)
        ]
        if not around:
            return
        reads = [name for name in _READS_WEIGHTS if self.section.args.get(name)]
        if reads:
            raise OptionError(
                f"peft.{reads[0]} reads the weight of its layer, which is a solver of several iterations at "
                f"{around[0]!r}, and would leave the solver out. Leave the option out, or the layer: "
                f"peft.exclude_modules=[{around[0]}]."
            )
        if self.section.merge:
            raise OptionError(
                f"{len(around)} of the adapters are around solvers of several iterations, such as {around[0]!r}, and "
                "cannot be merged into them: an adapter adds to what a solver returns. Set peft.merge=false, which "
                "exports the base and the adapter apart; or leave these layers out: "
                f"peft.exclude_modules=[{around[0]}]."
            )

    def describe(self) -> str:
        """Returns a sentence for the dry run."""
        around = sum(
            isinstance(module, SolverBlock) and name.endswith(".base_layer")
            for name, module in self.model.named_modules()
        )
        solvers = f" ({around} of them solvers)" if around else ""
        saved = f", and all of {', '.join(self.saved)}" if self.saved else ""
        exported = "merged into the exported model" if self.section.merge else "exported beside their base"
        return f"peft: {self.section.name} on {len(self.names)} layers{solvers}{saved}; {exported}"

    def take_off(self, folder: Path | None) -> nn.Module:
        """Writes the adapters into a folder, in the form of PEFT, and returns the model to export.

        Args:
            folder: Where they are saved, for ``PeftModel.from_pretrained(base, folder)``; None for not.

        Returns:
            The model with the adapters in its weights or, with ``merge: false``, the base that they were around.
        """
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
            self.wrapped.save_pretrained(str(folder), save_embedding_layers=False)
        model: nn.Module = self.wrapped.merge_and_unload() if self.section.merge else self.wrapped.unload()
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        return model


def load_adapted(folder: Path) -> nn.Module:
    """Loads the adapters of a run whose ``peft.merge`` is false, around the base beside them, in evaluation mode."""
    base = folder.parent / BASE
    if not base.is_dir():
        raise LoadingError(
            f"{str(folder)!r} holds adapters, and there is no base beside them at {str(base)!r}. A run with peft.merge "
            f"exports a whole model: {str(folder.parent / MODEL)!r}."
        )
    import peft

    model = load(base)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        peft.PeftModel.from_pretrained(model, str(folder)).to(next(model.parameters()).dtype)
    return model.eval()


def _config(section: PeftSection, saved: list[str], kind: Any) -> Any:
    """Returns PEFT's config of a section; raises OptionError for what it does not know."""
    known = {one.name for one in dataclasses.fields(kind)} - _FIXED
    for name in section.args:
        if name not in known:
            hint = f" PEFT calls it {_OWN[name]!r}." if name in _OWN else did_you_mean(name, known)
            raise OptionError(f"PEFT's {kind.__name__} has no option {name!r} (peft).{hint.partition(' Options:')[0]}")
    start = section.args.get("init_lora_weights", True)
    if not isinstance(start, bool) and start not in ("gaussian", "orthogonal"):
        raise OptionError(
            f"peft.init_lora_weights={start!r} changes the weights of the base, which the adapter would then not fit. "
            "Expected true, false, 'gaussian' or 'orthogonal'."
        )
    exclude: Any = section.exclude_modules
    if section.target_modules == "all-linear" and exclude is None:
        exclude = list(saved)
    try:
        return kind(
            target_modules=section.target_modules, exclude_modules=exclude, modules_to_save=list(saved) or None,
            **section.args,
        )  # fmt: skip
    except (ValueError, TypeError) as error:
        raise OptionError(f"PEFT's {kind.__name__} does not take these options (peft): {summary_of(error)}") from None


def _classifiers(model: Any) -> list[str]:
    """Returns the names of the modules that tell the classes apart, which a new task has to train."""
    if hasattr(model, "get_classifier"):
        found = model.get_classifier()
        heads = [id(one) for one in (found if isinstance(found, (tuple, list)) else (found,))]
        return [name for name, module in model.named_modules() if id(module) in heads]
    return [find_classifier(model)[0].partition(".")[0]]


def _near(section: PeftSection, names: set[str]) -> str:
    given = section.target_modules
    if given is None:
        return " Name layers with peft.target_modules, or all linear ones: peft.target_modules=all-linear."
    ends = {name.rpartition(".")[2] for name in names} - {"", *map(str, range(100))}
    first = given if isinstance(given, str) else given[0]
    return did_you_mean(first, ends)


def _source(config: FinetuneConfig, model: Any) -> str | None:
    """Returns what the base of an adapter is called, for its folder."""
    if not config.peft or not config.peft.merge or blocks_of(model):
        return "../base"
    published = (getattr(model, "pretrained_cfg", None) or {}).get("hf_hub_id")
    return published or config.model.spec.partition("/")[2] or None
