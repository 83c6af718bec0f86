"""Beyond the Deep Layers paper: how to convert a pretrained network before it is finetuned."""

from typing import Any, Self

import pydantic
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from solver_plugins.blocks import blocks_of, calibrate
from solver_plugins.config import StrictConfig
from solver_plugins.solve.problem import Formulation
from solver_plugins.studies.comparison import FIRST, Row, better, differences, pairs, search_tables
from solver_plugins.studies.controls import Sites, put_before
from solver_plugins.studies.deeplayers import REFERENCE, DeepLayersTable, TableConfig, samples
from solver_plugins.studies.figures import COLOURS, label, nan_for_none, new_figure
from solver_plugins.studies.images import is_pretrained
from solver_plugins.studies.searched import FINAL, SearchedStudy
from solver_plugins.studies.study import Cell, Results, Table, Value, finite, mean, register_study, spread
from solver_plugins.studies.training import features_of
from solver_plugins.train.config import ModelSection, Names
from solver_plugins.train.randomness import seed_for, seeded
from solver_plugins.train.tensors import Part

PLAIN = "plain"


class Arm(StrictConfig):
    """One way to convert the network."""

    solver: str = Field("proxgd", description="A registered solver.")
    iters: int | None = Field(None, ge=1, description="Iterations of every block; solver.iters by default.")
    formulation: Formulation = Field("normalized", description="Of the problem; 'paper' takes steps of 1/L.")
    calibrate: bool = Field(False, description="Whether features get the mean and variance that they had.")
    blend: float = Field(1.0, ge=0, le=1, description="How much of the solver there is, throughout: 0 is the layer.")
    args: dict[str, Any] = Field(
        {}, description="More arguments of convert_model, in place of the study's own: targets, p, lam, gradient."
    )

    @pydantic.model_validator(mode="after")
    def _known(self) -> Self:
        samples(self.solver)
        for key in self.args:
            if key in type(self).model_fields or key in ("example_inputs", "inplace", "eval_mode"):
                raise ValueError(f"expected no {key!r} in args: it is an option of the arm, or set by the study")
        return self


class Calibration(StrictConfig):
    """How the arms that ask for it are calibrated."""

    batches: int = Field(4, ge=1, description="How many training batches are looked at.")


class PretrainedConfig(TableConfig):
    """Settings of the comparison."""

    model: ModelSection = Field(
        ModelSection(spec="timm/resnet18"), description="A model of timm and its weights, as in finetune recipes."
    )
    targets: Names | None = Field(None, description="Layers to convert: names or their ends, or one regex.")
    pattern: Names = Field(["linear-norm-act"], description="Patterns, 'strict' or 'all'.")
    calibration: Calibration = Calibration()
    arms: dict[str, Arm] = Field(
        {"raw": Arm(), "calibrated": Arm(calibrate=True)}, min_length=1, description="Ways to convert, by name."
    )

    @pydantic.model_validator(mode="after")
    def _begins_with_weights(self) -> Self:
        if self.first is not None:
            raise ValueError("expected no 'first': what is finetuned are model.weights, or those of model.pretrained")
        taken = [name for name in self.arms if name in (PLAIN, FIRST, "")]
        if taken:
            raise ValueError(f"expected another name than {taken[0]!r} for an arm; the network as it is is {PLAIN!r}")
        return self


@register_study
class DeepLayersPretrained(DeepLayersTable[PretrainedConfig]):
    """A pretrained network, finetuned as it is and converted: raw, calibrated, blended, with different solvers."""

    name = "deeplayers-pretrained"
    reference = f"Finetuning as in Table 3 {REFERENCE}, for networks with norms; the paper has no such table"
    Config = PretrainedConfig
    group = "model"
    _sites: Sites | None = None

    def groups(self) -> list[Value]:
        return SearchedStudy.groups(self)

    def arms(self) -> tuple[str, ...]:
        return PLAIN, *self.config.arms

    def title(self) -> str:
        config = self.config
        what = f"{config.model.spec}{', pretrained' if is_pretrained(config.model) else ''}"
        return f"{what}, on {super().title()}"

    def conversion(self, group: Value, arm: str) -> dict[str, Any]:
        config, one = self.config, self.config.arms[arm]
        options = config.solver.of(one.solver)
        return {
            **options,
            "targets": config.targets,
            "pattern": config.pattern,
            "iters": one.iters or config.solver.iters,
            "formulation": one.formulation,
            "blend": one.blend,
            **one.args,
        }

    def sites(self, group: Value) -> Sites:
        if self._sites is None:
            # Random weights of its own: no cell's random numbers are used up.
            with seeded(self.name, "sites"):
                model = self._solved(self.make(group), group, self.arms()[1], self._images.train.images[:1])
            self._sites = dict.fromkeys(blocks_of(model))
        return self._sites

    def tunable(self) -> tuple[str, ...]:
        # Blocks without a dropout have no rate.
        return (PLAIN,)

    def _solved(self, model: Any, group: Value, arm: str, example: Tensor, p: float | None = None) -> nn.Module:
        if p is not None:
            put_before(model, model.get_classifier(), nn.Dropout(p))
        return super()._solved(model, group, arm, example)

    def _convert(self, cell: Cell, model: nn.Module, parts: dict[str, Part], p: Any = None) -> dict[str, Any]:
        compared = cell["stage"] == FINAL
        if cell.arm not in self.config.arms:
            super()._convert(cell, model, parts, p)
            return {"similarity": 1.0, "feature_scale": 1.0} if compared else {}
        wanted = features_of(model, parts["validation"], self.evaluation_batch) if compared else None
        super()._convert(cell, model, parts)
        if self.config.arms[cell.arm].calibrate:
            calibrate(model, self._batches(parts["train"], cell.seed), progress=False)
        if wanted is None:
            return {}
        found = features_of(model, parts["validation"], self.evaluation_batch)
        return {
            "similarity": finite(functional.cosine_similarity(found, wanted).mean()),
            "feature_scale": finite(found.std() / wanted.std()),
        }

    def _batches(self, train: Part, seed: int) -> list[Tensor]:
        size, count = self.config.fitting.batch_size, self.config.calibration.batches
        # In random order, because images may be sorted by class; the same order for all arms.
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed_for(seed, "calibration")))
        return [train.images[rows] for rows in order[: count * size].split(size)]

    def tables(self, results: Results) -> list[Table]:
        rows, config = self.rows(results), self.config
        converted = [row for row in rows if row.arm in config.arms]
        differing = [differences(rows, converted, [PLAIN, *config.controls], config.seeds)] if config.controls else []
        return [
            Table(
                f"Accuracy on the test split: {self.title()}",
                (
                    "", "feature similarity before", "scale of features before", "accuracy (%)", f"over '{PLAIN}'",
                    "seeds that gain", "validation after one epoch (%)", "training (CPU s)", f"times '{PLAIN}'", "lr",
                ),
                [_compared(row, rows) for row in rows],
                f"Mean ± standard deviation over seeds {config.seeds}. '{PLAIN}' has no solver; all arms are finetuned "
                "as long, from the same weights and the same new classifier. 'before': right after the conversion, "
                "cosine and ratio of standard deviations between the pooled features of an arm and of the network as "
                "it was, on the validation split. Training is without conversion, calibration and evaluation.",
            ),
            *differing,
            Table(
                f"Arms: layers {config.targets or 'of all names'}, patterns {config.pattern}",
                ("", "solver", "iterations", "formulation", "calibrated", "blend", "more"),
                [
                    (name, arm.solver, str(arm.iters or config.solver.iters), arm.formulation,
                     "yes" if arm.calibrate else "no", f"{arm.blend:g}",
                     ", ".join(f"{key}={value}" for key, value in arm.args.items()))
                    for name, arm in config.arms.items()
                ],
                f"Calibrated on {config.calibration.batches} batches of {config.fitting.batch_size} training images.",
            ),
            *search_tables(rows, config),
        ]  # fmt: skip

    def summary(self, results: Results) -> dict[str, Any]:
        rows = self.rows(results)
        found = super().summary(results)
        for row in rows:
            found[f"{row.key}_similarity"] = row.found.mean("similarity")
            found[f"{row.key}_first_epoch"] = mean(_first_epoch(row))
            found[f"{row.key}_times_plain"] = mean(_times(row, rows))
        return found

    def draw(self, results: Results) -> Any:
        rows = self.rows(results)
        figure, axes = new_figure(1, 3, width=3.8, height=1.2 + 0.32 * len(rows))
        accuracy, similarity, times = axes[0]
        for place, row in enumerate(rows):
            for panel, values, style in (
                (accuracy, row.found.each("accuracy"), {"color": COLOURS[0], "marker": "o"}),
                (accuracy, _first_epoch(row), {"color": COLOURS[1], "marker": "o", "fillstyle": "none"}),
                (similarity, row.found.each("similarity"), {"color": COLOURS[2], "marker": "o"}),
                (times, _times(row, rows), {"color": COLOURS[3], "marker": "o"}),
            ):
                panel.plot(nan_for_none(values), [place] * len(values), linestyle="none", alpha=0.7, **style)
        accuracy.plot([], [], "o", color=COLOURS[0], label="test, at the end")
        accuracy.plot([], [], "o", color=COLOURS[1], fillstyle="none", label="validation, after one epoch")
        accuracy.axvline(
            nan_for_none([rows[0].found.mean("accuracy")])[0], color="#444444", linewidth=0.8, linestyle="--",
            label=f"test, at the end, mean of '{PLAIN}'",
        )  # fmt: skip
        for panel in axes[0]:
            panel.set_ylim(len(rows) - 0.5, -0.5)
            panel.set_yticks(range(len(rows)), [row.arm for row in rows] if panel is accuracy else [""] * len(rows))
        label(accuracy, "accuracy (%)")
        label(similarity, "feature similarity before finetuning")
        label(times, f"training time over that of '{PLAIN}'")
        # Above the panel, where the legend hides no arm.
        accuracy.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0.0, 1.0))
        return figure


def _compared(row: Row, rows: list[Row]) -> tuple[str, ...]:
    gained = pairs(row, rows, PLAIN)
    plain = row.arm == PLAIN
    return (
        row.arm,
        row.found.spread("similarity", ".3f"),
        row.found.spread("feature_scale", ".2f"),
        row.found.spread("accuracy", ".2f"),
        "" if plain else spread(gained, "+.2f"),
        "" if plain else better(gained),
        spread(_first_epoch(row), ".2f"),
        spread(_seconds(row), ".1f"),
        spread(_times(row, rows), ".2f"),
        ", ".join(f"{rate:g}" for rate in row.rates),
    )


def _first_epoch(row: Row) -> list[float | None]:
    """Returns accuracies on the validation split after the first epoch; None if it was not completed."""
    curves = [one.values["curves"]["validation_accuracy"] for one in row.found]
    return [curve[0] if curve else None for curve in curves]


def _seconds(row: Row) -> list[float | None]:
    """Returns CPU seconds of training; None if training diverged."""
    return [None if one.values["diverged"] else one.values["training_cpu_seconds"] for one in row.found]


def _times(row: Row, rows: list[Row]) -> list[float | None]:
    """Returns the training time over that of the plain network, seed by seed."""
    (plain,) = [one for one in rows if one.arm == PLAIN]
    both = zip(_seconds(row), _seconds(plain), strict=True)
    return [None if a is None or not b else a / b for a, b in both]
