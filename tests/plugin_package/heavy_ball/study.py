"""How far three solvers are from the minimum, iteration by iteration."""

from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import nn

from solver_plugins import SolverLinear
from solver_plugins.studies import Cell, Context, Results, Study, StudyConfig, Table


class RaceConfig(StudyConfig):
    """Settings of the race."""

    inputs: int = Field(64, ge=1, description="Input features of the layer.")
    outputs: int = Field(32, ge=1, description="Output features of the layer.")
    batch: int = Field(16, ge=1, description="How many problems are solved.")
    iters: int = Field(10, ge=2, description="How many iterations are taken.")
    solvers: list[str] = Field(
        ["proxgd", "fista", "heavy_ball"],
        min_length=1,
        description="Who takes part.",
    )


class HeavyBallRace(Study[RaceConfig]):
    """Gap to the minimum of a random layer's problem, by solver and iteration."""

    name = "heavy-ball-race"
    tags = ("third_party",)
    reference = "No paper: an example of a study in a package of its own"
    Config = RaceConfig
    settings = Path(__file__).with_name("heavy-ball-race.yaml")

    def cells(self) -> list[Cell]:
        return [Cell(solver, seed) for solver in self.config.solvers for seed in self.config.seeds]

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        # The random state depends on the seed alone: all solvers get the same layer and inputs.
        layer = nn.Linear(self.config.inputs, self.config.outputs).double()
        u = torch.randn(self.config.batch, self.config.inputs, dtype=torch.float64)
        with torch.no_grad():
            objective = self._objective(layer, u, cell.arm, self.config.iters)
            least = self._objective(layer, u, "fista", 1000)[-1]
        gap = ((objective - least) / (objective[0] - least)).clamp_min(0).tolist()
        return {"gap": gap[-1], "curves": {"gap": gap}}

    def _objective(
        self,
        layer: nn.Linear,
        u: torch.Tensor,
        solver: str,
        iters: int,
    ) -> torch.Tensor:
        options = {"solver": solver, "iters": iters, "lam": 1e-3}
        block = SolverLinear.from_linear(layer, nn.ReLU(), **options)
        return block.eval().diagnose(u).objective.sum(1)

    def tables(self, results: Results) -> list[Table]:
        rows = []
        for solver in self.config.solvers:
            gaps = results.of(arm=solver).each("gap")
            rows.append((solver, f"{sum(gaps) / len(gaps):.1e}"))
        title = f"Gap left after {self.config.iters} iterations"
        return [Table(title, ("solver", "gap"), rows, "That of one is 1.")]

    def draw(self, results: Results) -> Any:
        from solver_plugins.studies.figures import COLOURS, legend, new_figure

        figure, axes = new_figure(1, 1)
        for colour, solver in zip(COLOURS, self.config.solvers, strict=False):
            curves = torch.tensor([one.values["curves"]["gap"] for one in results.of(arm=solver)])
            counts = range(1, self.config.iters + 1)
            axes[0][0].semilogy(counts, curves.mean(0), color=colour, label=solver)
        axes[0][0].set_xlabel("iteration")
        axes[0][0].set_ylabel("gap to the minimum")
        legend(axes[0][0])
        return figure
