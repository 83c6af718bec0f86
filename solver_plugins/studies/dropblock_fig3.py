"""Figures 3 and 6 of the structured dropout paper: when DropConnect is dropout, and when it is not.

Theorem 4.1 holds where ``X^T X`` is diagonal. Standard normal inputs, the paper's, come close; correlated ones do not.
"""

import math
from typing import Any, Literal, Self

import pydantic
import torch
from pydantic import Field
from torch import Tensor

from solver_plugins.dropblock import Dropout, drop_block_1d, drop_connect_linear, dropconnect_omega, omega
from solver_plugins.studies import dropblock_shallow as shallow
from solver_plugins.studies.study import Cell, Context, Measured, Results, Table, register_study

DROPCONNECT, DROPOUT = "dropconnect", "dropout"


class DropConnectConfig(shallow.ShallowConfig):
    """Settings of Figures 3 and 6."""

    thetas: shallow.Thetas = Field([0.5], min_length=1, description="Probabilities that a weight, or a unit, is kept.")
    inputs: list[Literal["normal", "white", "correlated"]] = Field(
        ["normal", "white", "correlated"],
        min_length=1,
        description="'normal' (the paper's), 'white' (X^T X is diagonal), or 'correlated'.",
    )
    correlation: float = Field(0.9, gt=0, lt=1, description="Between neighbours, of 'correlated' inputs.")

    @pydantic.model_validator(mode="after")
    def _fits(self) -> Self:
        if "white" in self.inputs and self.sizes.samples < self.sizes.inputs:
            raise ValueError("white inputs need at least as many samples as inputs")
        return self


class _Comparison(shallow.ShallowStudy[DropConnectConfig]):
    Config = DropConnectConfig
    heading = "inputs, theta, training"

    def cells(self) -> list[Cell]:
        config = self.config
        return Cell.grid(inputs=config.inputs, theta=config.thetas, seed=config.seeds, arm=(DROPCONNECT, DROPOUT))

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        config, theta, kind = self.config, float(cell["theta"]), str(cell["inputs"])
        problem = shallow.synthetic(config.sizes, cell.seed, lambda X: shaped(X, kind, config.correlation))
        # Dropout is DropBlock with blocks of one.
        minimum = problem.minimum(theta, 1)
        objective, predict = _connect(problem, theta) if cell.arm == DROPCONNECT else _units(problem, theta)
        trained = shallow.train(problem, config.descent, objective, predict, context)
        found = trained.values()
        final = found["final"]
        return {
            "dropout_minimum": minimum.objective,
            "over_dropout_minimum": None if final is None else final / minimum.objective,
            # The ratio of both regularisers at the same weights, which is one where Theorem 4.1 holds.
            "ratio_at_first": ratio(problem, problem.U, problem.V, theta),
            "ratio_at_last": None if final is None else ratio(problem, trained.U, trained.V, theta),
            **found,
        }

    def row_name(self, one: Measured) -> str:
        return f"{one.cell['inputs']}, {one.cell['theta']:g}, {one.cell.arm}"

    def tables(self, results: Results) -> list[Table]:
        return self.cell_table(
            results,
            "DropConnect against dropout",
            {
                "objective at the end": shallow.FINAL,
                "/ dropout's minimum": shallow.value("over_dropout_minimum", ".4f"),
                "Omega ratio": shallow.value("ratio_at_last", ".4f"),
                "sampled / deterministic": shallow.agreement,
            },
            "The paper shows curves for normal inputs, no numbers: they agree. 'Omega ratio' is the regulariser of "
            "DropConnect over that of dropout at the last weights; Theorem 4.1 says 1, which holds where X^T X is "
            "diagonal ('white').",
        )

    def summary(self, results: Results) -> dict[str, Any]:
        """Returns for each kind of inputs how far the final ratio of the regularisers is from one, at most."""
        ratios = {kind: results.of(inputs=kind).known("ratio_at_last") for kind in self.config.inputs}
        return {
            f"largest_difference_{kind}": max((abs(one - 1) for one in found), default=None)
            for kind, found in ratios.items()
        }

    def draw(self, results: Results) -> Any:
        names = {DROPCONNECT: "DropConnect", DROPOUT: "Dropout"}
        columns = [
            shallow.Panels(
                rf"{kind} inputs, $\theta$ = {theta:g}",
                results.of(inputs=kind, theta=theta, seed=self.config.seeds[0]),
                (DROPCONNECT, names[DROPCONNECT]),
                names,
            )
            for kind in self.config.inputs
            for theta in self.config.thetas
        ]
        return shallow.draw_panels(columns, 4.2)


def shaped(X: Tensor, kind: str, correlation: float) -> Tensor:
    """Turns standard normal inputs into inputs of another kind."""
    if kind == "white":
        return torch.linalg.qr(X).Q * math.sqrt(len(X))
    if kind == "correlated":
        place = torch.arange(X.shape[1], dtype=X.dtype)
        covariance = correlation ** (place[:, None] - place).abs()
        return X @ torch.linalg.cholesky(covariance).mT
    return X


def _connect(problem: shallow.Synthetic, theta: float) -> tuple[shallow.Objective, shallow.Predict]:
    small = problem.compressed()

    def objective(U: Tensor, V: Tensor) -> Tensor:
        X, Y = small.X.to(U), small.Y.to(U)
        return (Y - X @ V @ U.mT).square().sum() + dropconnect_omega(U, V.mT, X, theta)

    return objective, lambda X, V, U: drop_connect_linear(X, V.mT, theta=theta) @ U.mT


def _units(problem: shallow.Synthetic, theta: float) -> tuple[shallow.Objective, shallow.Predict]:
    return shallow.objective_of(problem, Dropout(theta)), lambda X, V, U: drop_block_1d(X @ V, theta, 1) @ U.mT


def ratio(problem: shallow.Synthetic, U: Tensor, V: Tensor, theta: float) -> float:
    """Returns the regulariser of DropConnect over that of dropout, with the same weights."""
    odds = torch.full((U.shape[1],), (1 - theta) / theta, dtype=U.dtype)
    X = problem.compressed().X
    return float(dropconnect_omega(U, V.mT, X, theta) / omega(U, X @ V, odds))


@register_study
class DropBlockFig3(_Comparison):
    """DropConnect against dropout, with inputs for which they are the same and inputs for which they are not."""

    name = "dropblock-fig3"
    reference = f"Fig. 3 {shallow.REFERENCE}"


@register_study
class DropBlockFig6(_Comparison):
    """Fig. 3 of structured dropout for more retain probabilities."""

    name = "dropblock-fig6"
    reference = f"Fig. 6 (appendix E) {shallow.REFERENCE}"
