"""Rank and balance of what DropBlock learns, over retain probabilities and block sizes, against the theory."""

import math
from typing import Any, Self

import pydantic
import torch
from pydantic import Field
from torch import Tensor

from solver_plugins.dropblock import GridBlocks
from solver_plugins.dropblock.retain import check_divides
from solver_plugins.studies import dropblock_shallow as shallow
from solver_plugins.studies.figures import COLOURS, label, legend, name_each, new_figure, whole_numbers
from solver_plugins.studies.study import Cell, Context, Measured, Results, Table, register_study


class RankConfig(shallow.ShallowConfig):
    """Settings of the study of rank and balance."""

    thetas: shallow.Thetas = Field([0.3, 0.5, 0.7, 0.9], min_length=1, description="Retain probabilities.")
    block_sizes: list[int] = Field([1, 2, 5, 10, 25, 50], min_length=1, description="Each divides the width.")
    threshold: float = Field(0.01, gt=0, lt=1, description="Singular values below this share of the first are zero.")

    @pydantic.model_validator(mode="after")
    def _fits(self) -> Self:
        for size in self.block_sizes:
            if size < 1:
                raise ValueError(f"expected block sizes of at least one; found {size}")
            check_divides(size, self.sizes.hidden)
        return self


@register_study
class DropBlockRank(shallow.ShallowStudy[RankConfig]):
    """Rank and balance of trained networks over retain probabilities and block sizes, against Theorems 2.5 and 2.7."""

    name = "dropblock-rank"
    reference = f"Theorems 2.5 to 2.7 {shallow.REFERENCE}; the paper has no such table"
    Config = RankConfig
    heading = "theta, block"

    def cells(self) -> list[Cell]:
        config = self.config
        return Cell.grid(arm=["trained"], theta=config.thetas, block=config.block_sizes, seed=config.seeds)

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        config, theta, r = self.config, float(cell["theta"]), int(cell["block"])
        problem = shallow.synthetic(config.sizes, cell.seed)
        minimum = problem.minimum(theta, r)
        objective = shallow.objective_of(problem, GridBlocks(theta, r))
        trained = shallow.train(problem, config.descent, objective, None, context)
        found = torch.linalg.svdvals(problem.X @ trained.V @ trained.U.mT)
        predicted = minimum.singular_values
        return {
            "gap": trained.objective[-1] / minimum.objective - 1,
            "attainable": r * minimum.fewest_blocks <= config.sizes.hidden,
            "rank": _rank(found, config.threshold),
            "predicted_rank": _rank(predicted, config.threshold),
            "effective_rank": effective_rank(found),
            "predicted_effective_rank": effective_rank(predicted),
            "singular_value_error": float((found - predicted).norm() / predicted.norm()),
            "balance": balance(problem.X, trained.U, trained.V, r),
            "balance_at_first": balance(problem.X, problem.U, problem.V, r),
            "curves": {"singular_values": found.tolist(), "predicted": predicted.tolist()},
        }

    def row_name(self, one: Measured) -> str:
        return f"{one.cell['theta']:g}, {one.cell['block']}"

    def tables(self, results: Results) -> list[Table]:
        return self.cell_table(
            results,
            "Trained without sampling, against the closed form",
            {
                "gap": lambda one: f"{100 * one.values['gap']:.3f}%" + ("" if one.values["attainable"] else " (bound)"),
                "rank": shallow.value("rank", "d"),
                "rank, predicted": shallow.value("predicted_rank", "d"),
                "effective rank": shallow.value("effective_rank", ".1f"),
                "effective rank, predicted": shallow.value("predicted_effective_rank", ".1f"),
                "balance": lambda one: f"{one.values['balance_at_first']:.2f} → {one.values['balance']:.2f}",
            },
            "Rank: singular values of the output above "
            f"{100 * self.config.threshold:g}% of the first. Effective rank: exp of their entropy. "
            "Balance: smallest over largest norm of the blocks' outputs, at first and at last; 1 by Theorem 2.5. "
            "(bound): this width has too few blocks to attain the closed form.",
        )

    def summary(self, results: Results) -> dict[str, Any]:
        reached = [one.values for one in results if one.values["attainable"]]
        return {
            "largest_gap": max(results.each("gap")),
            "largest_gap_where_attainable": max((one["gap"] for one in reached), default=None),
            "smallest_balance": min(results.each("balance")),
            "largest_singular_value_error": max(results.each("singular_value_error")),
        }

    def draw(self, results: Results) -> Any:
        figure, axes = new_figure(1, 3)
        ranks, values, balances = axes[0]
        seed = self.config.seeds[0]
        sizes = sorted(self.config.block_sizes)
        for index, theta in enumerate(self.config.thetas):
            found = [results.of(theta=theta, block=size, seed=seed)[0].values for size in sizes]
            colour, name = COLOURS[index % len(COLOURS)], rf"$\theta$ = {theta:g}"
            ranks.plot(sizes, [one["effective_rank"] for one in found], "o", color=colour, label=name)
            ranks.plot(sizes, [one["predicted_effective_rank"] for one in found], "-", color=colour)
            balances.plot(sizes, [one["balance"] for one in found], "o-", color=colour, label=name)
        middle = self.config.thetas[len(self.config.thetas) // 2]
        for index, size in enumerate(sizes):
            curves = results.of(theta=middle, block=size, seed=seed)[0].values["curves"]
            colour = COLOURS[index % len(COLOURS)]
            numbers = range(1, len(curves["predicted"]) + 1)
            values.plot(numbers, curves["singular_values"], "o", markersize=3, color=colour, label=f"blocks of {size}")
            values.plot(numbers, curves["predicted"], "-", color=colour)
        for panel in (ranks, balances):
            name_each(panel, sizes)
        label(ranks, "block size", "effective rank of the output", "dots: trained, lines: predicted")
        label(values, "number", "singular value of the output", rf"$\theta$ = {middle:g}")
        label(balances, "block size", "smallest / largest block")
        whole_numbers(values)
        balances.set_ylim(0, 1.05)
        for panel in axes[0]:
            legend(panel)
        return figure


def _rank(values: Tensor, threshold: float) -> int:
    return int((values > threshold * values[0]).sum())


def effective_rank(values: Tensor) -> float:
    """Returns the exponential of the entropy of the singular values (Roy and Vetterli, 2007)."""
    shares = values / values.sum()
    shares = shares[shares > 0]
    return math.exp(float(-(shares * shares.log()).sum()))


def balance(X: Tensor, U: Tensor, V: Tensor, r: int) -> float:
    """Returns the smallest over the largest ``|X V_k U_k^T|_F`` of the blocks k."""
    features, weights = (X @ V).unflatten(1, (-1, r)), U.unflatten(1, (-1, r))
    squares = torch.einsum("nkr,nks,akr,aks->k", features, features, weights, weights)
    # A single block is balanced; a zero block beside a nonzero one is not.
    return float((squares.min() / squares.max()).clamp(min=0).sqrt()) if float(squares.max()) > 0 else 1.0
