"""Accuracy and iterations of a deep equilibrium, by the step alpha of its layers."""

import warnings
from typing import Any

import torch
from pydantic import Field

from solver_plugins.equilibrium import EQUILIBRIUM_SOLVERS
from solver_plugins.errors import NotConvergedWarning
from solver_plugins.integrations.architectures import OptEqNet
from solver_plugins.studies.figures import COLOURS, STYLES, label, legend, name_each, nan_for_none, new_figure
from solver_plugins.studies.opteq_network import ALPHAS, REFERENCE, OptEqConfig, OptEqStudy
from solver_plugins.studies.study import Cell, Context, Results, Table, register_study, shown, spread
from solver_plugins.studies.training import fit, parameters_of, scores
from solver_plugins.train.loop import Hooks, Loop
from solver_plugins.train.tensors import Part

UNROLLED, IMPLICIT = "unrolled", "implicit"
ARMS = (UNROLLED, IMPLICIT)
SOLVERS = ("fixed_point", "anderson")
PAPER = dict(zip(ALPHAS, (58.4, 56.8, 86.9, 87.4, 87.2), strict=True))
"""Table 1a as printed, "no Reg": accuracy on CIFAR-10 by alpha."""


class AlphaConfig(OptEqConfig):
    """Settings of the comparison."""

    tol: float = Field(1e-4, gt=0, description="Relative residual at which iterations are counted after training.")
    limit: int = Field(2000, ge=1, description="Iterations are counted up to here.")
    solved: int = Field(100, ge=1, description="Images of the validation split whose iterations are counted.")


@register_study
class OptEqAlpha(OptEqStudy[AlphaConfig]):
    """Accuracy and iterations of a deep equilibrium against alpha, trained unrolled and implicitly."""

    name = "opteq-alpha"
    reference = f"Table 1a, 'no Reg', {REFERENCE}"
    Config = AlphaConfig

    def prepare(self) -> None:
        super().prepare()
        self._make(UNROLLED, self.config.alphas[0])

    def _make(self, arm: str, alpha: float) -> OptEqNet:
        # "unrolled" is the paper's: K plain iterations, differentiated.
        solver = "fixed_point" if arm == UNROLLED else "anderson"
        return self.config.network.make(self._images, alpha=alpha, solver=solver, gradient=arm)

    def cells(self) -> list[Cell]:
        return Cell.grid(arm=ARMS, alpha=self.config.alphas, seed=self.config.seeds)

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        fitting = self.config.fitting
        train, test = self._normalised(context)
        model = self._make(cell.arm, float(cell["alpha"])).to(context.device)
        trusted = model.equilibrium.solver.config.implicit_tol
        unsettled = 0

        def count(loop: Loop) -> None:
            nonlocal unsettled
            unsettled += cell.arm == IMPLICIT and not float(model.equilibrium.residual) <= trusted

        with warnings.catch_warnings():
            # With small alphas K iterations do not suffice, so the gradient is unrolled; such steps are counted.
            warnings.simplefilter("ignore", NotConvergedWarning)
            hooks = Hooks(after_step=(count,))
            done = fit(model, fitting.batches(train, cell.seed), fitting.settings(), context, hooks=hooks)
            accuracy = None if done.diverged else scores(model, test).accuracy
        return {
            "accuracy": accuracy,
            "last_loss": done.loss,
            "fallbacks": unsettled / done.steps if done.steps else None,
            "training_cpu_seconds": done.cpu_seconds,
            "parameters": parameters_of(model),
            **{f"iterations_{name}": None if done.diverged else self._iterations(model, test, name)
               for name in SOLVERS},
        }  # fmt: skip

    @torch.no_grad()
    def _iterations(self, model: OptEqNet, test: Part, solver: str) -> float:
        """Returns the mean number of evaluations per image, each counted up to the limit."""
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
            rows.append((f"{arm}: accuracy (%)", *(one.spread("accuracy", ".1f") for one in found)))
            for name in SOLVERS:
                counts = (one.spread(f"iterations_{name}", ".1f") for one in found)
                rows.append((f"{arm}: iterations of {name}", *counts))
        steps = [results.of(arm=IMPLICIT, alpha=alpha).each("fallbacks") for alpha in config.alphas]
        shares = (spread([None if x is None else 100 * x for x in one], ".0f") for one in steps)
        rows.append(("implicit: steps that were unrolled (%)", *shares))
        rows.append(("paper: accuracy (%), 'no Reg'", *(shown(PAPER.get(a), ".1f") for a in config.alphas)))
        return [
            Table(
                self._setting(results),
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
            f"{arm}_alpha={alpha:g}_{key}": results.of(arm=arm, alpha=alpha).mean(key)
            for arm in ARMS
            for alpha in self.config.alphas
            for key in ("accuracy", *(f"iterations_{name}" for name in SOLVERS))
        }

    def draw(self, results: Results) -> Any:
        figure, axes = new_figure(1, 2, height=3.4)
        accuracy, iterations = axes[0]
        alphas = sorted(self.config.alphas)
        for index, arm in enumerate(ARMS):
            found = [results.of(arm=arm, alpha=alpha) for alpha in alphas]
            # The arms may coincide, so the first has larger markers.
            style = {"color": COLOURS[index], "marker": "so"[index], "markersize": (8, 4)[index], "fillstyle": "none"}
            for place, one in zip(alphas, found, strict=True):
                values = nan_for_none(one.each("accuracy"))
                accuracy.plot([place] * len(values), values, ".", color=COLOURS[index], alpha=0.4)
            means = nan_for_none([one.mean("accuracy") for one in found])
            accuracy.plot(alphas, means, label=f"trained {arm}", linestyle=STYLES[index], **style)
            for dashes, name in zip(STYLES, SOLVERS, strict=False):
                values = nan_for_none([one.mean(f"iterations_{name}") for one in found])
                iterations.plot(alphas, values, label=f"{name}, trained {arm}", linestyle=dashes, **style)
        both = sorted(set(alphas) & set(PAPER))
        if both:
            accuracy.plot(both, [PAPER[alpha] for alpha in both], color="#888888", linestyle=":", marker="s",
                          markersize=4, label="paper (CIFAR-10, unrolled)")  # fmt: skip
        label(accuracy, r"$\alpha$", "accuracy (%)")
        label(iterations, r"$\alpha$", f"iterations to {self.config.tol:g}", log="y")
        for panel in axes[0]:
            name_each(panel, alphas)
            legend(panel)
        return figure
