"""What the tables of "Deep Layers as Stochastic Solvers" share: plain networks beside networks with solvers.

In front of the stages of :mod:`~solver_plugins.studies.searched` there may be ``first``, which trains the networks that
are finetuned later, or whose features are kept. What a solver has to beat is in
:mod:`~solver_plugins.studies.controls`; its arms get the same search.
"""

import warnings
from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor, nn

from solver_plugins.config import StrictConfig
from solver_plugins.errors import OptionError, SolverPluginsWarning
from solver_plugins.integrations.weights import read_weights
from solver_plugins.registry import SOLVERS
from solver_plugins.solve.problem import Formulation
from solver_plugins.studies.comparison import FIRST, Row, differences, gains
from solver_plugins.studies.controls import NONE, SIMPLE, Sites, put_control, set_rates, untuned
from solver_plugins.studies.runner import CellError
from solver_plugins.studies.searched import SearchedConfig, SearchedStudy
from solver_plugins.studies.study import Cell, Context, Results, Table, Value
from solver_plugins.studies.training import Fitting
from solver_plugins.surgery import apply_conversion, conversion_of, convert_model, revert_model
from solver_plugins.train.evaluate import samples_in_evaluation
from solver_plugins.train.loop import Hooks, refresh_every
from solver_plugins.train.outputs import whole_file
from solver_plugins.train.tensors import Part

REFERENCE = "of *Deep Layers as Stochastic Solvers* (Bibi, Ghanem, Koltun and Ranftl, ICLR 2019)"


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


class TableConfig(SearchedConfig):
    """Settings of a table."""

    solver: SolverOptions = SolverOptions()
    first: Fitting | None = Field(
        None, description="How networks are trained before they are finetuned; null for training from scratch."
    )
    trials: int = Field(20, ge=1, description="Passes over the test split of a network that samples. Paper: 20.")


class FinetunedConfig(TableConfig):
    """Settings of a table whose networks are finetuned."""

    beside: Literal["CIFAR-10", "CIFAR-100"] = Field("CIFAR-10", description="Which of the paper's numbers are shown.")


C = TypeVar("C", bound=TableConfig)


class DeepLayersTable(SearchedStudy[C]):
    """A table whose first arm has no solver, with the paper's accuracies; ``first`` is before finetuning."""

    tags = ("deeplayers", "images")
    group: ClassVar[str] = "beside"
    simple: ClassVar[tuple[str, ...]] = SIMPLE
    eval_mode: ClassVar[str] = "stochastic"
    """Of solvers that sample: the paper's samples in evaluation, too."""

    @abstractmethod
    def sites(self, group: Value) -> Sites:
        """Returns where controls are put."""

    @abstractmethod
    def conversion(self, group: Value, arm: str) -> dict[str, Any]:
        """Returns the arguments of :func:`convert_model` for an arm with a solver."""

    def groups(self) -> list[Value]:
        config: Any = self.config
        return [config.beside]

    def tunable(self) -> tuple[str, ...]:
        return (*self.arms(), *SIMPLE)

    def rate(self, group: Value) -> float:
        """Returns the rate of the dropouts that solvers take the place of."""
        return 0.0

    def equals(self, group: Value, arm: str) -> list[tuple[str, float]]:
        # Without dropout, the plain network is 'none'.
        none = [(NONE, 0.0)] if untuned(arm) == self.arms()[0] else []
        return [(untuned(arm), self.rate(group)), *none]

    def prepare(self) -> None:
        super().prepare()
        # Made once, so that mistakes surface before anything is written.
        for group in self.groups():
            for arm in self.compared():
                self._solved(self.make(group), group, arm, self._example())

    def _example(self) -> Tensor:
        """Returns an input of the networks, by which layers are found."""
        return self._images.train.images[:1]

    def stages(self) -> list[list[Cell]]:
        return [stage for stage in (self._firsts(), *super().stages()) if stage]

    def _firsts(self) -> list[Cell]:
        if self.config.first is None:
            return []
        return [self._first_cell(group, seed) for seed in self.config.seeds for group in self.groups()]

    def _first_cell(self, group: Value, seed: int) -> Cell:
        """Returns the cell that trains the network from which finetuning starts."""
        return Cell(FIRST, seed, ((self.group, group), ("stage", FIRST)))

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        group, first = cell[self.group], self.config.first
        model = self.make(group).to(context.device)
        if cell["stage"] == FIRST and first is not None:
            return self._train_first(cell, model, first, context)
        if first is not None:
            model = self._begin(model, self._first_cell(group, cell.seed), context)
        return self.compare(cell, model, context)

    def _train_first(self, cell: Cell, model: nn.Module, settings: Fitting, context: Context) -> dict[str, Any]:
        parts = self._ready(model, context)
        found = self._train(cell, model, parts, settings, context)
        if found["diverged"]:
            raise OptionError(f"The network of {cell.name} did not train: its loss is not finite. Lower first.lr.")
        if context.folder is not None:
            with whole_file(_weights(context.folder, cell)) as partial:
                save_file({key: value.contiguous() for key, value in model.state_dict().items()}, partial)
        return {**found, **self._test(cell, model, parts, False)}

    def _begin(self, model: nn.Module, first: Cell, context: Context) -> nn.Module:
        """Loads the weights of the first stage into a network."""
        model.load_state_dict(read_first(first, context))
        return model.to(context.device)

    def _convert(self, cell: Cell, model: nn.Module, parts: dict[str, Part], p: Any = None) -> dict[str, Any]:
        self._solved(model, cell[self.group], cell.arm, parts["train"].images[:1], p)
        return {}

    def _solved(self, model: nn.Module, group: Value, arm: str, example: Tensor, p: float | None = None) -> nn.Module:
        """Puts the solvers of an arm, or a control, into a network."""
        arm = untuned(arm)
        if p is not None:
            set_rates(model, self.sites(group), p)
        if arm in SIMPLE:
            put_control(model, self.sites(group), arm, self.config.solver.iters)
        if arm not in self.arms()[1:]:
            return model
        options = self.conversion(group, arm)
        if p == 0 and samples(options["solver"]):
            # No dropout is live, by which the layers are found otherwise.
            options = {**options, "pattern": "all", "targets": list(self.sites(group)), "p": 0.0}
        elif p is not None and "p" in options:
            options["p"] = p
        more = {"eval_mode": self.eval_mode} if samples(options["solver"]) else {}
        size = self.config.image_size
        if size is not None and example.ndim == 4 and example.shape[-1] != size:
            example = example.new_zeros(1, example.shape[1], size, size)
        return convert_model(model, example_inputs=example, **{**options, **more})

    def hooks(self, arm: str, steps: int) -> Hooks:
        # Step sizes are certified once per epoch, as in the paper.
        return Hooks((refresh_every(steps),) if untuned(arm) in self.arms()[1:] else ())

    def _test(self, cell: Cell, model: nn.Module, parts: dict[str, Part], diverged: bool) -> dict[str, Any]:
        """Evaluates on the test split: several times if the network samples, and then once without sampling."""
        if diverged:
            return dict.fromkeys(("accuracy", "loss", "ece", "trial_spread", "deterministic_accuracy"))
        found = self._scores(model, parts["test"], self.name, cell.seed, "trial", trials=self.config.trials)
        sampling = samples_in_evaluation(model)
        return {
            "accuracy": found.accuracy,
            "loss": found.loss,
            "ece": found.ece,
            "trial_spread": found.spread if found.trials > 1 else None,
            "deterministic_accuracy": self._scores(_sampling_off(model), parts["test"]).accuracy if sampling else None,
        }

    def rows(self, results: Results) -> list[Row]:
        arms = (*((FIRST,) if self._tests_first() else ()), *self.compared())
        return [
            self._row(results, group, arm, FIRST if arm == FIRST else "final")
            for group in self.groups()
            for arm in arms
        ]

    def _paper(self, group: Value, arm: str) -> float | None:
        found = super()._paper(group, arm)
        # If nothing is finetuned, the plain network corresponds to the paper's network before finetuning.
        stands_for_first = found is None and arm == self.arms()[0] and not self._tests_first()
        return super()._paper(group, FIRST) if stands_for_first else found

    def _tests_first(self) -> bool:
        return self.config.first is not None

    def tables(self, results: Results) -> list[Table]:
        rows, plain, config = self.rows(results), self.arms()[0], self.config
        first, *search = super().tables(results)
        note = f"{first.note} A network that samples is tested {config.trials} times."
        controls = [plain, *(arm for arm in config.controls if not Row.of_arm(arm).has_solver(plain))]
        return [
            Table(first.title, first.columns, first.rows, note),
            gains(rows, plain),
            *(
                [differences(rows, [row for row in rows if row.has_solver(plain)], controls, config.seeds)]
                if config.controls
                else []
            ),
            *search,
        ]


def _sampling_off(model: nn.Module) -> nn.Module:
    """Makes a converted network deterministic in evaluation, keeping its gains and blend."""
    known = conversion_of(model)
    blocks = tuple(
        block.model_copy(update={"settings": {**block.settings, "eval_mode": "deterministic"}})
        for block in known.blocks
    )
    with warnings.catch_warnings():
        # The solvers come back at once.
        warnings.simplefilter("ignore", SolverPluginsWarning)
        plain = revert_model(model)
    return apply_conversion(plain, known.model_copy(update={"blocks": blocks}))


def _weights(folder: Path, cell: Cell) -> Path:
    return folder / f"{cell.name}.safetensors"


def read_first(cell: Cell, context: Context) -> dict[str, Tensor]:
    """Returns the weights that a cell of the first stage saved."""
    if context.folder is None or not _weights(context.folder, cell).is_file():
        raise CellError(
            f"Expected the weights of {cell.name} in the folder of the run; found none. Delete the result "
            f"{cell.name}.json there, and run the study again."
        )
    return read_weights(_weights(context.folder, cell))
