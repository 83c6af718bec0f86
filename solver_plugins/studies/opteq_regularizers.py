"""Tables 1a and 3 of the OptEq paper: feature regularisers, chosen by SAM or appended, by alpha and by weight."""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import pydantic
from pydantic import Field

from solver_plugins.equilibrium import FEATURE_REGULARIZERS
from solver_plugins.integrations.architectures import OptEqNet
from solver_plugins.studies.base import Cell, Context, Results, Study, StudyConfig, Table
from solver_plugins.studies.fitting import Fitting, fit, mean, normalised, spread
from solver_plugins.studies.images import ImageData, Images
from solver_plugins.studies.networks import evaluate
from solver_plugins.studies.opteq_network import OptEqNetwork, equilibria, parameters_of
from solver_plugins.studies.registry import register_study

NONE, SAM, APPENDED, WEIGHED = "none", "sam", "appended", "weighed"
_ALPHAS = (0.01, 0.1, 0.4, 0.8, 1.0)
_PRINTED = {
    NONE: (58.4, 56.8, 86.9, 87.4, 87.2),
    "sam half_squared": (69.4, 61.9, 87.3, 87.3, 87.4),
    "sam inverse_norm": (75.0, 63.2, 78.4, 87.3, 87.0),
    "sam decorrelation": (72.7, 61.5, 86.5, 87.0, 87.7),
    "appended inverse_norm": (64.9, 64.7, 87.7, 87.5, 87.6),
    "appended decorrelation": (72.6, 60.0, 88.0, 87.6, 87.5),
}
PAPER = {arm: dict(zip(_ALPHAS, values, strict=True)) for arm, values in _PRINTED.items()}
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


class RegularizersConfig(StudyConfig):
    """Settings of both tables."""

    data: ImageData = ImageData()
    network: OptEqNetwork = OptEqNetwork()
    fitting: Fitting = Fitting()
    alphas: list[float] = Field(list(_ALPHAS), min_length=1, description="Steps of the first table, in (0, 1].")
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
        given = [
            *self.chosen.values(),
            *self.appended.values(),
            *(one for some in self.weights.values() for one in some),
        ]
        if min(self.alphas) <= 0 or max(self.alphas) > 1 or min(given, default=0) < 0:
            raise ValueError("expected alphas above 0 and at most 1, and weights of 0 or more")
        return self


@dataclass(frozen=True)
class _Arm:
    """One column of the first table, or one regulariser of the second."""

    how: str
    regularizer: str = ""

    @property
    def name(self) -> str:
        return f"{self.how} {self.regularizer}".strip()


@register_study
class OptEqRegularizers(Study[RegularizersConfig]):
    """Accuracy of a deep equilibrium with feature regularisers, chosen by SAM or appended."""

    name = "opteq-regularizers"
    tags = ("opteq", "images")
    reference = "Tables 1a and 3 of *Optimization Induced Equilibrium Networks* (Xie et al., 2021)"
    Config: ClassVar[Any] = RegularizersConfig
    _images: Images

    def prepare(self) -> None:
        self._images = self.config.data.load()
        self._make(self.cells()[0])

    def _arms(self) -> list[_Arm]:
        """Returns the columns of the first table."""
        config = self.config
        return [_Arm(NONE), *(_Arm(SAM, name) for name in config.chosen), *(_Arm(APPENDED, n) for n in config.appended)]

    def cells(self) -> list[Cell]:
        config = self.config
        lams = {_Arm(SAM, name).name: lam for name, lam in config.chosen.items()}
        lams |= {_Arm(APPENDED, name).name: lam for name, lam in config.appended.items()}
        pairs = [
            (arm.name, (("alpha", alpha), ("lam", lams.get(arm.name, 0.0))))
            for arm in self._arms()
            for alpha in config.alphas
        ]
        pairs += [
            (_Arm(WEIGHED, name).name, (("alpha", config.alpha_of_weights), ("lam", lam)))
            for name, found in config.weights.items()
            for lam in found
        ]
        return [Cell(arm, seed, setting) for arm, setting in pairs for seed in config.seeds]

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
        known = self._images.train
        train, test = (normalised(part, known, context.device) for part in (known, self._images.validation))
        model = self._make(cell).to(context.device)
        done = fit(model, train, self.config.fitting, cell.seed, context.steps(self.config.fitting.epochs))
        values: dict[str, Any] = {"last_loss": done.loss, "parameters": parameters_of(model)}
        values["training_cpu_seconds"] = done.cpu_seconds
        if done.loss is None:
            return {**values, "accuracy": None, "mean_absolute": None, "mean_square": None}
        z = equilibria(model, test)
        return {
            **values,
            "accuracy": evaluate(model, test)[1],
            "mean_absolute": float(z.abs().mean()),
            "mean_square": float(z.square().mean()),
        }

    def tables(self, results: Results) -> list[Table]:
        config = self.config
        rows: list[tuple[str, ...]] = []
        for arm in self._arms():
            lam = {SAM: config.chosen, APPENDED: config.appended}.get(arm.how, {}).get(arm.regularizer)
            label = arm.name if lam is None else f"{arm.name}, lam {lam:g}"
            rows.append((label, *(spread(results.of(arm=arm.name, alpha=a).each("accuracy"), ".1f")
                                  for a in config.alphas)))  # fmt: skip
            if arm.name in PAPER:
                printed = (PAPER[arm.name].get(alpha) for alpha in config.alphas)
                rows.append((f"{arm.name}, paper", *("" if one is None else f"{one:.1f}" for one in printed)))
        weighed: list[tuple[str, ...]] = []
        for name, weights in config.weights.items():
            for lam in weights:
                found = results.of(arm=_Arm(WEIGHED, name).name, lam=lam)
                size, accuracy = PAPER_WEIGHTS.get(name, {}).get(lam, ("", None))
                weighed.append(
                    (f"{name}, lam {lam:g}", spread(found.each("mean_absolute"), ".2g"),
                     spread(found.each("mean_square"), ".2g"), spread(found.each("accuracy"), ".1f"), size,
                     "" if accuracy is None else f"{accuracy:.1f}")
                )  # fmt: skip
        setting = (
            f"{len(self._images.train)} images of {config.data.name!r}, hidden channels "
            f"{'-'.join(map(str, config.network.hidden))}, {results[0].values['parameters']} parameters, K = "
            f"{config.network.iters}, {config.fitting.epochs} epochs, seeds {config.seeds}, "
            f"{len(self._images.validation)} images of {config.data.validation!r}, after the last epoch"
        )
        tables = [
            Table(
                "Accuracy (%) by alpha (Table 3)",
                ("alpha", *(f"{alpha:g}" for alpha in config.alphas)),
                rows,
                f"Ours: {setting}. Paper: CIFAR-10, 199k parameters, 200 epochs; its weights lam are not given.",
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

    def summary(self, results: Results) -> dict[str, Any]:
        first = {
            f"{arm.name}_alpha={alpha:g}_accuracy": mean(results.of(arm=arm.name, alpha=alpha).each("accuracy"))
            for arm in self._arms()
            for alpha in self.config.alphas
        }
        second = {
            f"{name}_lam={lam:g}_{key}": mean(results.of(arm=_Arm(WEIGHED, name).name, lam=lam).each(key))
            for name, weights in self.config.weights.items()
            for lam in weights
            for key in ("accuracy", "mean_absolute", "mean_square")
        }
        return {**first, **second}

    def draw(self, results: Results) -> Any:
        from solver_plugins.studies.figures import COLOURS, STYLES, legend, nan_for_none, new_figure

        config = self.config
        figure, axes = new_figure(1, 3, width=4.6, height=3.6)
        ours, printed, sizes = axes[0]
        for index, arm in enumerate(self._arms()):
            look = {"color": COLOURS[index % len(COLOURS)], "linestyle": STYLES[index % len(STYLES)], "marker": "o",
                    "markersize": 4, "label": arm.name}  # fmt: skip
            alphas = sorted(config.alphas)
            found = [mean(results.of(arm=arm.name, alpha=alpha).each("accuracy")) for alpha in alphas]
            ours.plot(alphas, nan_for_none(found), **look)
            if arm.name in PAPER:
                printed.plot(list(PAPER[arm.name]), list(PAPER[arm.name].values()), **look)
        for panel, title, ticks in ((ours, "this run", sorted(config.alphas)), (printed, "paper, CIFAR-10", _ALPHAS)):
            panel.set_xscale("log")
            panel.set_xticks(ticks, [f"{alpha:g}" for alpha in ticks])
            panel.set_xticks([], minor=True)
            panel.set_xlabel(r"$\alpha$", fontsize=9)
            panel.set_ylabel("accuracy (%)", fontsize=9)
            panel.set_title(title, fontsize=11)
        legend(printed)
        for index, (name, weights) in enumerate(config.weights.items()):
            there = sorted(weights)
            found = [mean(results.of(arm=_Arm(WEIGHED, name).name, lam=lam).each("mean_absolute")) for lam in there]
            sizes.plot(there, nan_for_none(found), label=name, marker="o", markersize=4, linestyle=STYLES[index],
                       color=COLOURS[index])  # fmt: skip
        sizes.set_title(rf"appended, $\alpha$ = {config.alpha_of_weights:g}", fontsize=11)
        sizes.set_xlabel(r"weight $\lambda$", fontsize=9)
        sizes.set_ylabel("mean |z|", fontsize=9)
        if config.weights:
            sizes.set_xscale("log")
            sizes.set_yscale("log")
            legend(sizes)
        return figure
