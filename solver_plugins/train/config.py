"""The settings of a finetuning run: one strict config."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

import pydantic
from pydantic import Field

from solver_plugins.config import StrictConfig
from solver_plugins.equilibrium.head import HeadConfig
from solver_plugins.surgery import ConversionSpec
from solver_plugins.train.problems import ProblemType
from solver_plugins.train.sections import (
    AugmentationSection,
    BestSection,
    CheckpointSection,
    EmaSection,
    MixupSection,
    PeftSection,
)

Names = str | list[str]

_LARGEST_SEED = 2**32 - 2**16
"""numpy takes 32 bits, and each process adds its number to the seed."""


class ModelSection(StrictConfig):
    """Which network is finetuned."""

    spec: str = Field(description="'timm/NAME', 'hf/FOLDER', 'hf/ID', or the folder of a converted model.")
    pretrained: bool = Field(False, description="Whether to load the published weights.")
    weights: str | None = Field(None, description="A file with your own weights (.safetensors, or a torch state dict).")
    in_order: bool = Field(False, description="Whether these weights have other names, but the same order and shapes.")
    args: dict[str, Any] = Field({}, description="Arguments of timm.create_model, or settings of the HF config.")
    dtype: Literal["float32", "float64"] = Field("float32", description="The dtype of weights and inputs.")
    head_init: Literal["reset", "zero", "library"] = Field(
        "reset",
        description="A new classifier on trained weights: 'reset' (small and random), 'zero', or as the 'library' "
        "draws it.",
    )

    @pydantic.field_validator("head_init", mode="before")
    @classmethod
    def _by_library(cls, how: Any) -> Any:
        return "library" if how in ("timm", "transformers") else how

    @pydantic.model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.in_order and self.weights is None:
            raise ValueError("model.in_order is about the file model.weights, which is not given")
        if self.in_order and str(self.weights).endswith(".safetensors"):
            raise ValueError(
                "model.in_order needs a torch state dict, which keeps its order; a .safetensors file sorts its tensors"
            )
        if self.pretrained and self.weights is not None:
            raise ValueError("expected model.pretrained or model.weights; found both")
        return self


class ProxPropSection(StrictConfig):
    """Implicit weight steps: the arguments of ``ProxProp``; ``solver: {name: proxprop, ...}`` is the same."""

    mode: str = Field("cg3", description="'exact', or 'cgN' (or 'cgN-joint'): N steps of conjugate gradients.")
    tau_theta: float = Field(1.0, gt=0, description="Step size of the implicit step.")
    gram: Literal["sum", "mean"] = Field("sum", description="'mean' makes tau_theta independent of the batch size.")
    targets: Names | None = Field(None, description="Layers to precondition; all but the last by default.")
    exclude: Names | None = Field(None, description="Layers that keep their plain gradient.")
    skip_last: bool = Field(True, description="Whether the last layer keeps its plain gradient.")


class HeadSection(HeadConfig):
    """An equilibrium instead of the last layer: the arguments of ``attach_opteq_head``."""

    name: Literal["opteq"] = Field("opteq", description="The family of heads.")
    classifier: str | None = Field(None, description="Name of the last layer, if it is not found by itself.")


class RegularizerSection(StrictConfig):
    """Structured dropout before the last layer: its mean effect as a term of the loss, or sampled."""

    name: Literal["dropblock"] = Field("dropblock", description="The family of regularisers.")
    scheme: str = Field("dropblock", description="'dropout', 'dropblock' (on a grid) or 'overlapping'.")
    theta: float = Field(0.9, gt=0, le=1, description="The probability that a unit is kept.")
    block_size: int | None = Field(None, ge=1, description="Units in a block; needed by all but 'dropout'.")
    how: Literal["deterministic", "sampled"] = Field(
        "deterministic",
        description="Add the second-order mean of the loss under dropout to it, or drop units at random.",
    )
    classifier: str | None = Field(None, description="Name of the last layer, if it is not found by itself.")


class _Ramp(StrictConfig):
    to: float = Field(ge=0, le=1, description="The blend at the end of these epochs, and from then on.")
    epochs: float = Field(gt=0, description="How many epochs the change takes, from the first one on.")

    def at(self, epoch: float) -> float:
        """Returns the number after this many epochs."""
        start: float = getattr(self, "from")
        return start + (self.to - start) * min(1.0, epoch / self.epochs)


# "from" is a word of Python, which no field in the body of a class can be called.
_FROM: Any = {"from": (float, Field(ge=0, le=1, description="The blend at the start."))}
_ABOUT = "A linear schedule for blend, such as {from: 0, to: 0.3, epochs: 2}; 0 is the original network."
BlendSection: Any = pydantic.create_model("BlendSection", __base__=_Ramp, __doc__=_ABOUT, __module__=__name__, **_FROM)


class DataSection(StrictConfig):
    """Where the examples come from."""

    name: str = Field(
        "digits", description="'digits' (embedded), a folder (save_to_disk, imagefolder, parquet), a file, or a hub id."
    )
    config: str | None = Field(None, description="The configuration of a hub data set that has several.")
    train: str = Field("train", description="The split to train on; slices such as 'train[:80%]' are fine.")
    eval: str | Annotated[float, Field(gt=0, lt=1)] = Field(
        "test", description="The split to evaluate on; or a share of the training split, taken from each class."
    )
    image: str | None = Field(None, description="The column of images, or of their files; found by itself by default.")
    text: str | None = Field(None, description="The column of texts: makes it a text classification.")
    label: Names | None = Field(
        None, description="The column of labels, by default 'label', 'labels' or 'fine_label'; or several columns."
    )
    separator: str | None = Field(None, description="What separates several labels in one text.")
    problem_type: ProblemType | None = Field(
        None, description="What is predicted; by default inferred from the labels."
    )
    image_size: int | None = Field(None, ge=1, description="Side of the images; the model's own by default.")
    max_length: int = Field(128, ge=1, description="Texts are cut after this many tokens.")
    mean: list[float] | None = Field(None, description="Per channel; the model's own by default.")
    std: list[float] | None = Field(None, description="Per channel; the model's own by default.")
    workers: int = Field(0, ge=0, description="Extra processes that read data, for each training process.")
    check: bool = Field(True, description="Whether image files are checked for damage before training.")

    @property
    def eval_name(self) -> str:
        """What messages call the examples that are evaluated."""
        return repr(self.eval) if isinstance(self.eval, str) else f"{100 * self.eval:g}% of {self.train!r}"

    @pydantic.model_validator(mode="after")
    def _labels_fit(self) -> Self:
        if isinstance(self.label, list) and len(set(self.label)) < max(1, len(self.label)):
            raise ValueError("expected at least one column of labels, and each of them once")
        if self.separator is None:
            return self
        if not self.separator:
            raise ValueError("expected a separator of at least one letter; ' ' is a space")
        if isinstance(self.label, list) or self.problem_type not in (None, "multi_label_classification"):
            raise ValueError("separator is for one column whose texts name several labels; leave it out")
        return self

    @pydantic.field_validator("std")
    @classmethod
    def _divides(cls, std: list[float] | None) -> list[float] | None:
        if std is not None and not (std and all(value > 0 for value in std)):
            raise ValueError("expected numbers above zero, one for each channel")
        return std


class OptimizerSection(StrictConfig):
    """The arguments of timm's ``create_optimizer_v2``."""

    opt: str = Field("adamw", description="A name of timm.optim.list_optimizers().")
    lr: float = Field(1e-3, gt=0, description="Learning rate.")
    weight_decay: float = Field(0.05, ge=0, description="Weight decay, not on biases and norms.")
    momentum: float = Field(0.9, ge=0, lt=1, description="Momentum, for optimisers that have one.")
    layer_decay: float | None = Field(
        None, gt=0, le=1, description="Factor on the learning rate from each layer to the one below."
    )
    gate_rate: float = Field(
        10.0,
        gt=0,
        description="Learning rate of gates (solver.gate) relative to that of weights; gates have no weight decay.",
    )
    clip: float | None = Field(None, gt=0, description="Clips the norm of all gradients together.")
    args: dict[str, Any] = Field({}, description="Further arguments of the optimiser, such as betas.")

    hints: ClassVar[Mapping[str, str]] = {"options": "The optimiser's own options are under 'args'."}


class ScheduleSection(StrictConfig):
    """The arguments of timm's ``create_scheduler_v2``, in epochs; the rate changes at every step."""

    sched: Literal["cosine", "tanh", "step", "multistep", "poly"] = Field(
        "cosine", description="The name of the schedule in timm."
    )
    warmup_epochs: int = Field(
        0, ge=0, description="Epochs of the warmup, in which the rate rises to the learning rate."
    )
    warmup_lr: float = Field(1e-5, ge=0, description="The learning rate at the start of the warmup.")
    min_lr: float = Field(0.0, ge=0, description="The rate at the end of the schedule.")
    decay_epochs: int = Field(30, ge=1, description="Epochs between two steps of 'step'.")
    decay_milestones: list[int] = Field([30, 60], description="Epochs of the steps of 'multistep'.")
    decay_rate: float = Field(0.1, gt=0, description="Factor of each step.")


class FinetuneConfig(StrictConfig):
    """Everything about a run. The file itself, the models and the results go to ``output``."""

    model: ModelSection
    solver: ConversionSpec | None = Field(
        None, description="What its layers become, or {name: proxprop, ...}; null for none."
    )
    blend: BlendSection | None = Field(None, description="In place of a solver.blend that stays.")
    proxprop: ProxPropSection | None = Field(
        None, description="Implicit weight steps, by themselves or together with a solver; null for none."
    )
    head: HeadSection | None = Field(None, description="null for the model's own.")
    regularizer: RegularizerSection | None = Field(None, description="null for none.")
    peft: PeftSection | None = Field(None, description="null trains the weights themselves.")
    baseline: bool = Field(True, description="Whether to train the plain model, too, as a comparison.")
    data: DataSection = DataSection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection | None = Field(ScheduleSection(), description="null for a constant learning rate.")
    augmentation: AugmentationSection | None = Field(None, description="null for none.")
    mixup: MixupSection | None = Field(None, description="null for none.")
    ema: EmaSection | None = Field(None, description="null for none.")
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="Share of each label that is spread over all classes.")
    epochs: int = Field(10, ge=1, description="Passes over the training split.")
    batch_size: int = Field(
        64, ge=1, description="Examples of one optimiser step: over all processes and accumulated passes."
    )
    accumulation: int = Field(1, ge=1, description="Passes whose gradients are summed for one step.")
    precision: Literal["no", "bf16", "fp16"] = Field("no", description="Mixed precision of Accelerate.")
    seed: int = Field(0, ge=0, le=_LARGEST_SEED, description="The seed of weights, order, augmentation and solvers.")
    seeds: list[Annotated[int, Field(ge=0, le=_LARGEST_SEED)]] | None = Field(
        None, description="Several seeds, one run each: mean, spread and paired differences in one report."
    )
    trials: int = Field(1, ge=1, description="How often to evaluate a sampling model at the end.")
    refresh: Literal["epoch"] | int = Field(
        "epoch", description="When step sizes are certified: 'epoch', or a number of steps."
    )
    checkpoints: CheckpointSection = CheckpointSection()
    best: BestSection | None = Field(None, description="null exports the weights of the last epoch.")
    train: Names | None = Field(None, description="Layers to train, named like targets; all others stay fixed.")
    freeze: Names | None = Field(None, description="Layers to keep fixed.")
    unfreeze: dict[int, Names] | None = Field(
        None, description="Layers that are trained from the given epoch on, such as {3: [layer4], 5: .*}."
    )
    class_weights: Literal["balanced"] | list[float] | None = Field(
        None,
        description="Class weights in the training loss; 'balanced' weighs each class by the inverse of its frequency.",
    )
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass, to save memory."
    )
    channels_last: bool = Field(False, description="Store images with channels last, for faster convolutions.")
    compile: bool = Field(False, description="Compile the model with torch.compile.")
    trackers: list[str] = Field(
        [], description="Trackers of Accelerate, in addition to metrics.jsonl: tensorboard, wandb, mlflow, aim, ..."
    )
    output: str = Field(description="The folder of the run.")

    hints: ClassVar[Mapping[str, str]] = {
        "calibrate": "It is part of 'solver': solver.calibrate=4 looks at four batches.",
        "lr": "It is part of 'optimizer'.",
        "dataset": "It is called 'data'.",
        "lora": "Adapters have the section 'peft': peft={target_modules: [...], r: 8}.",
        "problem_type": "It is part of 'data'.",
        "optimiser": "It is spelled 'optimizer'.",
    }

    @pydantic.model_validator(mode="before")
    @classmethod
    def _proxprop_as_solver(cls, options: Any) -> Any:
        """Reads ``solver: {name: proxprop}`` as the section ``proxprop``: it changes steps, not layers."""
        solver = options.get("solver") if isinstance(options, Mapping) else None
        if not isinstance(solver, Mapping) or "proxprop" not in (solver.get("name"), solver.get("solver")):
            return options
        if options.get("proxprop") is not None:
            raise ValueError("expected solver.name=proxprop or a section proxprop; found both")
        own = {key: value for key, value in solver.items() if key not in ("name", "solver")}
        foreign = sorted(own.keys() - ProxPropSection.model_fields.keys())
        if {"iters", "args"} & {*foreign}:
            # Left over from the recipe's solver, of which only the name was changed.
            raise ValueError(
                f"proxprop is not a solver of blocks and has no {', '.join(foreign)}, which the section solver gives; "
                "replace all of it: solver='{name: proxprop, mode: cg3}'"
            )
        return {**options, "solver": None, "proxprop": own}

    @pydantic.model_validator(mode="before")
    @classmethod
    def _scheduled_blend(cls, options: Any) -> Any:
        """Reads ``solver: {blend: {from: 0, ...}}`` as the section ``blend``: it is no part of a conversion."""
        solver = options.get("solver") if isinstance(options, Mapping) else None
        if not isinstance(solver, Mapping) or not isinstance(solver.get("blend"), Mapping):
            return options
        if options.get("blend") is not None:
            raise ValueError("expected a schedule as solver.blend or as blend; found both")
        return {**options, "solver": {**solver, "blend": 1.0}, "blend": solver["blend"]}

    @pydantic.field_serializer("solver", mode="wrap")
    def _name_of_solver(self, solver: Any, write: pydantic.SerializerFunctionWrapHandler) -> Any:
        """Writes the solver's name as the key that configs use, so that ``solver.name=fista`` replaces it."""
        written = write(solver)
        if written is None:
            return None
        return {"name": solver.solver, **{key: value for key, value in written.items() if key != "solver"}}

    @property
    def changes(self) -> bool:
        """Whether the config adds anything to the plain model."""
        return any(part is not None for part in (self.solver, self.proxprop, self.head, self.regularizer))

    @pydantic.model_validator(mode="after")
    def _goes_together(self) -> Self:
        if not self.changes and "solver" not in self.model_fields_set:
            raise ValueError(
                "expected a solver, proxprop, a head or a regularizer; write solver: null for the plain model"
            )
        if self.blend is not None and (self.solver is None or self.solver.blend != 1):
            raise ValueError("expected the schedule blend beside a solver, and without a solver.blend of its own")
        for name, value in (("refresh", self.refresh), ("checkpoints.every", self.checkpoints.every)):
            if value != "epoch" and value < 1:
                raise ValueError(f"expected {name} to be 'epoch' or at least one step; found {value}")
        if self.data.text is not None:
            if self.data.image is not None:
                raise ValueError("expected data.image or data.text; found both")
            for name in ("augmentation", "mixup"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} is for images, and data.text is given; leave it out")
        if self.peft is not None:
            self._check_peft()
        if self.unfreeze is not None:
            if self.train is None and self.freeze is None:
                raise ValueError("unfreeze adds layers to those of train, or takes them from freeze; found neither")
            late = [epoch for epoch in self.unfreeze if not 2 <= epoch <= self.epochs]
            if late:
                raise ValueError(f"expected the epochs of unfreeze from 2 to {self.epochs} (epochs); found {late[0]}")
        if self.seeds is not None and (len(self.seeds) < 2 or len(set(self.seeds)) < len(self.seeds)):
            raise ValueError("expected at least two different seeds; for one, set seed")
        if self.seeds is not None and self.seed:
            raise ValueError("expected seed or seeds; found both")
        if self.mixup is not None and self.class_weights is not None:
            raise ValueError("expected mixup or class_weights; found both")
        if self.mixup is not None and self.batch_size // self.accumulation % 2:
            raise ValueError("mixup pairs the examples of a batch: expected an even batch_size / accumulation")
        if self.schedule is not None and self.schedule.warmup_epochs >= self.epochs:
            raise ValueError(
                f"expected schedule.warmup_epochs below epochs; found {self.schedule.warmup_epochs} of {self.epochs}"
            )
        return self

    def _check_peft(self) -> None:
        """Raises ValueError beside what does not go with adapters."""
        for name in ("train", "freeze", "unfreeze"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"expected {name} or peft, which trains its adapters and peft.modules_to_save; found both"
                )
        for name, why in (
            ("head", "a folder of adapters cannot hold an equilibrium"),
            ("regularizer", "the last layer is kept twice, as it was and as it is trained"),
            ("proxprop", "it steps the weights of layers, which adapters leave as they are"),
        ):
            if getattr(self, name) is not None:
                raise ValueError(f"{name} does not go with peft: {why}; leave one of them out")
