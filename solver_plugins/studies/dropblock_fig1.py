"""Figures 1 and 5 of the structured dropout paper: sampling, its expectation, and the closed-form minimum."""

import math
from typing import Any, ClassVar, Self

import pydantic
from pydantic import Field

from solver_plugins.dropblock import GridBlocks, drop_block_1d, global_minimum, theta_bar_of
from solver_plugins.dropblock.retain import check_divides
from solver_plugins.studies.base import Cell, Context, Results, Study, Table
from solver_plugins.studies.registry import register_study
from solver_plugins.studies.shallow import ShallowConfig, agreement, finite_curves, objective_of, synthetic, train

SAMPLED, DETERMINISTIC = "sampled", "deterministic"


class ConvergenceConfig(ShallowConfig):
    """Settings of Figures 1 and 5."""

    thetas: list[float] = Field([0.5], min_length=1, description="Retain probabilities theta(d) at this width.")
    block_size: int = Field(5, ge=1, description="r.")
    arms: list[str] = Field([SAMPLED, DETERMINISTIC], min_length=1, description="'sampled', 'deterministic' or both.")

    @pydantic.model_validator(mode="after")
    def _fits(self) -> Self:
        check_divides(self.block_size, self.sizes.hidden)
        unknown = sorted(set(self.arms) - {SAMPLED, DETERMINISTIC})
        if unknown:
            raise ValueError(f"expected arms 'sampled' and 'deterministic'; found {unknown[0]!r}")
        wrong = [theta for theta in self.thetas if not 0 < theta < 1]
        if wrong:
            raise ValueError(f"expected every theta, the probability that a unit is kept, in (0, 1); found {wrong[0]}")
        return self


class _Convergence(Study[ConvergenceConfig]):
    tags = ("dropblock", "synthetic")
    Config: ClassVar[Any] = ConvergenceConfig

    def cells(self) -> list[Cell]:
        return [
            Cell(arm, seed, (("theta", theta),))
            for theta in self.config.thetas
            for seed in self.config.seeds
            for arm in self.config.arms
        ]

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        config, theta = self.config, float(cell["theta"])
        problem = synthetic(config.sizes, cell.seed)
        r = config.block_size
        minimum = global_minimum(problem.Y, theta_bar_of(theta, config.sizes.hidden, r), r, problem.X)
        objective = objective_of(problem, GridBlocks(theta, r))

        def predict(X: Any, V: Any, U: Any) -> Any:
            return drop_block_1d(X @ V, theta, r) @ U.mT

        sampling = cell.arm == SAMPLED
        trained = train(problem, config.descent, objective, predict if sampling else None, context)
        final = trained.objective[-1]
        finite = math.isfinite(final)
        return {
            "closed_form": minimum.objective,
            # The closed form is a lower bound; only with so many blocks can it be attained.
            "attainable": r * minimum.fewest_blocks <= config.sizes.hidden,
            "final": final if finite else None,
            "gap": final / minimum.objective - 1 if finite else None,
            **(agreement(trained) if finite else {"sampled_over_deterministic": None, "standard_error": None}),
            "curves": finite_curves(trained),
        }

    def tables(self, results: Results) -> list[Table]:
        rows = []
        for one in results:
            found = one.values
            ratio, error = found["sampled_over_deterministic"], found["standard_error"]
            rows.append((
                f"{one.cell['theta']:g}, {one.cell.arm}, seed {one.cell.seed}",
                f"{found['closed_form']:.6g}" + ("" if found["attainable"] else " (bound)"),
                "diverged" if found["final"] is None else f"{found['final']:.6g}",
                "-" if found["gap"] is None else f"{100 * found['gap']:.3f}%",
                "-" if ratio is None else f"{ratio:.4f} ± {error:.4f}",
                f"{one.seconds:.0f} s",
            ))  # fmt: skip
        sizes = self.config.sizes
        return [
            Table(
                f"{sizes.inputs} → {sizes.hidden} → {sizes.outputs}, {sizes.samples} samples, blocks of "
                f"{self.config.block_size}, {self.config.descent.iterations} steps",
                ("theta, training", "closed form", "trained", "gap", "sampled / deterministic", "time"),
                rows,
                "The paper shows curves, no numbers: they meet the closed form. 'sampled' drops blocks at random, "
                "'deterministic' descends on the expected objective instead. The last ratio compares both objectives "
                "at the same weights along the training and is 1 up to its standard error if Lemma 2.1 holds. (bound): "
                "this width has too few blocks to attain the closed form.",
            )
        ]

    def summary(self, results: Results) -> dict[str, Any]:
        gaps = [gap for gap in results.each("gap") if gap is not None]
        return {"largest_gap": max(gaps, default=None), "smallest_gap": min(gaps, default=None)}

    def draw(self, results: Results) -> Any:
        from solver_plugins.studies.figures import COLOURS, legend, nan_for_none, new_figure

        figure, axes = new_figure(2, len(self.config.thetas), width=5.0)
        for column, theta in enumerate(self.config.thetas):
            top, bottom = axes[0][column], axes[1][column]
            shown = results.of(theta=theta, seed=self.config.seeds[0])
            for one in shown.of(arm=SAMPLED):
                curves = one.values["curves"]
                at = [1 + step for step in curves["iteration"][: len(curves["sampled"])]]
                top.plot(
                    at, nan_for_none(curves["sampled"]), color=COLOURS[5], linewidth=1, label="DropBlock, stochastic"
                )
            for one in shown:
                curves, gap = one.values["curves"], one.values["gap"]
                at = [1 + step for step in curves["iteration"]]
                first = one.cell.arm == SAMPLED
                label = "sampled training" if first else "training without sampling"
                label += ", diverged" if gap is None else f", {100 * gap:.2g}% above at the end"
                style = {"color": COLOURS[0] if first else COLOURS[2], "linestyle": "-" if first else "--"}
                if first:
                    top.plot(at, nan_for_none(curves["objective"]), color=COLOURS[0], label="DropBlock, deterministic")
                bottom.plot(at, nan_for_none(curves["objective"]), label=label, **style)
                minimum = one.values["closed_form"]
            bottom.axhline(minimum, color=COLOURS[1], linestyle=":", linewidth=2, label="global minimum, Theorem 2.7")
            top.set_title(rf"$\theta$ = {theta:g}", fontsize=11)
            for panel in (top, bottom):
                panel.set_yscale("log")
                panel.set_xscale("log")
                panel.set_xlabel("iteration", fontsize=9)
                panel.set_ylabel("objective", fontsize=9)
                legend(panel)
        return figure


@register_study
class DropBlockFig1(_Convergence):
    """Sampled DropBlock against its deterministic objective and the closed-form minimum."""

    name = "dropblock-fig1"
    reference = (
        "Fig. 1 of *On the Regularization Properties of Structured Dropout* (Pal, Lane, Vidal and Haeffele, CVPR 2020)"
    )


@register_study
class DropBlockFig5(_Convergence):
    """Fig. 1 of structured dropout for more retain probabilities."""

    name = "dropblock-fig5"
    reference = (
        "Fig. 5 (appendix E) of *On the Regularization Properties of Structured Dropout* (Pal, Lane, Vidal and "
        "Haeffele, CVPR 2020)"
    )
