"""Accuracy of a deep equilibrium, and iterations to it, against the step alpha of its layers."""

import warnings
from typing import Any, ClassVar, Self

import pydantic
import torch
from pydantic import Field

from solver_plugins.equilibrium import EQUILIBRIUM_SOLVERS
from solver_plugins.errors import NotConvergedWarning
from solver_plugins.integrations.architectures import OptEqNet
from solver_plugins.studies.base import Cell, Context, Results, Study, StudyConfig, Table
from solver_plugins.studies.fitting import Fitting, fit, mean, normalised, spread
from solver_plugins.studies.images import ImageData, Images, Part
from solver_plugins.studies.networks import evaluate
from solver_plugins.studies.opteq_network import OptEqNetwork, parameters_of
from solver_plugins.studies.registry import register_study

UNROLLED, IMPLICIT = "unrolled", "implicit"
ARMS = (UNROLLED, IMPLICIT)
SOLVERS = ("fixed_point", "anderson")
PAPER = {0.01: 58.4, 0.1: 56.8, 0.4: 86.9, 0.8: 87.4, 1.0: 87.2}
"""Table 1a as printed, "no Reg": accuracy on CIFAR-10 by alpha."""


class AlphaConfig(StudyConfig):
    """Settings of the comparison."""

    data: ImageData = ImageData()
    network: OptEqNetwork = OptEqNetwork()
    fitting: Fitting = Fitting()
    alphas: list[float] = Field(list(PAPER), min_length=1, description="Steps, in (0, 1].")
    tol: float = Field(1e-4, gt=0, description="Relative residual at which iterations are counted after training.")
    limit: int = Field(2000, ge=1, description="Iterations are counted up to here.")
    solved: int = Field(100, ge=1, description="Images of the validation split whose iterations are counted.")

    @pydantic.model_validator(mode="after")
    def _steps(self) -> Self:
        if min(self.alphas) <= 0 or max(self.alphas) > 1:
            raise ValueError("expected alphas above 0 and at most 1")
        return self


@register_study
class OptEqAlpha(Study[AlphaConfig]):
    """Accuracy and iterations of a deep equilibrium against alpha, trained unrolled and implicitly."""

    name = "opteq-alpha"
    tags = ("opteq", "images")
    reference = "Table 1a, 'no Reg', of *Optimization Induced Equilibrium Networks* (Xie et al., 2021)"
    Config: ClassVar[Any] = AlphaConfig
    _images: Images

    def prepare(self) -> None:
        self._images = self.config.data.load()
        self._make(UNROLLED, self.config.alphas[0])

    def _make(self, arm: str, alpha: float) -> OptEqNet:
        # "unrolled" is the paper's: K plain iterations, differentiated.
        solver = "fixed_point" if arm == UNROLLED else "anderson"
        return self.config.network.make(self._images, alpha=alpha, solver=solver, gradient=arm)

    def cells(self) -> list[Cell]:
        return [
            Cell(arm, seed, (("alpha", alpha),))
            for arm in ARMS
            for alpha in self.config.alphas
            for seed in self.config.seeds
        ]

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        known = self._images.train
        train, test = (normalised(part, known, context.device) for part in (known, self._images.validation))
        model = self._make(cell.arm, float(cell["alpha"])).to(context.device)
        trusted = model.equilibrium.solver.config.implicit_tol
        unsettled = 0

        def count() -> None:
            nonlocal unsettled
            unsettled += cell.arm == IMPLICIT and not float(model.equilibrium.residual) <= trusted

        with warnings.catch_warnings():
            # Small alphas need more than K iterations; the gradient is unrolled then. It is counted instead.
            warnings.simplefilter("ignore", NotConvergedWarning)
            done = fit(
                model, train, self.config.fitting, cell.seed, context.steps(self.config.fitting.epochs), after=count
            )
            accuracy = None if done.loss is None else evaluate(model, test)[1]
        return {
            "accuracy": accuracy,
            "last_loss": done.loss,
            "fallbacks": unsettled / done.steps if done.steps else None,
            "training_cpu_seconds": done.cpu_seconds,
            "parameters": parameters_of(model),
            **{f"iterations_{name}": None if done.loss is None else self._iterations(model, test, name)
               for name in SOLVERS},
        }  # fmt: skip

    @torch.no_grad()
    def _iterations(self, model: OptEqNet, test: Part, solver: str) -> float:
        """Returns the mean number of evaluations per image; those that need more than the limit count as the limit."""
        config = self.config
        model.eval()
        before = model.equilibrium.solver
        model.equilibrium.solver = EQUILIBRIUM_SOLVERS.get(solver).from_options(
            iters=config.limit, tol=config.tol, implicit_tol=1e6
        )
        try:
            found = model.equilibrium.solve(model.bn1(model.conv1(test.images[: config.solved])))
        finally:
            model.equilibrium.solver = before
        return float(found.iterations.double().mean())

    def tables(self, results: Results) -> list[Table]:
        config = self.config
        rows: list[tuple[str, ...]] = []
        for arm in ARMS:
            found = [results.of(arm=arm, alpha=alpha) for alpha in config.alphas]
            rows.append((f"{arm}: accuracy (%)", *(spread(one.each("accuracy"), ".1f") for one in found)))
            for name in SOLVERS:
                rows.append((f"{arm}: iterations of {name}",
                             *(spread(one.each(f"iterations_{name}"), ".1f") for one in found)))  # fmt: skip
        steps = [results.of(arm=IMPLICIT, alpha=alpha) for alpha in config.alphas]
        rows.append(
            ("implicit: steps that were unrolled (%)",
             *(spread([None if x is None else 100 * x for x in one.each("fallbacks")], ".0f") for one in steps))
        )  # fmt: skip
        rows.append(
            ("paper: accuracy (%), 'no Reg'", *(f"{PAPER[a]:.1f}" if a in PAPER else "" for a in config.alphas))
        )
        return [
            Table(
                f"{len(self._images.train)} images of {config.data.name!r}, hidden channels "
                f"{'-'.join(map(str, config.network.hidden))}, {results[0].values['parameters']} parameters, "
                f"K = {config.network.iters}, {config.fitting.epochs} epochs",
                ("alpha", *(f"{alpha:g}" for alpha in config.alphas)),
                rows,
                f"Mean ± standard deviation over seeds {config.seeds}, on {len(self._images.validation)} images of "
                f"{config.data.validation!r}, after the last epoch. Iterations: of the trained network, to a relative "
                f"residual of {config.tol:g}, at most {config.limit}, mean of "
                f"{min(config.solved, len(self._images.validation))} images. Paper: CIFAR-10, 199k parameters, "
                "200 epochs, unrolled.",
            )
        ]

    def summary(self, results: Results) -> dict[str, Any]:
        return {
            f"{arm}_alpha={alpha:g}_{key}": mean(results.of(arm=arm, alpha=alpha).each(key))
            for arm in ARMS
            for alpha in self.config.alphas
            for key in ("accuracy", *(f"iterations_{name}" for name in SOLVERS))
        }

    def draw(self, results: Results) -> Any:
        from solver_plugins.studies.figures import COLOURS, STYLES, legend, nan_for_none, new_figure

        figure, axes = new_figure(1, 2, height=3.4)
        accuracy, iterations = axes[0]
        alphas = sorted(self.config.alphas)
        for index, arm in enumerate(ARMS):
            found = [results.of(arm=arm, alpha=alpha) for alpha in alphas]
            # Arms may agree: the first is drawn around the second.
            look = {"color": COLOURS[index], "marker": "so"[index], "markersize": (8, 4)[index], "fillstyle": "none"}
            for place, one in zip(alphas, found, strict=True):
                values = nan_for_none(one.each("accuracy"))
                accuracy.plot([place] * len(values), values, ".", color=COLOURS[index], alpha=0.4)
            accuracy.plot(alphas, nan_for_none([mean(one.each("accuracy")) for one in found]), label=f"trained {arm}",
                          linestyle=STYLES[index], **look)  # fmt: skip
            for style, name in zip(STYLES, SOLVERS, strict=False):
                values = nan_for_none([mean(one.each(f"iterations_{name}")) for one in found])
                iterations.plot(alphas, values, label=f"{name}, trained {arm}", linestyle=style, **look)
        shown = sorted(set(alphas) & set(PAPER))
        if shown:
            accuracy.plot(shown, [PAPER[alpha] for alpha in shown], color="#888888", linestyle=":", marker="s",
                          markersize=4, label="paper (CIFAR-10, unrolled)")  # fmt: skip
        iterations.set_yscale("log")
        for panel, label in ((accuracy, "accuracy (%)"), (iterations, f"iterations to {self.config.tol:g}")):
            panel.set_xscale("log")
            panel.set_xticks(alphas, [f"{alpha:g}" for alpha in alphas])
            panel.set_xticks([], minor=True)
            panel.set_xlabel(r"$\alpha$", fontsize=9)
            panel.set_ylabel(label, fontsize=9)
            legend(panel)
        return figure
