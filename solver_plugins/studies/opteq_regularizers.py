"""Tables 1a and 3 of the OptEq paper: feature regularisers, chosen by SAM or appended, by alpha and by weight."""

from typing import Any, Self

import pydantic
from pydantic import Field

from solver_plugins.equilibrium import FEATURE_REGULARIZERS
from solver_plugins.integrations.architectures import OptEqNet
from solver_plugins.studies.figures import draw_by, label, legend, new_figure
from solver_plugins.studies.opteq_alpha import ALPHAS, REFERENCE, OptEqConfig, OptEqStudy
from solver_plugins.studies.study import Cell, Context, Results, Table, register_study, shown
from solver_plugins.studies.training import collected, fit, parameters_of, scores

NONE, SAM, APPENDED, WEIGHED = "none", "sam", "appended", "weighed"
_PRINTED = {
    NONE: (58.4, 56.8, 86.9, 87.4, 87.2),
    "sam half_squared": (69.4, 61.9, 87.3, 87.3, 87.4),
    "sam inverse_norm": (75.0, 63.2, 78.4, 87.3, 87.0),
    "sam decorrelation": (72.7, 61.5, 86.5, 87.0, 87.7),
    "appended inverse_norm": (64.9, 64.7, 87.7, 87.5, 87.6),
    "appended decorrelation": (72.6, 60.0, 88.0, 87.6, 87.5),
}
PAPER = {arm: dict(zip(ALPHAS, values, strict=True)) for arm, values in _PRINTED.items()}
"""Table 3 as printed: accuracy on CIFAR-10 by regulariser and alpha.

Table 1a has other ones for appended decorrelation: 86.0 at 0.4 and 88.0 at 1.
"""
PAPER_WEIGHTS: dict[str, dict[float, tuple[str, float | None]]] = {
    # The first accuracy of l1 is not legible.
    "l1": {0.01: ("> 5", None), 0.15: ("0.81", 87.7), 0.5: ("0.34", 86.9)},
    # The paper's is lam |z|^2, twice half_squared.
    "half_squared": {0.02: ("> 10", 87.3), 2.0: ("1.56", 87.6), 20.0: ("0.82", 86.7)},
}
"""Table 1a as printed: the mean of |z| or |z|^2 and the accuracy, by the weight of what is appended."""


class RegularizersConfig(OptEqConfig):
    """Settings of both tables."""

    chosen: dict[str, float] = Field(
        {"half_squared": 1.0, "inverse_norm": 1.0, "decorrelation": 1.0},
        description="Regularisers of SAM (section 4.2), and their weights, which the paper does not give.",
    )
    appended: dict[str, float] = Field(
        {"inverse_norm": 0.1, "decorrelation": 0.1},
        description="Regularisers behind the layers (section 4.1), and their weights, which the paper does not give.",
    )
    weights: dict[str, list[float]] = Field(
        {name: list(found) for name, found in PAPER_WEIGHTS.items()},
        description="Regularisers behind the layers, and the weights to compare.",
    )
    alpha_of_weights: float = Field(0.8, gt=0, le=1, description="Step of the second table; not in the paper.")

    @pydantic.model_validator(mode="after")
    def _known(self) -> Self:
        for name in (*self.chosen, *self.appended, *self.weights):
            FEATURE_REGULARIZERS.get(name)
        given = [*self.chosen.values(), *self.appended.values(), *(lam for one in self.weights.values() for lam in one)]
        if min(given, default=0) < 0:
            raise ValueError("expected weights of 0 or more")
        return self


@register_study
class OptEqRegularizers(OptEqStudy[RegularizersConfig]):
    """Accuracy of a deep equilibrium with feature regularisers, chosen by SAM or appended."""

    name = "opteq-regularizers"
    reference = f"Tables 1a and 3 {REFERENCE}"
    Config = RegularizersConfig

    def prepare(self) -> None:
        super().prepare()
        self._make(self.cells()[0])

    def _arms(self) -> dict[str, float | None]:
        """Returns the runs of the first table, and the weights of their regularisers."""
        chosen = {f"{SAM} {name}": lam for name, lam in self.config.chosen.items()}
        appended = {f"{APPENDED} {name}": lam for name, lam in self.config.appended.items()}
        return {NONE: None, **chosen, **appended}

    def _weighed(self) -> list[tuple[str, float]]:
        return [(name, lam) for name, found in self.config.weights.items() for lam in found]

    def cells(self) -> list[Cell]:
        config = self.config
        settings = [(arm, alpha, lam or 0.0) for arm, lam in self._arms().items() for alpha in config.alphas]
        settings += [(f"{WEIGHED} {name}", config.alpha_of_weights, lam) for name, lam in self._weighed()]
        return [
            Cell(arm, seed, (("alpha", alpha), ("lam", lam))) for arm, alpha, lam in settings for seed in config.seeds
        ]

    def _make(self, cell: Cell) -> OptEqNet:
        how, _, regularizer = cell.arm.partition(" ")
        return self.config.network.make(
            self._images,
            alpha=float(cell["alpha"]),
            lam=float(cell["lam"]),
            # Without a regulariser, SAM is plain iteration (the paper's beta = 0).
            solver="sam" if how == SAM else "fixed_point",
            gradient="unrolled",
            regularizer=regularizer or None,
        )

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        fitting = self.config.fitting
        train, test = self._normalised(context)
        model = self._make(cell).to(context.device)
        done = fit(model, fitting.batches(train, cell.seed), fitting.settings(), context)
        values: dict[str, Any] = {"last_loss": done.loss, "parameters": parameters_of(model)}
        values["training_cpu_seconds"] = done.cpu_seconds
        if done.diverged:
            return {**values, "accuracy": None, "mean_absolute": None, "mean_square": None}
        z = collected(model, test, model.forward_features)
        return {
            **values,
            "accuracy": scores(model, test).accuracy,
            "mean_absolute": float(z.abs().mean()),
            "mean_square": float(z.square().mean()),
        }

    def tables(self, results: Results) -> list[Table]:
        config = self.config
        rows: list[tuple[str, ...]] = []
        for arm, lam in self._arms().items():
            found = (results.of(arm=arm, alpha=alpha) for alpha in config.alphas)
            name = arm if lam is None else f"{arm}, lam {lam:g}"
            rows.append((name, *(one.spread("accuracy", ".1f") for one in found)))
            if arm in PAPER:
                printed = (PAPER[arm].get(alpha) for alpha in config.alphas)
                rows.append((f"{arm}, paper", *(shown(one, ".1f") for one in printed)))
        weighed: list[tuple[str, ...]] = []
        for name, lam in self._weighed():
            of = results.of(arm=f"{WEIGHED} {name}", lam=lam)
            size, accuracy = PAPER_WEIGHTS.get(name, {}).get(lam, ("", None))
            ours = (of.spread("mean_absolute", ".2g"), of.spread("mean_square", ".2g"), of.spread("accuracy", ".1f"))
            weighed.append((f"{name}, lam {lam:g}", *ours, size, shown(accuracy, ".1f")))
        tables = [
            Table(
                "Accuracy (%) by alpha (Table 3)",
                ("alpha", *(f"{alpha:g}" for alpha in config.alphas)),
                rows,
                f"Ours: {self._setting(results)}, seeds {config.seeds}, {len(self._images.validation)} images of "
                f"{config.data.validation!r}, after the last epoch. Paper: CIFAR-10, 199k parameters, 200 epochs; its "
                "weights lam are not given.",
            )
        ]
        if weighed:
            tables.append(
                Table(
                    f"What is appended, by its weight, at alpha {config.alpha_of_weights:g} (Table 1a)",
                    ("", "mean abs(z)", "mean z^2", "accuracy (%)", "paper: mean", "paper: accuracy (%)"),
                    weighed,
                    "Means over the whole feature tensor of the evaluation split. The paper's mean is that of its own "
                    "norm. Its lam of the squared norm is half of ours, which multiplies half the square.",
                )
            )
        return tables

    def draw(self, results: Results) -> Any:
        config = self.config
        figure, axes = new_figure(1, 3, width=4.6, height=3.6)
        ours, printed, sizes = axes[0]
        alphas = sorted(config.alphas)
        found = {arm: [results.of(arm=arm, alpha=alpha).each("accuracy") for alpha in alphas] for arm in self._arms()}
        draw_by(ours, alphas, found, r"$\alpha$", "accuracy (%)")
        paper = {arm: [[PAPER.get(arm, {}).get(alpha)] for alpha in ALPHAS] for arm in self._arms()}
        draw_by(printed, ALPHAS, paper, r"$\alpha$", "accuracy (%)")
        lams = sorted({lam for _, lam in self._weighed()})
        found = {
            name: [results.of(arm=f"{WEIGHED} {name}", lam=lam).each("mean_absolute") for lam in lams]
            for name in config.weights
        }
        if lams:
            draw_by(sizes, lams, found, r"weight $\lambda$", "mean |z|", log="y")
        for panel, title in ((ours, "this run"), (printed, "paper, CIFAR-10")):
            label(panel, title=title)
        label(sizes, title=rf"appended, $\alpha$ = {config.alpha_of_weights:g}")
        legend(printed)
        if lams:
            legend(sizes)
        return figure
