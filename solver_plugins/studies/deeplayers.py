"""What the tables of "Deep Layers as Stochastic Solvers" share: plain networks beside networks with solvers.

There are up to three stages. ``first`` trains the networks that are finetuned later, or whose features are kept.
``search`` trains every arm with every step size for a few epochs, for one seed, and evaluates on the validation split.
``final`` trains with the best step size of the arm and evaluates on the test split, once. What a solver has to beat is
in :mod:`~solver_plugins.studies.controls`; its arms get the same search.
"""

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import pydantic
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor, nn

from solver_plugins.config import StrictConfig
from solver_plugins.errors import OptionError, did_you_mean
from solver_plugins.integrations.weights import read_weights
from solver_plugins.registry import SOLVERS
from solver_plugins.solve.problem import Formulation
from solver_plugins.studies.controls import NONE, SIMPLE, TUNED, Sites, put_control, set_rates
from solver_plugins.studies.deeplayers_report import TableRow, draw_table, pairs, report, solved
from solver_plugins.studies.errors import CellError
from solver_plugins.studies.images import ImageConfig, ImageData, ImageStudy, normalised
from solver_plugins.studies.study import Cell, Context, Results, Table, Value, mean
from solver_plugins.studies.training import EVALUATION_BATCH, Fitting, fit, scores
from solver_plugins.surgery import apply_conversion, conversion_of, convert_model, revert_model
from solver_plugins.train.evaluate import Scores, samples_in_evaluation
from solver_plugins.train.loop import Hooks, Loop, refresh_every
from solver_plugins.train.outputs import whole_file
from solver_plugins.train.tensors import Part

FIRST, SEARCH, FINAL = "first", "search", "final"
LOOKED = "validation_accuracy"
REFERENCE = "of *Deep Layers as Stochastic Solvers* (Bibi, Ghanem, Koltun and Ranftl, ICLR 2019)"


class Search(StrictConfig):
    """The search for a step size: the same for all arms."""

    rates: list[float] = Field([1e-2], min_length=1, description="Step sizes; a single one is taken without a search.")
    epochs: int = Field(3, ge=1, description="Passes over the training split, with a whole schedule of this length.")
    drop_rates: list[float] = Field(
        [], description="Dropout rates that arms ending in '-tuned' choose from, besides the network's own and, where "
        "there is the arm 'none', none."
    )  # fmt: skip

    @pydantic.field_validator("rates")
    @classmethod
    def _rising(cls, rates: list[float]) -> list[float]:
        if rates[0] <= 0 or sorted(set(rates)) != rates:
            raise ValueError("expected rates above zero that rise")
        return rates

    @pydantic.field_validator("drop_rates")
    @classmethod
    def _shares(cls, rates: list[float]) -> list[float]:
        if not all(0 <= rate < 1 for rate in rates) or len(set(rates)) < len(rates):
            raise ValueError("expected drop_rates in [0, 1) that differ")
        return rates


class SolverOptions(StrictConfig):
    """The solver in place of a block of layers."""

    iters: int = Field(10, ge=1, description="Iterations of every block.")
    lam: float = Field(1e-3, ge=0, description="Weight of the strongly convex term. Paper: 1e-3.")
    formulation: Formulation = Field("normalized", description="Of the problem; 'paper' takes steps of 1/L.")
    sampled: dict[str, Any] = Field(
        {"step": "exp", "decay": 0.9}, description="Options of sampling solvers; the paper decays exponentially."
    )

    def of(self, solver: str) -> dict[str, Any]:
        """Returns the options of a solver by its name."""
        options: dict[str, Any] = {"solver": solver, **self.model_dump(exclude={"sampled"})}
        return {**options, **self.sampled} if samples(solver) else options


def samples(solver: str) -> bool:
    """Whether a solver draws features at random."""
    return SOLVERS.get(solver).samples != "nothing"


class TableConfig(ImageConfig):
    """Settings of a table."""

    data: ImageData = ImageData(train="train[:90%]", validation="train[90%:]", test="test")
    image_size: int | None = Field(None, ge=1, description="Images are resized to this side; null for as they are.")
    solver: SolverOptions = SolverOptions()
    first: Fitting | None = Field(
        None, description="How networks are trained before they are finetuned; null for training from scratch."
    )
    search: Search = Search()
    fitting: Fitting = Fitting(weight_decay=5e-4)
    controls: list[str] = Field(
        [], description=f"What the solvers are compared with: {', '.join(SIMPLE)}, or an arm with dropout and '-tuned'."
    )
    trials: int = Field(20, ge=1, description="Passes over the test split of a network that samples. Paper: 20.")

    @pydantic.model_validator(mode="after")
    def _tested(self) -> Self:
        if self.data.test is None:
            raise ValueError("expected data.test: the validation split chooses the step size, so it is no test")
        return self


C = TypeVar("C", bound=TableConfig)


class DeepLayersTable(ImageStudy[C]):
    """A table whose rows are networks (``group``) and whose columns are arms, the first of them without a solver.

    Attributes:
        group: What its networks differ in, a key of the cells' settings.
        printed: The paper's accuracies by network and arm; :data:`FIRST` is the network before it is finetuned.
        evaluation_batch: How many images are evaluated at once.
    """

    tags = ("deeplayers", "images")
    group: ClassVar[str]
    printed: ClassVar[dict[Value, dict[str, float]]] = {}
    evaluation_batch: ClassVar[int] = EVALUATION_BATCH
    _parts: dict[str, Part]

    @abstractmethod
    def groups(self) -> list[Value]:
        """Lists the networks."""

    @abstractmethod
    def arms(self) -> tuple[str, ...]:
        """Lists the arms without controls; the first has no solver."""

    @abstractmethod
    def sites(self, group: Value) -> Sites:
        """Returns where controls are put."""

    @abstractmethod
    def make(self, group: Value) -> nn.Module:
        """Makes a plain network with random weights."""

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
        super().prepare()
        self._parts = {}
        # Made once, so that mistakes surface before anything is written.
        for group in self.groups():
            for arm in self.compared():
                self._solved(self.make(group), group, arm, self._images.train.images[:1])

    def compared(self) -> tuple[str, ...]:
        """Lists the arms and the controls."""
        known = (*self.arms(), *SIMPLE)
        for control in self.config.controls:
            if control not in SIMPLE and control not in (f"{arm}{TUNED}" for arm in known):
                expected = (*SIMPLE, *(f"{arm}{TUNED}" for arm in known))
                raise OptionError(f"Unknown control {control!r}.{did_you_mean(control, expected)}")
        return (*self.arms(), *self.config.controls)

    def stages(self) -> list[list[Cell]]:
        search, seeds = self.config.search, self.config.seeds
        tuned = [arm for arm in self.compared() if arm.endswith(TUNED)]
        stages = [self._firsts()]
        if len(search.rates) > 1 or tuned:
            stages.append([cell for rate in search.rates for cell in self._cells(seeds[:1], SEARCH, lr=rate)])
            # An arm without its end is the same at the network's own rate.
            stages[-1] += [
                Cell(arm, seeds[0], ((self.group, group), ("stage", SEARCH), ("lr", rate), ("p", p)))
                for group in self.groups() for arm in tuned for p in search.drop_rates for rate in search.rates
            ]  # fmt: skip
        stages.append(self._cells(seeds, FINAL, arms=self.compared()))
        return [stage for stage in stages if stage]

    def _firsts(self) -> list[Cell]:
        if self.config.first is None:
            return []
        return [self._first_cell(group, seed) for seed in self.config.seeds for group in self.groups()]

    def _first_cell(self, group: Value, seed: int) -> Cell:
        """Returns the cell that trains the network from which finetuning starts."""
        return Cell(FIRST, seed, ((self.group, group), ("stage", FIRST)))

    def _cells(self, seeds: list[int], stage: str, arms: Sequence[str] = (), **setting: Value) -> list[Cell]:
        settings: dict[str, list[Value]] = {self.group: self.groups(), "stage": [stage]}
        settings |= {key: [value] for key, value in setting.items()}
        arms = arms or [arm for arm in self.compared() if not arm.endswith(TUNED)]
        return Cell.grid(seed=seeds, **settings, arm=arms)

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
        searching = cell["stage"] == SEARCH
        chosen = dict(cell.setting) if searching else self._best(cell, context.earlier)
        begun = self._convert(cell, model, parts, chosen.get("p"))
        changes = {"lr": chosen["lr"]} | ({"epochs": config.search.epochs} if searching else {})
        found = self._train(cell, model, parts, config.fitting.model_copy(update=changes), context)
        if searching:
            return begun | found
        return {**chosen, **begun, **found, **self._test(cell, model, parts["test"], bool(found["diverged"]))}

    def _train_first(self, cell: Cell, model: nn.Module, settings: Fitting, context: Context) -> dict[str, Any]:
        parts = self._ready(model, context)
        found = self._train(cell, model, parts, settings, context)
        if found["diverged"]:
            raise OptionError(f"The network of {cell.name} did not train: its loss is not finite. Lower first.lr.")
        if context.folder is not None:
            with whole_file(_weights(context.folder, cell)) as partial:
                save_file({key: value.contiguous() for key, value in model.state_dict().items()}, partial)
        return {**found, **self._test(cell, model, parts["test"], False)}

    def _begin(self, model: nn.Module, first: Cell, context: Context) -> nn.Module:
        """Loads the weights of the first stage into a network."""
        model.load_state_dict(read_first(first, context))
        return model.to(context.device)

    def _inputs(self, model: nn.Module, seed: int, context: Context) -> dict[str, Part]:
        """Returns what the trained part of a network reads."""
        return self._ready(model, context)

    def _ready(self, model: nn.Module, context: Context) -> dict[str, Part]:
        """Returns the images, which are prepared once for all cells."""
        if not self._parts:
            parts = {key: self._prepared(model, part, context) for key, part in self._splits().items()}
            self._parts = {key: part.channels_last() for key, part in parts.items()}
        return self._parts

    def _prepared(self, model: nn.Module, part: Part, context: Context) -> Part:
        """Returns a split as a network expects it."""
        return normalised(part, self._images.train, context.device, self.config.image_size)

    def _trained(self, model: nn.Module) -> nn.Module:
        """Returns the part of a network that is trained and converted."""
        return model

    def _splits(self) -> dict[str, Part]:
        """Returns the images as they were loaded."""
        images = self._images
        assert images.test is not None
        return {"train": images.train, "validation": images.validation, "test": images.test}

    def _convert(self, cell: Cell, model: nn.Module, parts: dict[str, Part], p: Any = None) -> dict[str, Any]:
        """Puts an arm into a network, at a dropout rate; returns what is measured before training."""
        self._solved(model, cell[self.group], cell.arm, parts["train"].images[:1], p)
        return {}

    def _solved(self, model: nn.Module, group: Value, arm: str, example: Tensor, p: float | None = None) -> nn.Module:
        """Puts the solvers of an arm, or a control, into a network."""
        arm = arm.removesuffix(TUNED)
        if p is not None:
            set_rates(model, self.sites(group), p)
        if arm in SIMPLE:
            put_control(model, self.sites(group), arm, self.config.solver.iters)
        if arm == self.arms()[0] or arm in SIMPLE:
            return model
        options = self.conversion(group, arm)
        if p is not None and not p:
            # No dropout is live, by which the layers are found otherwise.
            options = {**options, "pattern": "all", "targets": list(self.sites(group)), "p": 0.0}
        elif p is not None and "p" in options:
            options["p"] = p
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

        def look(loop: Loop) -> None:
            seconds.append(loop.progress.cpu_seconds)
            curve.append(self._scores(model, parts["validation"], self.name, cell.seed, "look", len(curve)).accuracy)

        batches = settings.batches(parts["train"], cell.seed)
        solving = cell.arm.removesuffix(TUNED) in self.arms()[1:]
        # Step sizes are certified once per epoch, as in the paper.
        hooks = Hooks((refresh_every(batches.steps),) if solving else (), (look,))
        done = fit(model, batches, settings.settings(), context, hooks=hooks)
        return {
            "validation_accuracy": None if done.diverged else curve[-1],
            "diverged": done.diverged,
            # Without the time for evaluation.
            "training_cpu_seconds": seconds[-1] if seconds else None,
            "curves": {"validation_accuracy": curve, "cpu_seconds": seconds},
        }

    def _test(self, cell: Cell, model: nn.Module, test: Part, diverged: bool) -> dict[str, Any]:
        """Evaluates on the test split: several times if the network samples, and then once without sampling."""
        if diverged:
            return {"accuracy": None, "trial_spread": None, "deterministic_accuracy": None}
        found = self._scores(model, test, self.name, cell.seed, "trial", trials=self.config.trials)
        sampling = samples_in_evaluation(model)
        return {
            "accuracy": found.accuracy,
            "trial_spread": found.accuracy_std if found.trials > 1 else None,
            "deterministic_accuracy": self._scores(_sampling_off(model), test).accuracy if sampling else None,
        }

    def _scores(self, model: nn.Module, part: Part, *place: int | str, trials: int = 1) -> Scores:
        return scores(model, part, *place, size=self.evaluation_batch, trials=trials)

    def _best(self, cell: Cell, earlier: Results) -> dict[str, float]:
        """Returns the step size, and the dropout rate of a tuned arm, that were best on the validation split."""
        rates, group, arm = self.config.search.rates, cell[self.group], cell.arm
        if len(rates) == 1 and not arm.endswith(TUNED):
            return {"lr": rates[0]}
        reached: dict[tuple[float, float | None], float | None] = {}
        for one in self._found(earlier, group, arm, SEARCH):
            setting = dict(one.cell.setting)
            reached[float(setting["lr"]), float(setting["p"]) if "p" in setting else None] = one.values[LOOKED]
        if arm.endswith(TUNED):
            base = arm.removesuffix(TUNED)
            own = self.rate(group)
            for other, p in ((base, own), *([(NONE, 0.0)] if base == self.arms()[0] else [])):
                for one in self._found(earlier, group, other, SEARCH):
                    reached[float(one.cell["lr"]), p] = one.values[LOOKED]
        known = {choice: score for choice, score in reached.items() if score is not None}
        if not known:
            raise OptionError(f"{cell.name}: training diverged with all of search.rates={rates}. Add smaller ones.")
        lr, p = max(known, key=lambda choice: known[choice])
        return {"lr": lr} if p is None else {"lr": lr, "p": p}

    def rate(self, group: Value) -> float:
        """Returns the rate of the dropouts that solvers take the place of."""
        return 0.0

    def rows(self, results: Results) -> list[TableRow]:
        """Returns one row for every network and arm."""
        arms = (*((FIRST,) if self._tests_first() else ()), *self.compared())
        return [
            TableRow(
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
            # If nothing is finetuned, the plain network corresponds to the paper's network before finetuning.
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
        edges = {self.config.search.rates[0], self.config.search.rates[-1]}
        return {
            **{f"{row.key}_accuracy": row.accuracy for row in rows},
            **{f"{row.key}_gain": mean(pairs(row, rows, self.arms()[0])) for row in solved(rows, self.arms()[0])},
            # A search that ends at its edge may have missed the best rate.
            "at_the_edge_of_the_search": sorted(
                {row.key for row in rows if row.arm != FIRST and len(edges) > 1 and edges & set(row.rates)}
            ),
        }

    def draw(self, results: Results) -> Any:
        return draw_table(self.rows(results))


def _sampling_off(model: nn.Module) -> nn.Module:
    """Makes a converted network deterministic in evaluation, keeping its gains and blend."""
    known = conversion_of(model)
    blocks = tuple(
        block.model_copy(update={"settings": {**block.settings, "eval_mode": "deterministic"}})
        for block in known.blocks
    )
    return apply_conversion(revert_model(model), known.model_copy(update={"blocks": blocks}))


def _weights(folder: Path, cell: Cell) -> Path:
    return folder / f"{cell.name}.safetensors"


def read_first(cell: Cell, context: Context) -> dict[str, Tensor]:
    """Returns the weights that a cell of the first stage saved.

    Raises:
        CellError: If there are none.
    """
    if context.folder is None or not _weights(context.folder, cell).is_file():
        raise CellError(
            f"Expected the weights of {cell.name} in the folder of the run; found none. Delete the result "
            f"{cell.name}.json there, and run the study again."
        )
    return read_weights(_weights(context.folder, cell))
