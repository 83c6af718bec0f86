"""Accuracy and iterations of a deep equilibrium, by the step of its layers; and the network of the OptEq studies."""

import warnings
from typing import Any, Literal, TypeVar

import pydantic
import torch
from pydantic import Field

from solver_plugins.config import StrictConfig
from solver_plugins.equilibrium import EQUILIBRIUM_SOLVERS
from solver_plugins.errors import NotConvergedWarning
from solver_plugins.integrations.architectures import OptEqNet
from solver_plugins.studies.figures import draw_by, legend, new_figure
from solver_plugins.studies.images import ImageConfig, Images, ImageStudy
from solver_plugins.studies.study import Cell, Context, Results, Table, register_study, shown, spread
from solver_plugins.studies.training import Fitting, fit, parameters_of, scores
from solver_plugins.train.loop import Hooks, Loop
from solver_plugins.train.tensors import Part

REFERENCE = "of *Optimization Induced Equilibrium Networks* (Xie et al., 2021)"
ALPHAS = (0.01, 0.1, 0.4, 0.8, 1.0)
"""Those of the paper's tables."""


class OptEqNetwork(StrictConfig):
    """Widths of the network. Section 5.1 gives ``hidden`` and 199k parameters; with the other widths it has 198k."""

    hidden: list[int] = Field([16, 32, 64, 128, 128], min_length=1, description="Hidden channels of the layers.")
    state: int = Field(48, ge=1, description="Channels of the equilibrium.")
    extracted: int = Field(96, ge=1, description="Channels of the convolution in front.")
    stride: int = Field(1, ge=1, description="Of the convolution in front.")
    constraint: Literal["aol", "none"] = Field("aol", description="How |W| stays bounded: 'none' is the paper's.")
    norm: float = Field(0.9, gt=0, le=1, description="Bound on |W|.")
    iters: int = Field(20, ge=1, description="K, the evaluations of the map.")

    def make(self, images: Images, **options: Any) -> OptEqNet:
        own = {**self.model_dump(), "hidden": tuple(self.hidden), **options}
        return OptEqNet(images.classes, images.shape[0], **own)


class OptEqConfig(ImageConfig):
    """Settings of a study that trains the network."""

    network: OptEqNetwork = OptEqNetwork()
    fitting: Fitting = Fitting()
    alphas: list[float] = Field(list(ALPHAS), min_length=1, description="Steps of the layers, in (0, 1].")

    @pydantic.field_validator("alphas")
    @classmethod
    def _steps(cls, alphas: list[float]) -> list[float]:
        if min(alphas) <= 0 or max(alphas) > 1:
            raise ValueError("expected alphas above 0 and at most 1")
        return alphas


C = TypeVar("C", bound=OptEqConfig)


class OptEqStudy(ImageStudy[C]):
    """A study that trains the network on images."""

    tags = ("opteq", "images")

    def _setting(self, results: Results) -> str:
        config = self.config
        return (
            f"{len(self._images.train)} images of {config.data.name!r}, hidden channels "
            f"{'-'.join(map(str, config.network.hidden))}, {results[0].values['parameters']} parameters, "
            f"K = {config.network.iters}, {config.fitting.epochs} epochs"
        )


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

    def draw(self, results: Results) -> Any:
        figure, axes = new_figure(1, 2, height=3.4)
        accuracy, iterations = axes[0]
        alphas = sorted(self.config.alphas)

        def each(arm: str, key: str) -> list[list[float | None]]:
            return [results.of(arm=arm, alpha=alpha).each(key) for alpha in alphas]

        printed = {"paper (CIFAR-10, unrolled)": [[PAPER.get(alpha)] for alpha in alphas]}
        found = {f"trained {arm}": each(arm, "accuracy") for arm in ARMS}
        draw_by(accuracy, alphas, found | printed, r"$\alpha$", "accuracy (%)")
        found = {f"{name}, trained {arm}": each(arm, f"iterations_{name}") for arm in ARMS for name in SOLVERS}
        draw_by(iterations, alphas, found, r"$\alpha$", f"iterations to {self.config.tol:g}", log="y")
        for panel in axes[0]:
            legend(panel)
        return figure
