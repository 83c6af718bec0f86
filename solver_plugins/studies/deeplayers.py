"""What the tables of "Deep Layers as Stochastic Solvers" share: networks as they are beside networks with solvers.

Up to three stages. ``first`` trains the networks that the paper finetunes, or whose features are kept. ``search``
trains every arm with every step size for a few epochs, for one seed, and looks at the validation split. ``final``
trains with the best step size of the arm and looks at the test split, once.
"""

import os
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import pydantic
import torch
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor, nn

from solver_plugins.blocks import refresh_steps
from solver_plugins.config import StrictConfig
from solver_plugins.errors import OptionError, WeightError
from solver_plugins.integrations.weights import read_weights
from solver_plugins.registry import SOLVERS
from solver_plugins.solve.problem import Formulation
from solver_plugins.studies.base import Cell, Context, Results, Study, StudyConfig, Table, Value
from solver_plugins.studies.deeplayers_report import Row, draw_table, gains, report, summarise
from solver_plugins.studies.errors import CellError
from solver_plugins.studies.fitting import Fitting, fit, normalised
from solver_plugins.studies.images import ImageData, Images, Part
from solver_plugins.studies.networks import EVALUATION_BATCH, evaluate
from solver_plugins.surgery import apply_conversion, conversion_of, convert_model, revert_model
from solver_plugins.train.randomness import seeded

FIRST, SEARCH, FINAL = "first", "search", "final"


class Search(StrictConfig):
    """The search for a step size: the same for all arms."""

    rates: list[float] = Field([1e-2], min_length=1, description="Step sizes; a single one is taken without a search.")
    epochs: int = Field(3, ge=1, description="Passes over the training split, with a whole schedule of this length.")

    @pydantic.field_validator("rates")
    @classmethod
    def _rising(cls, rates: list[float]) -> list[float]:
        if rates[0] <= 0 or sorted(set(rates)) != rates:
            raise ValueError("expected rates above zero that rise")
        return rates


class SolverOptions(StrictConfig):
    """The solver in place of a block of layers."""

    iters: int = Field(10, ge=1, description="Iterations of every block.")
    lam: float = Field(1e-3, ge=0, description="Weight of the strongly convex term. Paper: 1e-3.")
    formulation: Formulation = Field("normalized", description="Of the problem; 'paper' takes steps of 1/L.")
    sampled: dict[str, Any] = Field(
        {"step": "exp", "decay": 0.9}, description="Options of sampling solvers; the paper decays exponentially."
    )

    def of(self, solver: str, **sampled: Any) -> dict[str, Any]:
        """Returns the options of a solver by its name; ``sampled`` are more of them for one that samples."""
        options: dict[str, Any] = {"solver": solver, **self.model_dump(exclude={"sampled"})}
        return {**options, **self.sampled, **sampled} if samples(solver) else options


def samples(solver: str) -> bool:
    """Whether a solver draws features at random."""
    return SOLVERS.get(solver).samples != "nothing"


class TableConfig(StudyConfig):
    """Settings of a table."""

    data: ImageData = ImageData(train="train[:90%]", validation="train[90%:]", test="test")
    image_size: int | None = Field(None, ge=1, description="Images are resized to this side; null for as they are.")
    solver: SolverOptions = SolverOptions()
    first: Fitting | None = Field(
        None, description="How networks are trained before they are finetuned; null for training from scratch."
    )
    search: Search = Search()
    fitting: Fitting = Fitting(weight_decay=5e-4)
    trials: int = Field(20, ge=1, description="Passes over the test split of a network that samples. Paper: 20.")

    @pydantic.model_validator(mode="after")
    def _tested(self) -> Self:
        if self.data.test is None:
            raise ValueError("expected data.test: the validation split chooses the step size, so it is no test")
        return self


C = TypeVar("C", bound=TableConfig)


class DeepLayersTable(Study[C]):
    """A table whose rows are networks (``group``) and whose columns are arms, the first of them without a solver.

    Attributes:
        group: What its networks differ in, a key of the cells' settings.
        printed: The paper's accuracies by network and arm; :data:`FIRST` is the network before it is finetuned.
        evaluation_batch: How many images are evaluated at once.
    """

    tags = ("deeplayers", "images")
    group: ClassVar[str]
    printed: ClassVar[dict[Value, dict[str, float]]]
    evaluation_batch: ClassVar[int] = EVALUATION_BATCH
    _images: Images
    _parts: dict[str, Part]

    @abstractmethod
    def groups(self) -> list[Value]:
        """Lists the networks."""

    @abstractmethod
    def arms(self) -> tuple[str, ...]:
        """Lists the arms; the first has no solver."""

    @abstractmethod
    def make(self, group: Value) -> nn.Module:
        """Makes a network as it is, with random weights."""

    @abstractmethod
    def conversion(self, group: Value, arm: str) -> dict[str, Any]:
        """Returns the arguments of :func:`convert_model` for an arm with a solver."""

    def label(self, group: Value) -> str:
        """Returns the name of a network in the report."""
        return str(group)

    def title(self) -> str:
        """Returns what the report says about the networks."""
        config = self.config
        return f"{len(self._images.train)} images of {config.data.name!r}, {config.fitting.epochs} epochs"

    def prepare(self) -> None:
        self._images, self._parts = self.config.data.load(), {}
        # Made once, so that what does not fit is told before anything is written.
        for group in self.groups():
            for arm in self.arms():
                self._solved(self.make(group), group, arm, self._images.train.images[:1])

    def stages(self) -> list[list[Cell]]:
        config = self.config
        found = [self._cells(config.seeds, SEARCH, lr=rate) for rate in config.search.rates]
        search = [] if len(found) == 1 else [cell for cells in found for cell in cells if cell.seed == config.seeds[0]]
        return [stage for stage in (self._firsts(), search, self._cells(config.seeds, FINAL)) if stage]

    def _firsts(self) -> list[Cell]:
        if self.config.first is None:
            return []
        return [self._first_cell(group, seed) for seed in self.config.seeds for group in self.groups()]

    def _first_cell(self, group: Value, seed: int) -> Cell:
        """Returns the cell that trains the network which a finetuned one begins with."""
        return Cell(FIRST, seed, ((self.group, group), ("stage", FIRST)))

    def _cells(self, seeds: list[int], stage: str, **setting: Value) -> list[Cell]:
        return [
            Cell(arm, seed, ((self.group, group), ("stage", stage), *setting.items()))
            for seed in seeds
            for group in self.groups()
            for arm in self.arms()
        ]

    def cells(self) -> list[Cell]:
        return [cell for stage in self.stages() for cell in stage]

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        group, config = cell[self.group], self.config
        model = self.make(group).to(context.device)
        if cell["stage"] == FIRST:
            assert config.first is not None
            return self._train_first(cell, model, config.first, context)
        if config.first is not None:
            model = self._begin(model, self._first_cell(group, cell.seed), context)
        parts = self._inputs(model, cell.seed, context)
        model = self._trained(model)
        begun = self._convert(cell, model, parts)
        if cell["stage"] == SEARCH:
            changes = {"lr": cell["lr"], "epochs": config.search.epochs}
            return begun | self._train(cell, model, parts, config.fitting.model_copy(update=changes), context)
        rate = self._best(cell, context.earlier)
        found = self._train(cell, model, parts, config.fitting.model_copy(update={"lr": rate}), context)
        return {"lr": rate, **begun, **found, **self._test(cell, model, parts["test"], bool(found["diverged"]))}

    def _train_first(self, cell: Cell, model: nn.Module, settings: Fitting, context: Context) -> dict[str, Any]:
        parts = self._ready(context)
        found = self._train(cell, model, parts, settings, context)
        if found["diverged"]:
            raise OptionError(f"The network of {cell.name} did not train: its loss is not finite. Lower first.lr.")
        if context.folder is not None:
            write_weights(model, _weights(context.folder, cell))
        return {**found, **self._test(cell, model, parts["test"], False)}

    def _begin(self, model: nn.Module, first: Cell, context: Context) -> nn.Module:
        """Gives a network the weights that the first stage has left."""
        model.load_state_dict(read_first(first, context))
        return model.to(context.device)

    def _inputs(self, model: nn.Module, seed: int, context: Context) -> dict[str, Part]:
        """Returns what the trained part of a network reads."""
        return self._ready(context)

    def _trained(self, model: nn.Module) -> nn.Module:
        """Returns the part of a network that is trained and converted."""
        return model

    def _ready(self, context: Context) -> dict[str, Part]:
        if not self._parts:
            known, size = self._images.train, self.config.image_size
            self._parts = {
                key: normalised(part, known, context.device, size).channels_last()
                for key, part in self._splits().items()
            }
        return self._parts

    def _splits(self) -> dict[str, Part]:
        """Returns the images as they were loaded."""
        images = self._images
        assert images.test is not None
        return {"train": images.train, "validation": images.validation, "test": images.test}

    def _convert(self, cell: Cell, model: nn.Module, parts: dict[str, Part]) -> dict[str, Any]:
        """Converts a network that is to be trained, in place; returns what is known of it before training."""
        self._solved(model, cell[self.group], cell.arm, parts["train"].images[:1])
        return {}

    def _solved(self, model: nn.Module, group: Value, arm: str, example: Tensor) -> nn.Module:
        """Puts the solvers of an arm into a network."""
        if arm == self.arms()[0]:
            return model
        options = self.conversion(group, arm)
        more = {"eval_mode": "stochastic"} if samples(options["solver"]) else {}
        size = self.config.image_size
        if size is not None and example.ndim == 4 and example.shape[-1] != size:
            example = example.new_zeros(1, example.shape[1], size, size)
        return convert_model(model, example_inputs=example, **{**options, **more})

    def _train(
        self, cell: Cell, model: nn.Module, parts: dict[str, Part], settings: Fitting, context: Context
    ) -> dict[str, Any]:
        curve: list[float] = []
        seconds: list[float] = []
        start, looked = time.process_time(), 0.0
        solving = cell.arm not in (FIRST, self.arms()[0])

        def look() -> None:
            nonlocal looked
            if solving:
                # Once per epoch, as in the paper.
                refresh_steps(model)
            now = time.process_time()
            seconds.append(now - start - looked)
            with seeded(self.name, cell.seed, "look", len(curve)):
                curve.append(self._accuracy(model, parts["validation"]))
            model.train()
            looked += time.process_time() - now

        try:
            done = fit(model, parts["train"], settings, cell.seed, _epochs(settings.epochs, context, look))
            if done.loss is not None:
                look()
            loss = done.loss
        except WeightError:
            # The last step of an epoch went too far: weights that are not finite have no step size.
            loss = None
        return {
            "validation_accuracy": None if loss is None else curve[-1],
            "diverged": loss is None,
            # Without what was spent on looking.
            "training_cpu_seconds": seconds[-1] if seconds else None,
            "curves": {"validation_accuracy": curve, "cpu_seconds": seconds},
        }

    def _test(self, cell: Cell, model: nn.Module, test: Part, diverged: bool) -> dict[str, Any]:
        """Looks at the test split: so often as the network is random, and as one that samples in training only."""
        group, arm = cell[self.group], cell.arm
        stochastic = arm not in (FIRST, self.arms()[0]) and samples(self.conversion(group, arm)["solver"])
        if diverged:
            return {"accuracy": None, "trial_spread": None, "deterministic_accuracy": None}
        found = []
        for trial in range(self.config.trials if stochastic else 1):
            with seeded(self.name, cell.seed, "trial", trial):
                found.append(self._accuracy(model, test))
        values = torch.tensor(found, dtype=torch.float64)
        deterministic = None
        if stochastic:
            deterministic = self._accuracy(_sampling_off(model), test)
        return {
            "accuracy": float(values.mean()),
            "trial_spread": float(values.std()) if len(found) > 1 else None,
            "deterministic_accuracy": deterministic,
        }

    def _accuracy(self, model: nn.Module, part: Part) -> float:
        return evaluate(model, part, self.evaluation_batch)[1]

    def _best(self, cell: Cell, earlier: Results) -> float:
        rates = self.config.search.rates
        if len(rates) == 1:
            return rates[0]
        found = self._found(earlier, cell[self.group], cell.arm, SEARCH)
        scores = {float(one.cell["lr"]): one.values["validation_accuracy"] for one in found}
        known = {rate: score for rate, score in scores.items() if score is not None}
        if not known:
            raise OptionError(f"{cell.name}: training diverged with all of search.rates={rates}. Add smaller ones.")
        return max(known, key=lambda rate: known[rate])

    def rows(self, results: Results) -> list[Row]:
        """Returns one row for every network and arm."""
        arms = (*((FIRST,) if self._tests_first() else ()), *self.arms())
        return [
            Row(
                group, self.label(group), arm, self._paper(group, arm),
                self._found(results, group, arm, FIRST if arm == FIRST else FINAL),
                self._found(results, group, arm, SEARCH),
            )
            for group in self.groups()
            for arm in arms
        ]  # fmt: skip

    def _paper(self, group: Value, arm: str) -> float | None:
        printed = self.printed.get(group, {})
        if arm == self.arms()[0] and not self._tests_first():
            # Where nothing is finetuned, the network without a solver stands for the paper's before finetuning.
            return printed.get(arm, printed.get(FIRST))
        return printed.get(arm)

    def _tests_first(self) -> bool:
        return self.config.first is not None

    def _found(self, results: Results, group: Value, arm: str, stage: str) -> Results:
        setting: dict[str, Any] = {self.group: group}
        return results.of(arm=arm, stage=stage, **setting)

    def tables(self, results: Results) -> list[Table]:
        return report(self.rows(results), self.arms()[0], self.config, self.title())

    def summary(self, results: Results) -> dict[str, Any]:
        rows = self.rows(results)
        edges = [self.config.search.rates[0], self.config.search.rates[-1]]
        return {
            **summarise(rows),
            **{f"{row.key}_gain": gain for row, gain in gains(rows, self.arms()[0]).items()},
            # A search that ends at its edge has not found the best.
            "at_the_edge_of_the_search": sorted(
                {row.key for row in rows if row.arm != FIRST and len(set(edges)) > 1 and set(row.rates) & set(edges)}
            ),
        }

    def draw(self, results: Results) -> Any:
        return draw_table(self.rows(results))


def _sampling_off(model: nn.Module) -> nn.Module:
    """Makes a converted network deterministic in evaluation, with the gains and the blend that it has."""
    known = conversion_of(model)
    blocks = tuple(
        block.model_copy(update={"settings": {**block.settings, "eval_mode": "deterministic"}})
        for block in known.blocks
    )
    return apply_conversion(revert_model(model), known.model_copy(update={"blocks": blocks}))


def _epochs(count: int, context: Context, between: Callable[[], None]) -> Iterator[int]:
    for epoch in context.steps(count):
        if epoch > 0:
            between()
        yield epoch


def _weights(folder: Path, cell: Cell) -> Path:
    return folder / f"{cell.name}.safetensors"


def read_first(cell: Cell, context: Context) -> dict[str, Tensor]:
    """Returns the weights that a cell of the first stage has left.

    Raises:
        CellError: If there are none.
    """
    if context.folder is None or not _weights(context.folder, cell).is_file():
        raise CellError(
            f"Expected the weights of {cell.name} in the folder of the run; found none. Delete the result "
            f"{cell.name}.json there, and run the study again."
        )
    return read_weights(_weights(context.folder, cell))


def write_weights(model: nn.Module, path: Path) -> None:
    """Writes the state dict, whole or not at all."""
    partial = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        save_file({key: value.contiguous() for key, value in model.state_dict().items()}, partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
