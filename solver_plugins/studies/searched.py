"""Studies that search: what is compared gets the same search for its step size before the test split is read.

``search`` trains every arm with every step size for a few epochs, for one seed, and evaluates on the validation split.
``final`` trains with what was best for the arm and evaluates on the test split, once.
"""

from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import pydantic
from pydantic import Field
from torch import nn

from solver_plugins.config import StrictConfig
from solver_plugins.errors import OptionError, did_you_mean
from solver_plugins.studies.comparison import Row, accuracies, draw_rows, pairs, search_tables
from solver_plugins.studies.controls import TUNED
from solver_plugins.studies.images import ImageConfig, ImageData, ImageStudy, build_backbone, normalised, prepared
from solver_plugins.studies.study import Cell, Context, Results, Table, Value, mean
from solver_plugins.studies.training import EVALUATION_BATCH, Fitting, fit, scores
from solver_plugins.train.additions import Additions
from solver_plugins.train.config import ModelSection
from solver_plugins.train.evaluate import Scores
from solver_plugins.train.loop import Hooks, Loop
from solver_plugins.train.tensors import Part

SEARCH, FINAL = "search", "final"
LOOKED = "validation_accuracy"


class Search(StrictConfig):
    """The search for a step size: the same for all arms."""

    rates: list[float] = Field([1e-2], min_length=1, description="Step sizes; a single one is taken without a search.")
    epochs: int = Field(3, ge=1, description="Passes over the training split, with a whole schedule of this length.")
    drop_rates: list[float] = Field(
        [], description="Dropout rates that arms ending in '-tuned' choose from, besides the network's own and, where "
        "there is the arm 'none', none."
    )  # fmt: skip

    @pydantic.model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.rates[0] <= 0 or sorted(set(self.rates)) != self.rates:
            raise ValueError("expected rates above zero that rise")
        if not all(0 <= rate < 1 for rate in self.drop_rates) or len(set(self.drop_rates)) < len(self.drop_rates):
            raise ValueError("expected drop_rates in [0, 1) that differ")
        return self


class SearchedConfig(ImageConfig):
    """Settings of such a study."""

    data: ImageData = ImageData(train="train[:90%]", validation="train[90%:]", test="test")
    image_size: int | None = Field(None, ge=1, description="Images are resized to this side; null for as they are.")
    search: Search = Search()
    fitting: Fitting = Fitting(weight_decay=5e-4)
    controls: list[str] = Field([], description="More that is compared: simpler ways, or arms and '-tuned'.")
    predictions: str = Field("", description="What was expected, written down before the test split was read.")

    @pydantic.model_validator(mode="after")
    def _tested(self) -> Self:
        if self.data.test is None:
            raise ValueError("expected data.test: the validation split chooses the step size, so it is no test")
        return self


C = TypeVar("C", bound=SearchedConfig)


class SearchedStudy(ImageStudy[C]):
    """A table whose rows are networks or settings (``group``) and whose columns are arms, the first of them plain.

    Attributes:
        group: What its networks differ in, a key of the cells' settings.
        printed: The paper's accuracies by network and arm.
        simple: Controls that are not arms.
        measures: More columns of the report: a heading, and the value and format of it.
    """

    group: ClassVar[str]
    printed: ClassVar[dict[Value, dict[str, float]]] = {}
    simple: ClassVar[tuple[str, ...]] = ()
    measures: ClassVar[dict[str, tuple[str, str]]] = {}
    _parts: dict[str, Part]

    def section(self) -> ModelSection | None:
        """Returns which model of a library is compared; None for networks of the study's own."""
        return getattr(self.config, "model", None)

    @property
    def evaluation_batch(self) -> int:
        """How many images are evaluated at once."""
        # With 400, EfficientNet-Lite0 at 64 pixels took 2.5 times as long per image on one thread of a CPU.
        return EVALUATION_BATCH if self.section() is None else 64

    def groups(self) -> list[Value]:
        """Lists the networks."""
        section = self.section()
        assert section is not None
        return [Path(section.spec).name]

    @abstractmethod
    def arms(self) -> tuple[str, ...]:
        """Lists the arms without controls; the first is plain."""

    def tunable(self) -> tuple[str, ...]:
        """Lists the arms that may be named with '-tuned'."""
        return ()

    def make(self, group: Value) -> nn.Module:
        """Makes a plain network, as it is before training."""
        section = self.section()
        assert section is not None
        return build_backbone(section, self._images)

    def compared(self) -> tuple[str, ...]:
        """Lists the arms and the controls."""
        known = (*self.simple, *(f"{arm}{TUNED}" for arm in self.tunable()))
        for control in self.config.controls:
            if control not in known:
                raise OptionError(f"Unknown control {control!r}.{did_you_mean(control, known)}")
        return (*self.arms(), *self.config.controls)

    def label(self, group: Value) -> str:
        """Returns the name of a network in the report."""
        return str(group)

    def title(self) -> str:
        """Returns what the report says about the networks."""
        config = self.config
        return f"{len(self._images.train)} images of {config.data.name!r}, {config.fitting.epochs} epochs"

    def candidates(self, group: Value, arm: str) -> list[dict[str, Value]]:
        """Lists what the search of an arm tries: step sizes, and for a tuned one dropout rates."""
        search = self.config.search
        if not arm.endswith(TUNED):
            return [{"lr": rate} for rate in search.rates]
        return [{"lr": rate, "p": p} for p in search.drop_rates for rate in search.rates]

    def equals(self, group: Value, arm: str) -> list[tuple[str, float]]:
        """Lists other arms that are the same as a tuned one at a dropout rate, and that rate."""
        return []

    def fitting(self, group: Value, arm: str) -> Fitting:
        """Returns how an arm is trained, but for its step size."""
        return self.config.fitting

    def additions(self, arm: str, p: float | None = None) -> Additions:
        """Returns what an arm adds to training, at a dropout rate if that is searched."""
        return Additions()

    def prepare(self) -> None:
        super().prepare()
        self._parts = {}

    def stages(self) -> list[list[Cell]]:
        seeds, groups, compared = self.config.seeds, self.groups(), self.compared()
        tried = [(group, arm, self.candidates(group, arm)) for group in groups for arm in compared]
        search = [
            Cell(arm, seeds[0], ((self.group, group), ("stage", SEARCH), *one.items()))
            for group, arm, candidates in tried
            for one in candidates
        ]
        setting: dict[str, list[Value]] = {self.group: groups, "stage": [FINAL]}
        final = Cell.grid(seed=seeds, **setting, arm=compared)
        needed = any(len(candidates) != 1 or "p" in candidates[0] for *_, candidates in tried)
        return [search, final] if needed else [final]

    def cells(self) -> list[Cell]:
        return [cell for stage in self.stages() for cell in stage]

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        return self.compare(cell, self.make(cell[self.group]).to(context.device), context)

    def compare(self, cell: Cell, model: nn.Module, context: Context) -> dict[str, Any]:
        """Trains and evaluates an arm of a network: in the search, or with what was best there."""
        parts = self._inputs(model, cell, context)
        model = self._trained(model)
        searching = cell["stage"] == SEARCH
        chosen: dict[str, Any] = dict(cell.setting) if searching else self._best(cell, context.earlier)
        begun = self._convert(cell, model, parts, chosen.get("p"))
        settings = self.fitting(cell[self.group], cell.arm).model_copy(update={"lr": chosen["lr"]})
        if searching:
            settings = settings.model_copy(update={"epochs": min(settings.epochs, self.config.search.epochs)})
        found = self._train(cell, model, parts, settings, context, chosen.get("p"))
        if searching:
            return begun | found
        return {**chosen, **begun, **found, **self._test(cell, model, parts, bool(found["diverged"]))}

    def _convert(self, cell: Cell, model: nn.Module, parts: dict[str, Part], p: Any = None) -> dict[str, Any]:
        """Puts an arm into a network, at a dropout rate; returns what is measured before training."""
        return {}

    def _inputs(self, model: nn.Module, cell: Cell, context: Context) -> dict[str, Part]:
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
        known, section, size = self._images.train, self.section(), self.config.image_size
        if section is None:
            return normalised(part, known, context.device, size)
        return prepared(section, model, part, known, context.device, size)

    def _trained(self, model: nn.Module) -> nn.Module:
        """Returns the part of a network that is trained and converted."""
        return model

    def _splits(self) -> dict[str, Part]:
        """Returns the images as they were loaded."""
        images = self._images
        assert images.test is not None
        return {"train": images.train, "validation": images.validation, "test": images.test}

    def hooks(self, arm: str, steps: int) -> Hooks:
        """Returns what happens in the training of an arm with this many steps per epoch."""
        return Hooks()

    def _train(
        self,
        cell: Cell,
        model: nn.Module,
        parts: dict[str, Part],
        settings: Fitting,
        context: Context,
        p: float | None = None,
    ) -> dict[str, Any]:
        curve: list[float] = []
        seconds: list[float] = []

        def look(loop: Loop) -> None:
            seconds.append(loop.progress.cpu_seconds)
            curve.append(self._scores(model, parts["validation"], self.name, cell.seed, "look", len(curve)).accuracy)

        batches = settings.batches(parts["train"], cell.seed)
        hooks = Hooks(self.hooks(cell.arm, batches.steps).after_step, (look,))
        done = fit(model, batches, settings.settings(), context, additions=self.additions(cell.arm, p), hooks=hooks)
        return {
            LOOKED: None if done.diverged else curve[-1],
            "diverged": done.diverged,
            # Without the time for evaluation.
            "training_cpu_seconds": seconds[-1] if seconds else None,
            "curves": {LOOKED: curve, "cpu_seconds": seconds},
        }

    def _test(self, cell: Cell, model: nn.Module, parts: dict[str, Part], diverged: bool) -> dict[str, Any]:
        """Evaluates on the test split, and the loss over the training split."""
        if diverged:
            return dict.fromkeys(("accuracy", "loss", "ece", "training_loss"))
        found = self._scores(model, parts["test"], self.name, cell.seed, "trial")
        return {
            "accuracy": found.accuracy,
            "loss": found.loss,
            "ece": found.ece,
            "training_loss": self._scores(model, parts["train"], self.name, cell.seed, "train").loss,
        }

    def _scores(self, model: nn.Module, part: Part, *place: int | str, trials: int = 1) -> Scores:
        return scores(model, part, *place, size=self.evaluation_batch, trials=trials)

    def _best(self, cell: Cell, earlier: Results) -> dict[str, Any]:
        """Returns the candidate that was best on the validation split."""
        group, arm = cell[self.group], cell.arm
        candidates = self.candidates(group, arm)
        if len(candidates) == 1 and "p" not in candidates[0]:
            return candidates[0]
        found = [(one, score) for one, score in self._searched(earlier, group, arm) if score is not None]
        if not found:
            raise OptionError(
                f"{cell.name}: training diverged with all of search.rates={self.config.search.rates}. Add smaller ones."
            )
        return max(found, key=lambda pair: pair[1])[0]

    def _searched(self, earlier: Results, group: Value, arm: str) -> list[tuple[dict[str, Value], float | None]]:
        """Returns the candidates of an arm and how good they were."""
        keys = (self.group, "stage")
        found = [
            ({key: value for key, value in one.cell.setting if key not in keys}, one.values[LOOKED])
            for one in self._found(earlier, group, arm, SEARCH)
        ]
        for other, p in self.equals(group, arm) if arm.endswith(TUNED) else []:
            found += [({**one, "p": p}, score) for one, score in self._searched(earlier, group, other)]
        return found

    def _found(self, results: Results, group: Value, arm: str, stage: str) -> Results:
        setting: dict[str, Any] = {self.group: group}
        return results.of(arm=arm, stage=stage, **setting)

    def rows(self, results: Results) -> list[Row]:
        """Returns one row for every network and arm."""
        return [self._row(results, group, arm, FINAL) for group in self.groups() for arm in self.compared()]

    def _row(self, results: Results, group: Value, arm: str, stage: str) -> Row:
        found, search = (self._found(results, group, arm, one) for one in (stage, SEARCH))
        return Row(group, self.label(group), arm, self._paper(group, arm), found, search)

    def _paper(self, group: Value, arm: str) -> float | None:
        return self.printed.get(group, {}).get(arm)

    def tables(self, results: Results) -> list[Table]:
        rows = self.rows(results)
        return [
            *accuracies(rows, self.arms()[0], self.config, self.title(), self.measures),
            *search_tables(rows, self.config),
        ]

    def summary(self, results: Results) -> dict[str, Any]:
        rows, plain = self.rows(results), self.arms()[0]
        edges = {self.config.search.rates[0], self.config.search.rates[-1]}
        return {
            **{f"{row.key}_accuracy": row.found.mean("accuracy") for row in rows},
            **{f"{row.key}_gain": mean(pairs(row, rows, plain)) for row in rows if row.has_solver(plain)},
            # A search that ends at its edge may have missed the best rate.
            "at_the_edge_of_the_search": sorted(
                {row.key for row in rows if row.search and len(edges) > 1 and edges & set(row.rates)}
            ),
        }

    def draw(self, results: Results) -> Any:
        return draw_rows(self.rows(results))
