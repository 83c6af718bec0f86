"""Figure 4 of the structured dropout paper: blocks anywhere against blocks on a grid."""

from typing import Any

import pydantic
from pydantic import Field
from torch import Tensor

from solver_plugins.dropblock import GridBlocks, OverlappingBlocks, SampledScheme, Scheme, structured_dropout
from solver_plugins.studies import dropblock_shallow as shallow
from solver_plugins.studies.figures import label, legend, line, new_figure
from solver_plugins.studies.study import Cell, Context, Measured, Results, Table, register_study

GRID, MATCHED, PRINTED, UNMATCHED = "grid", "overlapping-matched", "overlapping-printed", "overlapping-unmatched"
_LABELS = {
    GRID: "grid",
    MATCHED: "anywhere, every unit kept as often",
    PRINTED: "anywhere, section 5.3 as printed",
    UNMATCHED: "anywhere, the grid's theta",
}


class OverlapConfig(shallow.BlockConfig):
    """Settings of Fig. 4."""

    theta: float = Field(0.5, gt=0, lt=1, description="Retain probability of the grid's blocks.")
    arms: list[str] = Field(list(_LABELS), min_length=1, description=f"Of {', '.join(_LABELS)}.")

    @pydantic.field_validator("arms")
    @classmethod
    def _known(cls, arms: list[str]) -> list[str]:
        unknown = [arm for arm in arms if arm not in _LABELS]
        if unknown:
            raise ValueError(f"expected arms of {', '.join(_LABELS)}; found {unknown[0]!r}")
        return arms


def scheme_of(arm: str, theta: float, r: int, width: int) -> tuple[Scheme, Tensor]:
    """Returns a scheme and its characteristic matrix.

    - matched: seeds are retained with ``theta^(1/r)``, so every unit is kept with probability theta, as on the grid.
    - printed: section 5.3 keeps a unit if *some* block that it lies in is kept, with ``1 - (1 - theta)^(1/r)`` for a
      block: the complement of overlapping dropped blocks. Every unit is kept with probability theta here, too, but this
      is not DropBlock: the units that stay are contiguous, not those that are dropped.
    - unmatched: seeds are retained with theta, so a unit is kept with probability ``theta^r`` only.
    """
    if arm == GRID:
        scheme: Scheme = GridBlocks(theta, r)
    elif arm == PRINTED:
        other = OverlappingBlocks(1 - theta, r)
        # Cov(1 - z) = Cov(z), and the mean is theta instead of 1 - theta.
        cbar = other.characteristic_matrix((width,)) * ((1 - theta) / theta) ** 2
        return SampledScheme(lambda n, size, generator: ~other.mask((n,), size, generator=generator), theta), cbar
    else:
        scheme = OverlappingBlocks(theta if arm == MATCHED else theta**r, r)
    return scheme, scheme.characteristic_matrix((width,))


@register_study
class DropBlockFig4(shallow.ShallowStudy[OverlapConfig]):
    """DropBlock with blocks anywhere against blocks on a grid, and the rule that matches them."""

    name = "dropblock-fig4"
    reference = f"Fig. 4 {shallow.REFERENCE}"
    Config = OverlapConfig
    heading = "blocks"

    def cells(self) -> list[Cell]:
        return Cell.grid(arm=self.config.arms, seed=self.config.seeds)

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        config = self.config
        width, r = config.sizes.hidden, config.block_size
        problem = shallow.synthetic(config.sizes, cell.seed)
        minimum = problem.minimum(config.theta, r)
        scheme, cbar = scheme_of(cell.arm, config.theta, r, width)

        def predict(X: Tensor, V: Tensor, U: Tensor) -> Tensor:
            return structured_dropout(X @ V, scheme) @ U.mT

        found = shallow.train(problem, config.descent, shallow.objective_with(problem, cbar), predict, context).values()
        return {
            "kept": scheme.mean,
            "grid_minimum": minimum.objective,
            "over_grid_minimum": None if found["final"] is None else found["final"] / minimum.objective,
            **found,
        }

    def row_name(self, one: Measured) -> str:
        return _LABELS[one.cell.arm]

    def tables(self, results: Results) -> list[Table]:
        config = self.config
        return self.cell_table(
            results,
            f"Blocks of {config.block_size}, theta {config.theta:g}, {config.descent.iterations} steps",
            {
                "a unit is kept": shallow.value("kept", ".4g"),
                "objective at the end": shallow.FINAL,
                "/ the grid's minimum": shallow.value("over_grid_minimum", ".4f"),
                "sampled / deterministic": shallow.agreement,
            },
            "The paper shows curves that are 'very close in log-scale', no numbers. The rule that it prints keeps "
            "contiguous units instead of dropping them; the one that matches DropBlock is theta^(1/r).",
        )

    def draw(self, results: Results) -> Any:
        figure, axes = new_figure(1, 1, width=8.0, height=4.0)
        panel = axes[0][0]
        for index, arm in enumerate(self.config.arms):
            for one in results.of(arm=arm, seed=self.config.seeds[0]):
                panel.plot(*shallow.plotted(one, "sampled"), **line(index, alpha=0.3))
                panel.plot(*shallow.plotted(one, "objective"), **line(index, label=_LABELS[arm]))
        minimum = results.of(seed=self.config.seeds[0])[-1].values["grid_minimum"]
        panel.axhline(minimum, color="#444444", linestyle=":", label="the grid's global minimum")
        label(panel, "iteration (pale: sampled)", "objective", log="xy")
        legend(panel, outside=True)
        return figure
